"""What is known about operators beyond PyTorch's own schemas and tags, in one registry.

How to add a fact: find the module of the operator's family and the line that has its name, and set a field there; if it
has no line yet, register it. A kernel goes by its ATen name without overload, in-place mark, `_foreach_` or `_copy`
(`aten::_foreach_add_` is `add`), a function by the last part of its name (`torch.Tensor.add_` is `add_`). Fields and
their meaning: `KernelFacts`, `FunctionFacts`.

    KERNELS.register("special_airy_ai", KernelFacts(accuracy=64))
    FUNCTIONS.register("linear mm", FunctionFacts(autocast_low=True, factors_at=0))
    KERNELS.register("fused_rms_norm", KernelFacts(fused=True), since="2.9")

A name that is registered twice raises at import; `unknown_names()` lists those that this PyTorch does not have.
"""

from __future__ import annotations

from .. import optimizers
from ..registry import FUNCTIONS, KERNELS, FunctionFacts, KernelFacts, Kind, last_name, unknown_names

# All of these register facts, so they come before `calls` and `kernels`, which read them.
from . import bookkeeping, contractions, draws, linear_algebra, moves, pointwise, reductions, selection
from .calls import (
    AUTOCAST_LOW,
    BY_CUDNN,
    COPIES_BETWEEN_DEVICES,
    NODES_WITHOUT_KERNEL,
    STAYS_ON_DEVICE,
    UNDECLARED_WRITES,
    UNINITIALISED,
    adapt,
    is_bound_to_dtype,
    is_optimizer,
    may_mutate,
    names_a_device,
    on_cpu,
    works_on_lists,
)
from .draws import really_draws
from .kernels import (
    Facts,
    adds_rows_low,
    base_name,
    computes_low,
    decomposition,
    facts_for,
    facts_of,
    is_aten,
    is_composition,
    is_sum_of_products,
    jumps,
    least_error,
    length_of_sums,
    rounds_once,
    steps_in_low,
)
from .linear_algebra import gradient_turned, has_free_vectors, turned
from .selection import chosen_values

__all__ = [
    "AUTOCAST_LOW", "COPIES_BETWEEN_DEVICES", "FUNCTIONS", "Facts", "FunctionFacts", "KERNELS", "KernelFacts",
    "Kind", "NODES_WITHOUT_KERNEL", "BY_CUDNN", "STAYS_ON_DEVICE", "UNDECLARED_WRITES", "UNINITIALISED",
    "adapt", "adds_rows_low", "base_name", "bookkeeping", "chosen_values", "computes_low", "contractions",
    "decomposition", "draws", "facts_for", "facts_of", "gradient_turned", "has_free_vectors", "is_aten",
    "is_bound_to_dtype", "is_composition", "is_optimizer", "is_sum_of_products", "jumps", "last_name",
    "least_error", "length_of_sums", "linear_algebra", "may_mutate", "moves", "names_a_device", "on_cpu",
    "optimizers", "pointwise", "really_draws", "reductions", "rounds_once", "selection", "steps_in_low", "turned",
    "unknown_names", "works_on_lists",
]  # fmt: skip
