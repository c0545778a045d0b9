"""Which overloads of PyTorch's operators a run really asked the device for, and which it did not.

PyTorch's databases reach what they reach. The dispatcher knows every overload there is, and a mode just above the
device's kernels sees which of them a call comes to. The two together say what a share of a database hides.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CALLS_PER_CASE: Final = 8
"""Calls of one case that are done again under the mode; the first samples show what the others would."""

KERNEL: Final = "needs a kernel of the device"
DEFAULT: Final = "PyTorch has a default for every device"
ASKED: Final = (KERNEL, DEFAULT)
COMPOSITE: Final = "made of other operators before the device is asked"
NO_TENSOR: Final = "neither takes nor makes a tensor"
OTHER_TENSORS: Final = "for sparse, quantized, nested or oneDNN tensors alone"
OTHER_DEVICES: Final = "a library of one vendor: the CPU has no kernel either"
INTERNAL: Final = "PyTorch's own tests, or its bookkeeping"
UNKNOWN: Final = "unknown: the CPU has no kernel, other devices have"
CLASSES: Final = (KERNEL, DEFAULT, COMPOSITE, NO_TENSOR, OTHER_TENSORS, OTHER_DEVICES, INTERNAL, UNKNOWN)
"""What an overload is to a device; all but the first two and the last are not asked of one."""

_DEFAULTS: Final = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_OTHER_KEYS: Final = (
    *("SparseCPU", "SparseCsrCPU", "QuantizedCPU", "NestedTensorCPU", "MkldnnCPU"),
    *("SparseCUDA", "SparseCsrCUDA", "QuantizedCUDA", "NestedTensorCUDA"),
)
_VENDORS: Final = (
    "cudnn",
    "miopen",
    "cuda",
    "mps",
    "xpu",
    "vulkan",
    "_cslt",
    "hip",
    "mtia",
    "hpu",
    "_fbgemm",
    "mkldnn",
)
_INTERNAL: Final = ("_test_", "_dispatch", "_has_same_storage", "_lazy", "_functional_", "_assert", "_print")


@functools.cache
def overloads() -> Mapping[str, str]:
    """Every overload of `aten` and what it is to a device (`overloads()["aten::mm"] == KERNEL`)."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            found[name] = _class_of(name)
    return found


def _class_of(name: str) -> str:
    """What an overload is to a device, by the kernels that are registered for it here."""
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
    short = name.removeprefix("aten::")
    try:
        schema = _schema(name)
    except Exception:
        return UNKNOWN
    if short.startswith(_INTERNAL):
        return INTERNAL
    if has("CompositeImplicitAutograd"):
        return COMPOSITE
    if not any("Tensor" in str(part.type) for part in (*schema.arguments, *schema.returns)):
        return NO_TENSOR
    if any(vendor in short for vendor in _VENDORS):
        return OTHER_DEVICES
    if has("CPU"):
        return KERNEL
    if any(has(key) for key in _DEFAULTS):
        return DEFAULT
    if any(has(key) for key in _OTHER_KEYS):
        return OTHER_TENSORS
    return OTHER_DEVICES if not has("Meta") else UNKNOWN


def _schema(name: str) -> Any:
    operator, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, operator), overload or "default")._schema


# --- in a worker -------------------------------------------------------------------------------------------


class _Mode(TorchDispatchMode):
    """Notes the overloads that reach the kernels of a device."""

    def __init__(self, seen: set[str], device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._device_type = seen, device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.name.startswith("aten::") and _on(self._device_type, (args, kwargs, result)):
            self._seen.add(f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name)
        return result


def _on(device_type: str, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == device_type
    if isinstance(value, (list, tuple)):
        return any(_on(device_type, each) for each in value)
    return isinstance(value, dict) and _on(device_type, list(value.values()))


class Observer:
    """Does calls again under a mode, a few of each case, and says which overloads it had not seen before.

    The call that is judged runs without it: composites of conjugated views go wrong under a mode in PyTorch.

    Example: ``OBSERVER.begin("soft"); OBSERVER.repeat(lambda: x + x); OBSERVER.new() == ("aten::add.Tensor",)``
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._told: set[str] = set()
        self._left, self._device_type = 0, ""

    def begin(self, device_type: str) -> None:
        """A case begins."""
        self._left, self._device_type = CALLS_PER_CASE, device_type

    def repeat(self, call: Callable[[], Any]) -> None:
        """Do a call again, if this case has calls left; what it raises says nothing about the device."""
        if self._left <= 0:
            return
        self._left -= 1
        try:
            with _Mode(self._seen, self._device_type):
                call()
        except Exception:
            pass

    def new(self) -> tuple[str, ...]:
        """Overloads that this worker saw for the first time since it was last asked; the case has no calls left."""
        self._left = 0
        found = tuple(sorted(self._seen - self._told))
        self._told |= self._seen
        return found


OBSERVER: Final = Observer()


# --- in the parent -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """Overloads by what they are to a device, and those that a run exercised.

    >>> Coverage.of(["aten::mm"]).exercised[KERNEL]
    1
    """

    known: Mapping[str, int]
    exercised: Mapping[str, int]
    missing: tuple[str, ...]
    """Overloads that a device can be asked for, and was not."""

    @classmethod
    def of(cls, seen: Iterable[str]) -> Coverage:
        """Count what was seen; overloads that PyTorch makes of others before a device is asked do not count."""
        classes, found = overloads(), set(seen)
        known = Counter(classes.values())
        exercised = Counter(classes[name] for name in found if name in classes)
        missing = tuple(sorted(n for n, kind in classes.items() if kind in ASKED and n not in found))
        return cls(known, exercised, missing)

    @property
    def share(self) -> tuple[int, int]:
        """Exercised, and all that a device can be asked for."""
        return sum(self.exercised.get(kind, 0) for kind in ASKED), sum(self.known.get(kind, 0) for kind in ASKED)

    def __str__(self) -> str:
        done, asked = self.share
        kernels, needed = self.exercised.get(KERNEL, 0), self.known.get(KERNEL, 0)
        return (
            f"{done:,} of {asked:,} ({100 * done / max(asked, 1):.1f} %) overloads of aten that a device can be asked "
            f"for were exercised; {kernels:,} of the {needed:,} that need a kernel of the device"
        )

    def rows(self) -> list[list[Any]]:
        """What overloads are to a device, how many there are, how many were exercised; None where none is asked."""
        kinds = [kind for kind in CLASSES if self.known.get(kind)]
        return [[kind, self.known[kind], self.exercised.get(kind, 0) if kind in ASKED else None] for kind in kinds]

    def as_dict(self) -> dict[str, Any]:
        """For JSON (`Coverage.of(seen).as_dict()`)."""
        return {"classes": self.rows(), "not_exercised": list(self.missing)}
