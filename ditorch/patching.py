"""The ledger of everything ditorch changes in PyTorch: listed, reversible, applied once."""

from ditorch_common.patching import Ledger, Patch, copy_function, full_name

__all__ = ["Ledger", "Patch", "copy_function", "full_name"]
