"""Operators on soft write, view and resize exactly as on the CPU: same values, same strides, same memory."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.soft.sweep import difference, to_device

QUICK = settings(max_examples=60, deadline=None)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.complex64, torch.int64, torch.int8, torch.uint8, torch.bool)
FP8 = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
]


def same(cpu: Any, soft: Any) -> None:
    why = difference(cpu, soft)
    assert not why, why


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# --- in-place and views -----------------------------------------------------------


def test_inplace_returns_the_same_tensor_and_writes_its_memory():
    x = torch.ones(3, device="soft")
    address = x.data_ptr()
    assert x.add_(1) is x
    assert x.data_ptr() == address
    assert x.tolist() == [2, 2, 2]


def test_inplace_through_a_view_is_seen_by_the_base():
    x = torch.zeros(3, 4, device="soft")
    x[1].fill_(5)
    x.t()[2].add_(1)
    x.view(-1)[::5].mul_(10)
    y = torch.zeros(3, 4)
    y[1].fill_(5)
    y.t()[2].add_(1)
    y.view(-1)[::5].mul_(10)
    same(y, x)


def test_writing_past_a_copy_does_not_reach_the_original():
    x = torch.zeros(3, device="soft")
    x.clone().fill_(1)
    x.cpu().fill_(1)
    x.to("soft:1").fill_(1)
    assert x.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1:],
        lambda t: t[:, ::2],
        lambda t: t.t(),
        lambda t: t.unsqueeze(1),
        lambda t: t.expand(2, 3, 4),
        lambda t: t.view(4, 3),
        lambda t: t.reshape(2, 6),
        lambda t: t.unfold(1, 2, 1),
        lambda t: t.diagonal(),
        lambda t: t.as_strided((2, 2), (1, 4), 2),
        lambda t: t.split(2)[0],
        lambda t: t.chunk(2)[1],
        lambda t: t.unbind(1)[2],
        lambda t: t.narrow(0, 1, 2),
        lambda t: t.permute(1, 0),
        lambda t: t.detach(),
        lambda t: t.view(torch.int32),
        lambda t: t.flatten(),
        lambda t: t.movedim(0, 1),
        lambda t: torch._neg_view(t),
    ],
)
def test_a_view_shares_storage(view):
    host = torch.arange(12.0).view(3, 4)
    x = host.to("soft")
    seen = view(x)
    same(view(host), seen)
    assert storage(seen) == storage(x)
    assert seen.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_the_same_tensor_twice_is_the_same_memory():
    for device in ("cpu", "soft"):
        x = torch.arange(4.0, device=device)
        torch.add(x, x, out=x)
        assert x.tolist() == [0, 2, 4, 6]
    x = torch.arange(4.0, device="soft")
    with pytest.raises(RuntimeError, match="single memory location"):
        x[1:].add_(x[:-1])
    y = torch.arange(4.0)
    with pytest.raises(RuntimeError, match="single memory location"):
        y[1:].add_(y[:-1])


def test_an_output_that_is_an_input_keeps_its_identity():
    x = torch.randn(3, device="soft")
    assert x.contiguous() is x
    assert x.to("soft") is x
    assert x.requires_grad_() is x
    out = torch.empty(3, device="soft")
    assert torch.sin(x.detach(), out=out) is out
    values, indices = torch.empty(0, device="soft"), torch.empty(0, dtype=torch.long, device="soft")
    result = torch.sort(x.detach(), out=(values, indices))
    assert result[0] is values
    assert result[1] is indices
    assert values.shape == (3,)


# --- out= and resizing -----------------------------------------------------------------


def test_out_is_resized_and_its_storage_grows():
    out = torch.empty(0, device="soft")
    view_before = out.untyped_storage()
    torch.add(torch.ones(1000, device="soft"), 1, out=out)
    assert out.shape == (1000,)
    assert out.sum().item() == 2000
    assert out.untyped_storage()._cdata == view_before._cdata
    assert out.untyped_storage().nbytes() == 4000


def test_out_on_the_second_device_stays_there():
    out = torch.empty(0, device="soft:1")
    before = torch.soft.memory_allocated(1), torch.soft.memory_allocated(0)
    torch.mm(torch.ones(20, 30, device="soft:1"), torch.ones(30, 40, device="soft:1"), out=out)
    assert out.device == torch.device("soft:1")
    assert out.untyped_storage().device == torch.device("soft:1")
    assert torch.soft.memory_allocated(1) - before[0] == 20 * 40 * 4
    assert torch.soft.memory_allocated(0) == before[1]


def test_out_of_the_wrong_shape_warns_and_resizes_as_on_the_cpu():
    for device in ("cpu", "soft"):
        out = torch.empty(2, device=device)
        with pytest.warns(UserWarning, match="was resized"):
            torch.add(torch.ones(5, device=device), 1, out=out)
        assert out.shape == (5,)


def test_out_non_contiguous_keeps_its_strides():
    host, soft = torch.zeros(4, 3).t(), torch.zeros(4, 3, device="soft").t()
    a = torch.randn(3, 4)
    torch.exp(a, out=host)
    torch.exp(a.to("soft"), out=soft)
    assert soft.stride() == (1, 3)
    same(host, soft)


@pytest.mark.parametrize("device", ["soft:0", "soft:1"])
def test_resize_keeps_content_and_device(device):
    x = torch.arange(4.0).to(device)
    x.resize_(3000)
    assert x[:4].tolist() == [0, 1, 2, 3]
    assert x.untyped_storage().device == torch.device(device)
    x.resize_(2, 2)
    assert x.tolist() == [[0, 1], [2, 3]]
    assert x.untyped_storage().nbytes() == 12000
    x.untyped_storage().resize_(16)
    assert x.tolist() == [[0, 1], [2, 3]]


def test_set_makes_two_tensors_share_memory():
    x = torch.arange(6.0, device="soft")
    y = torch.empty(0, device="soft")
    assert y.set_(x) is y
    y[0] = 9
    assert x[0].item() == 9
    z = torch.empty(0, device="soft").set_(x.untyped_storage(), 2, (2, 2), (1, 2))
    same(torch.arange(6.0).as_strided((2, 2), (1, 2), 2), z)
    z.set_()
    assert z.numel() == 0
    assert z.device == x.device
    grown = torch.empty(0, device="soft:1").set_(torch.UntypedStorage(4, device="soft:1"), 0, (100,))
    assert grown.untyped_storage().device == torch.device("soft:1")


def test_data_and_swap():
    x = torch.nn.Parameter(torch.zeros(2, device="soft"))
    y = torch.ones(2, device="soft")
    x.data = y
    assert storage(x) == storage(y)
    torch.utils.swap_tensors(x, torch.nn.Parameter(torch.full((2,), 3.0, device="soft")))
    assert x.tolist() == [3, 3]


def test_as_strided_scatter_and_overlapping_memory():
    base = torch.arange(5.0)
    same(base.as_strided((3, 3), (1, 1)), base.to("soft").as_strided((3, 3), (1, 1)))
    with pytest.raises(RuntimeError, match="single memory location"):
        base.to("soft").expand(3, 5).add_(1)


def test_storage_outlives_its_tensor():
    x = torch.arange(4.0, device="soft")
    kept = x.untyped_storage()
    del x
    y = torch.empty(0, device="soft").set_(kept, 0, (4,))
    assert y.tolist() == [0, 1, 2, 3]


def test_result_memory_is_freed_with_the_last_view():
    before = torch.soft.memory_allocated()
    x = torch.ones(1000, device="soft") * 2
    view = x[10:20]
    del x
    assert torch.soft.memory_allocated() - before == 4000
    del view
    assert torch.soft.memory_allocated() == before


# --- lazily conjugated and negated, complex ----------------------------------------------


def test_conj_and_neg_are_lazy_and_resolved_on_use():
    host = torch.randn(3, 4, dtype=torch.complex64)
    x = host.to("soft")
    assert x.conj().is_conj()
    assert x.conj().imag.is_neg()
    assert storage(x.conj()) == storage(x)
    same(host.conj() @ host.t().conj(), x.conj() @ x.t().conj())
    same(host.conj().imag * 2, x.conj().imag * 2)
    same(host.conj().resolve_conj(), x.conj().resolve_conj())
    same(host.conj().resolve_conj(), x.conj().cpu().resolve_conj())
    y, z = host.clone(), x.clone()
    y.conj().mul_(1j)
    z.conj().mul_(1j)
    same(y, z)


def test_complex_parts_are_views():
    x = torch.zeros(3, dtype=torch.complex64, device="soft")
    x.real.fill_(1)
    x.imag.fill_(2)
    assert x.tolist() == [1 + 2j] * 3
    pairs = torch.view_as_real(x)
    pairs[..., 0] = 7
    assert x[0].item() == 7 + 2j
    assert storage(torch.view_as_complex(pairs)) == storage(x)


# --- unusual tensors -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2), ()])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_and_zero_dim(shape, dtype):
    host = torch.ones(shape, dtype=dtype)
    x = host.to("soft")
    for op in (
        lambda t: t.clone(),
        lambda t: t.sum(),
        lambda t: t.unsqueeze(0),
        lambda t: torch.cat([t.flatten(), t.flatten()]),
        lambda t: t == t,
        lambda t: t.expand(2, *t.shape),
    ):
        same(op(host), op(x))


def test_bool_masks():
    host = torch.randn(4, 5)
    x = host.to("soft")
    same(host[host > 0], x[x > 0])
    same(host.masked_fill(host > 0, 1), x.masked_fill(x > 0, 1))
    same((host > 0).nonzero(), (x > 0).nonzero())
    same((host > 0) & (host < 1), (x > 0) & (x < 1))
    host[host > 0] = 0
    x[x > 0] = 0
    same(host, x)
    assert bool((x <= 0).all())


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8(dtype):
    host = torch.randn(4, 5)
    x = host.to("soft")
    same(host.to(dtype), x.to(dtype))
    same(host.to(dtype).to(torch.float32), x.to(dtype).to(torch.float32))
    same(host.to(dtype).t()[1:], x.to(dtype).t()[1:])
    same(torch.cat([host.to(dtype)] * 2), torch.cat([x.to(dtype)] * 2))
    assert x.to(dtype).device.type == "soft"


def test_inference_mode():
    with torch.inference_mode():
        x = torch.ones(3, device="soft") * 2
        assert x.is_inference()
        assert x[1:].is_inference()
        x.add_(1)
    with pytest.raises(RuntimeError, match="nference tensor"):
        x.add_(1) * torch.ones(3, device="soft", requires_grad=True)


def test_channels_last_is_kept():
    host = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    x = host.to("soft")
    assert x.is_contiguous(memory_format=torch.channels_last)
    weight = torch.randn(6, 3, 3, 3)
    same(torch.nn.functional.conv2d(host, weight), torch.nn.functional.conv2d(x, weight.to("soft")))


def test_deterministic_mode_fills_uninitialized_memory():
    torch._C._set_deterministic_algorithms(True)
    try:
        assert torch.empty(100, device="soft").isnan().all()
        assert torch.empty_strided((3,), (2,), device="soft").isnan().all()
        assert torch.empty(2, device="soft").resize_(50)[2:].isnan().all()
        assert (torch.empty(5, dtype=torch.int32, device="soft") == torch.iinfo(torch.int32).max).all()
    finally:
        torch._C._set_deterministic_algorithms(False)


# --- lists of tensors ---------------------------------------------------------------------------


def test_lists_of_tensors_may_span_devices():
    a, b = torch.ones(2, device="soft:0"), torch.ones(3, device="soft:1")
    sums = torch._foreach_add([a, b], 1)
    assert [t.device.index for t in sums] == [0, 1]
    torch._foreach_mul_([a, b], 3)
    assert a.tolist() == [3, 3]
    assert b.tolist() == [3, 3, 3]
    torch._foreach_copy_([a, b], [torch.zeros(2), torch.zeros(3)])
    assert a.sum().item() == b.sum().item() == 0


def test_operators_of_other_libraries_run_on_the_same_memory():
    library = torch.library.Library("soft_alias_test", "DEF")
    library.define("double_(Tensor(a!) x) -> Tensor(a!)")
    library.define("pair(Tensor x) -> (Tensor, Tensor)")
    library.impl("double_", lambda x: x.mul_(2), "CPU")
    library.impl("pair", lambda x: (x + 1, x - 1), "CPU")
    x = torch.ones(3, device="soft")
    assert torch.ops.soft_alias_test.double_(x) is x
    assert x.tolist() == [2, 2, 2]
    up, down = torch.ops.soft_alias_test.pair(x)
    assert up.device == x.device
    assert (up - down).tolist() == [2, 2, 2]
    library.define("nowhere(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="the CPU has none"):
        torch.ops.soft_alias_test.nowhere(x)


# --- any shape, any strides, any dtype -------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> torch.Tensor:
    """A CPU tensor of random shape, strides (also zero) and offset."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 3))
    size = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides) if n > 0)
    dtype = draw(st.sampled_from(dtypes))
    values = torch.arange(size, dtype=torch.float64).sub(size // 2).mul(0.37)
    return values.to(dtype).as_strided(shape, strides, offset)


OPERATORS = {
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "double": lambda t: t.to(torch.float64) if not t.is_complex() else t,
    "eq": lambda t: t == t,
    "stack": lambda t: torch.stack([t, t]),
    "sum": lambda t: t.sum(),
    "flip": lambda t: t.flip(tuple(range(t.dim()))),
    "where": lambda t: torch.where(t == t, t, t),
    "zeros_like": lambda t: torch.zeros_like(t),
    "flatten": lambda t: t.flatten(),
    "unsqueeze": lambda t: t.unsqueeze(-1),
    "squeeze": lambda t: t.squeeze(),
}


@QUICK
@given(layouts(), st.sampled_from(sorted(OPERATORS)))
def test_any_layout_forward(host, name):
    soft = to_device(host, "soft")
    assert (soft.shape, soft.stride(), soft.storage_offset()) == (host.shape, host.stride(), host.storage_offset())
    same(OPERATORS[name](host), OPERATORS[name](soft))


@QUICK
@given(layouts(FLOATS), st.booleans())
def test_any_layout_inplace(host, scalar):
    soft = to_device(host, "soft")

    def change(t: torch.Tensor) -> torch.Tensor:
        return t.mul_(3) if scalar else t.copy_(torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape))

    try:
        change(host)
        failed = False
    except RuntimeError:  # several elements in one place
        failed = True
    if failed:
        with pytest.raises(RuntimeError):
            change(soft)
    else:
        change(soft)
        same(
            torch.empty(0, dtype=host.dtype).set_(host.untyped_storage()),
            torch.empty(0, dtype=host.dtype, device="soft").set_(soft.untyped_storage()),
        )


@QUICK
@given(layouts(FLOATS), st.lists(st.integers(0, 4), max_size=3))
def test_any_out_is_resized_like_the_cpus(host, shape):
    soft = to_device(host, "soft")
    results = []
    for source, device in ((host, "cpu"), (soft, "soft")):
        out = torch.zeros(shape, dtype=source.dtype, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.neg(source, out=out)
        results.append(out)
    same(*results)
    assert results[0].untyped_storage().nbytes() == results[1].untyped_storage().nbytes()


@QUICK
@given(layouts(), st.sampled_from(["soft:0", "soft:1"]), st.booleans())
def test_any_layout_moves_between_devices(host, device, non_blocking):
    there = host.to(device, non_blocking=non_blocking)
    assert there.device == torch.device(device)
    same(host.clone(), there.clone())
    same(host.clone(), there.to("soft:0").cpu())
