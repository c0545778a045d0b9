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

from . import draws, freedoms, linear_algebra, moves, pointwise, reductions  # noqa: F401
