"""The registry of operator facts: each name is registered once, and a name that PyTorch does not have is reported.

`KERNELS` holds facts about ATen operators, `FUNCTIONS` facts about functions that users call; the package docstring
says how to add one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from ...compat import aten_operator_names, autograd_nodes

Facts = TypeVar("Facts")


class Kind:
    """How an operator's kernel rounds."""

    VIEW = "view"  # no kernel
    EXACT = "exact"  # moves, selects or compares values
    SELECT = "select"  # exact, but free to choose among equal values
    POINTWISE = "pointwise"  # a function of a few values
    REDUCE = "reduce"  # sums many values in a wide accumulator, rounds once
    CONTRACT = "contract"  # a product of matrices; partial sums may be stored
    SCATTER = "scatter"  # adds into memory, value by value, in the result's dtype
    SCAN = "scan"  # running sums, each stored
    MATRIX = "matrix"  # factors matrices: errors are relative to the whole matrix
    FACTORY = "factory"  # computes a sequence from its endpoints
    RESAMPLE = "resample"  # weights come from coordinates, which are rounded at the size of the image


CPU: Final = ("cpu", "soft", "privateuseone")  # device types that run the CPU's kernels
CUDA: Final = ("cuda",)
MEASURED: Final = frozenset(CPU + CUDA)


class KernelFacts(NamedTuple):
    """What is known of an ATen operator beyond its schema and tags."""

    kind: str = ""  # one of `Kind`; empty: pointwise where PyTorch says so, else a reduction
    accuracy: float = 1.0  # largest error of its function, in rounding errors of the dtype it is computed in
    fused: bool = False  # does several steps in one kernel, each of which rounds; PyTorch's decomposition lists them
    steps: Callable[..., Any] | None = None  # the same steps, where PyTorch's decomposition cannot be used
    hidden_steps: bool = False  # runs other operators that the dispatcher does not show
    rounded_once: bool = False  # correctly rounded by IEEE 754 on every device
    exact_if_real: bool = False  # of complex numbers: a root of squares, and a quotient by it
    low_on: tuple[str, ...] = ()  # device types whose kernel computes in the result's dtype, even a half type
    adds_rows_low: bool = False  # the CPU sums gradients of weights over rows in their own dtype
    sum_of_products: bool = False  # squaring all inputs squares every term
    plain_move: bool = False  # the same, as values are moved only
    jumps: bool = False  # rounds a quotient to the dtype and then to an integer: one step off is no error
    length: Callable[[Any], int] | None = None  # how many values at most go into one element, from the arguments
    optimizer: Callable[..., Any] | None = None  # a fused optimizer: its steps in plain operators


class IndexFacts(NamedTuple):
    """How a function that returns indices is called."""

    dim: Any  # default of its parameter `dim`; None and ...: all dimensions
    position: int = 1  # of `dim` among the arguments
    permutes: bool = False  # no index may occur twice


class FunctionFacts(NamedTuple):
    """What is known of a function that users call."""

    bookkeeping: bool = False  # only asks about a tensor or sets it up: no kernel of a model runs
    collective: bool = False
    converts: str = ""  # "dtype", "device" or "both": what its result differs in
    reflected: bool = False  # an operator with its operands swapped
    uninitialised: bool = False  # returns whatever is in memory
    left_out: str = ""  # why its result cannot be compared
    bound_to_dtype: bool = False  # its result depends on the dtype itself, not only on the values
    bound_on: tuple[str, ...] = ()  # the same on these device types alone: they round places to the dtype
    inplace_option: bool = False  # has a parameter `inplace`
    autocast_low: bool = False  # autocast runs it in the lower precision
    cudnn: bool = False  # a recurrent network that cuDNN runs
    factors_at: int | None = None  # position of the first of two matrices that it multiplies
    draws: bool = False  # draws random numbers, though no schema says so
    law: str = ""  # "samples", or "dropout" with "alpha" or "channel" before it: what must hold for whatever it draws
    stays: bool = False  # without arithmetic: stays on the device when operators fall back to the CPU
    moves: bool = False  # copies between devices
    aliases: bool = False  # its results are views, never copies: no kernel runs
    writes: tuple[int, ...] = ()  # positions of arguments that it writes to, though its schema does not say so
    updates: tuple[str, ...] = ()  # parameters that it writes to in training, and no version counts that
    indices: IndexFacts | None = None
    free_vectors: tuple[tuple[int, int], ...] = ()  # (number of the result, dimension along a vector of any sign)
    may_be_empty: tuple[int, ...] = ()  # numbers of the results that some of its algorithms do not compute
    defaults: Callable[[Any, Any, torch.finfo], Any] | None = None  # writes out defaults that depend on the dtype
    dense_on_cpu: bool = False  # the CPU's kernel reads an expanded argument wrongly: it gets a dense copy


class _Entry(NamedTuple):
    place: str
    since: str
    maybe: str


class Registry(Generic[Facts]):
    """Facts by name; `by_name` is the dict to look them up in.

    >>> registry = Registry("kernel", lambda: {"mm", "bmm"})
    >>> registry.register("mm bmm", KernelFacts(Kind.CONTRACT))
    >>> registry.by_name["mm"].kind, registry.unknown()
    ('contract', [])
    """

    def __init__(self, what: str, known: Callable[[], Collection[str]]) -> None:
        self.by_name: dict[str, Facts] = {}
        self._what, self._known = what, known
        self._entries: dict[str, _Entry] = {}
        _REGISTRIES.append(self)

    def register(self, names: str, facts: Facts, *, since: str = "", maybe: str = "") -> None:
        """Add names, separated by blanks, with the facts that hold for each; a name is registered once.

        `linalg_*` are all names that begin with `linalg_`, `round.decimals` is one overload, `gelu+gelu_backward` one
        kernel after the other. `since`: the first PyTorch with these names; `maybe`: why a PyTorch may lack them.
        """
        frame = sys._getframe(1)
        entry = _Entry(f"{frame.f_code.co_filename}:{frame.f_lineno}", since, maybe)
        for name in names.split():
            if name in self.by_name:
                earlier = self._entries[name].place
                raise ValueError(f"{self._what} {name!r} is registered twice: at {earlier} and {entry.place}")
            self.by_name[name], self._entries[name] = facts, entry

    def names(self, holds: Callable[[Facts], Any]) -> frozenset[str]:
        """All names whose facts fulfil a condition (`FUNCTIONS.names(lambda f: f.draws)`)."""
        return frozenset(name for name, facts in self.by_name.items() if holds(facts))

    def unknown(self) -> list[str]:
        """Names that this PyTorch should have but lacks, each with the place where it is registered."""
        known = self._known()

        def exists(name: str) -> bool:
            if name.endswith("*"):
                return any(k.startswith(name[:-1]) for k in known)
            return all(part in known for part in name.split("+"))

        return [
            f"{self._what} {name!r} ({entry.place})"
            for name, entry in self._entries.items()
            if not (entry.maybe or (entry.since and torch.__version__ < entry.since) or exists(name))
        ]


_REGISTRIES: Final[list[Registry[Any]]] = []
_PYTORCHS_OWN: Final = ("aten", "prims")  # libraries of operators


def unknown_names() -> list[str]:
    """Names in any registry that this PyTorch should have but lacks (`unknown_names() == []`)."""
    return [line for registry in _REGISTRIES for line in registry.unknown()]


def base_name_of(schema_name: str) -> str:
    """Plain name of an ATen operator (`base_name_of("aten::_foreach_add_") == "add"`); other libraries' stay whole."""
    space, _, name = schema_name.partition("::")
    return name.removeprefix("_foreach_").strip("_").removesuffix("_copy") if space in _PYTORCHS_OWN else schema_name


@functools.cache
def last_name(name: str) -> str:
    """The last part of a dotted name, without that of an overload.

    An operator of another library (`vllm.rms_norm`) keeps the library's name: what is known of PyTorch's function of
    that name, such as its arguments, does not hold for it.

    >>> last_name("torch.Tensor.add"), last_name("aten.add_.Tensor")
    ('add', 'add_')
    """
    first, *rest = name.split(".")
    if first == "aten" and rest:
        return rest[0]
    if first != "torch" and rest and rest[0].isidentifier() and _is_operator(first, rest[0]):
        return f"{first}.{rest[0]}" if first not in _PYTORCHS_OWN else rest[0]
    return rest[-1] if rest else first


def _is_operator(space: str, name: str) -> bool:
    try:
        return hasattr(getattr(torch.ops, space), name)
    except (AttributeError, RuntimeError):  # not a library: a module, or a text of any kind
        return False


def _aten_names() -> list[tuple[str, str, str]]:
    return [name.partition(".") for name in aten_operator_names() if name.startswith("aten::")]


def kernel_names() -> set[str]:
    """Plain names of all ATen operators, alone and with each overload (`"var.correction" in kernel_names()`)."""
    found = [(base_name_of(name), overload) for name, _, overload in _aten_names()]
    return {name for name, _ in found} | {f"{name}.{overload}" for name, overload in found}


def function_names() -> set[str]:
    """Last parts of the names of all functions of PyTorch; `distributed.` precedes those of `torch.distributed`."""
    homes = (torch, torch.Tensor, torch.nn.functional, torch.nn.init, torch.special, torch.linalg)
    found = {name.partition("::")[2] for name, _, _ in _aten_names()}.union(*map(dir, homes))
    return found | {f"distributed.{name}" for name in dir(torch.distributed)}


KERNELS: Final = Registry[KernelFacts]("kernel", kernel_names)
FUNCTIONS: Final = Registry[FunctionFacts]("function", function_names)
NODES: Final = Registry[bool]("autograd node", lambda: dir(autograd_nodes))  # whether a node runs a kernel
_NO_FACTS: Final = FunctionFacts()


def function_facts(name: str) -> FunctionFacts:
    """What is registered for a function (`function_facts("torch.linalg.svd").free_vectors`)."""
    return FUNCTIONS.by_name.get(last_name(name), _NO_FACTS)
