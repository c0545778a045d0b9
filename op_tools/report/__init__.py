"""The page of a run: reads what the tools left in a folder and makes views of it, as a file or live.

It reads records, traces, captures and losses; it changes nothing and executes nothing that it reads.
"""

from __future__ import annotations

from .gather import page_of as page_of
from .run import ReportError as ReportError
from .run import Run as Run

__all__ = ["page_of", "ReportError", "Run"]
