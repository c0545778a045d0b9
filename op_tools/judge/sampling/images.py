"""Axes of calls on images: convolutions by images and channels, pooling and resampling by images and channels."""

from __future__ import annotations

from collections.abc import Sequence

from ...call.description import Tensor
from .axes import Arguments, Axes, Names, rule


@rule("conv1d", "conv2d", "conv3d")
def convolution(call: Arguments) -> Axes | None:
    """x[n, i, ...], w[o, i, ...], b[o] to y[n, o, ...]; channels in groups are not cut."""
    x, weight, bias = call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    if x.dim() != weight.dim():
        return None
    grouped = call.get(6, "groups", 1) != 1
    rest: Names = (None,) * (x.dim() - 2)
    inside, outside = (None, None) if grouped else ("i", "o")
    if not grouped and x.shape[1] == 1:
        inside = None
    call.call(x, ("n", inside, *rest))
    call.call(weight, (outside, inside, *rest))
    beside = {}
    if isinstance(bias, Tensor):
        call.call(bias, (outside,))
        beside[call.position(bias)] = call.position(weight)
    return call.axes(("n", outside, *rest), beside=beside)


@rule("pad")
def pad(call: Arguments) -> Axes | None:
    """All dimensions that stay as long as they are."""
    x, widths = call.get(0, "input"), call.get(1, "pad")
    if len(call.tensors) != 1 or not isinstance(widths, Sequence) or not x.dim():
        return None
    changed = {x.dim() - 1 - n // 2 for n, width in enumerate(widths) if width != 0}
    names = tuple([f"a{n}" if size != 1 and n not in changed else None for n, size in enumerate(x.shape)])
    call.call(x, names)
    return call.axes(names, fixed_gradient=True)


@rule("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "interpolate", "max_pool1d", "avg_pool1d", "unfold")
def by_image(call: Arguments) -> Axes | None:
    """Images and channels."""
    x = call.get(0, "input")
    if len(call.tensors) != 1 or x.dim() != (3 if call.op.endswith("1d") else 4) or "Tensor.unfold" in call.op:
        return None
    channels = None if call.op.endswith(".unfold") else "c"
    rest: Names = (None,) * (x.dim() - 2)
    call.call(x, ("n", channels, *rest))
    return call.axes(("n", channels, *(rest if channels else (None,))))
