"""``ditorch conformance``: how much of PyTorch a device really does, from PyTorch's own databases of test cases.

The parent process (`command.py`) never imports those databases: importing them changes global flags. It hands units of
cases to worker processes (`slot.py`, `worker.py`) through an engine, keeps what comes back (`store.py`), and turns it
into tables and a page (`summary.py`, `page.py`). Only `console.py` prints.
"""

from ditorch.conformance.cases import Case, Result, Unit

__all__ = ["Case", "Result", "Unit"]
