"""One page for everything that a run knows: views made of blocks and tables, in one HTML file or served live.

`blocks` makes the parts, `View` and `Page` put them together, `write_page` writes the file. It knows nothing of what it
shows: every text is data and is shown as text.

>>> from ditorch_common.page import Column, Page, Table, View, blocks, write_page
>>> records = Table("records", [Column.words("op", ["add", "mul"]), Column.numbers("excess", np.array([0.5, 7.25]))])
>>> page = Page("run 7", [View("records", "All records", [blocks.table("records", filters=["op"])])], [records])
>>> "<title>run 7</title>" in page.html()
True
"""

from __future__ import annotations

import numpy as np

from ditorch_common.page import blocks
from ditorch_common.page.address import address
from ditorch_common.page.blocks import Block, Text
from ditorch_common.page.columns import Column, Table
from ditorch_common.page.model import Page, View, read_page, write_page

__all__ = ["Block", "Column", "Page", "Table", "Text", "View", "address", "blocks", "read_page", "write_page"]

del np  # for the example above
