"""Autocast on soft really casts, by the lists that GPUs use, and GradScaler scales, skips and recovers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

HALVES = [torch.bfloat16, torch.float16]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="soft")


LOWER = {
    "mm": lambda a: a @ a,
    "linear": lambda a: F.linear(a, a),
    "addmm": lambda a: torch.addmm(a, a, a),
    "bmm": lambda a: torch.bmm(a[None], a[None]),
    "matmul": lambda a: torch.matmul(a, a),
    "conv2d": lambda a: F.conv2d(a[None, None], a[None, None]),
    "baddbmm": lambda a: torch.baddbmm(a[None], a[None], a[None]),
    "attention": lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None]),
    "gru_cell": lambda a: nn.GRUCell(4, 4, device="soft")(a),
    "einsum": lambda a: torch.einsum("ij,jk->ik", a, a),
    "prelu": lambda a: F.prelu(a, a[0, :1]),
}
FP32 = {
    "softmax": lambda a: F.softmax(a, -1),
    "log_softmax": lambda a: F.log_softmax(a, -1),
    "layer_norm": lambda a: F.layer_norm(a, (4,)),
    "exp": torch.exp,
    "log": lambda a: a.log(),
    "pow": lambda a: a.pow(2),
    "sum": lambda a: a.sum(),
    "cumsum": lambda a: a.cumsum(0),
    "norm": lambda a: a.norm(),
    "mse_loss": lambda a: F.mse_loss(a, a),
    "cross_entropy": lambda a: F.cross_entropy(a, torch.zeros(4, dtype=torch.long, device="soft")),
    "cosine_similarity": lambda a: F.cosine_similarity(a, a),
    "rsqrt": torch.rsqrt,
}
UNTOUCHED = {"relu": torch.relu, "add": lambda a: a + a, "gelu": F.gelu, "sigmoid": torch.sigmoid}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", sorted(LOWER))
def test_lower_precision_list(name, dtype):
    with torch.autocast("soft", dtype=dtype):
        assert LOWER[name](ones(4, 4)).dtype == dtype
    assert LOWER[name](ones(4, 4)).dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", sorted(FP32))
def test_fp32_list(name, dtype):
    with torch.autocast("soft", dtype=dtype):
        assert FP32[name](ones(4, 4, dtype=dtype)).dtype == torch.float32
    assert FP32[name](ones(4, 4, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("name", sorted(UNTOUCHED))
def test_other_operators_keep_their_type(name):
    with torch.autocast("soft", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert UNTOUCHED[name](ones(4, 4, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(
    "use",
    [
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.stack([a, b]),
        lambda a, b: torch.addcmul(a, b, b),
        lambda a, b: torch.dot(a[0], b[0]),
        lambda a, b: torch.atan2(a, b),
        lambda a, b: a.scatter_add(0, torch.zeros(4, 4, dtype=torch.long, device="soft"), b),
    ],
)
def test_promote_list_takes_the_widest(use):
    with torch.autocast("soft", dtype=torch.float16):
        assert use(ones(4, 4), ones(4, 4, dtype=torch.float16)).dtype == torch.float32
        assert use(ones(4, 4, dtype=torch.float16), ones(4, 4, dtype=torch.float16)).dtype == torch.float16


def test_values_are_those_of_the_explicit_cast():
    a, b = torch.randn(8, 8, device="soft"), torch.randn(8, 8, device="soft")
    with torch.autocast("soft", dtype=torch.bfloat16):
        cast = a @ b
    assert torch.equal(cast, a.bfloat16() @ b.bfloat16())


def test_an_explicit_dtype_wins():
    with torch.autocast("soft", dtype=torch.bfloat16):
        assert F.softmax(ones(4, dtype=torch.bfloat16), -1, dtype=torch.float64).dtype == torch.float64
        assert ones(4, dtype=torch.float64).sum().dtype == torch.float64
        assert (ones(4, 4, dtype=torch.float64) @ ones(4, 4, dtype=torch.float64)).dtype == torch.float64


def test_nested_disable_and_enable():
    a = ones(4, 4)
    with torch.autocast("soft", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("soft")
        with torch.autocast("soft", enabled=False):
            assert (a @ a).dtype == torch.float32
            with torch.autocast("soft", dtype=torch.float16):
                assert (a @ a).dtype == torch.float16
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16
        assert torch.get_autocast_dtype("soft") == torch.bfloat16
    assert not torch.is_autocast_enabled("soft")


def test_autocast_of_the_cpu_does_not_reach_into_soft_kernels():
    x = torch.randn(30, 4, device="soft")

    def distances() -> torch.Tensor:
        return torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist")  # calls matmul inside its kernel

    expected = distances()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x.t()).dtype == torch.float32
        assert torch.equal(distances(), expected)


def test_weights_are_cast_once_and_gradients_arrive_in_fp32():
    layer = nn.Linear(4, 4, device="soft")
    casts = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].data_ptr() == layer.weight.data_ptr():
                casts.append(args[0].shape)
            return function(*args, **(kwargs or {}))

    with torch.autocast("soft", dtype=torch.bfloat16), Count():
        y = layer(layer(ones(2, 4)))
    assert len(casts) == 1  # cached for the second use
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_bce_is_refused_with_the_remedy():
    with (
        torch.autocast("soft", dtype=torch.float16),
        pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"),
    ):
        F.binary_cross_entropy(ones(3) * 0.5, ones(3))


def test_unsupported_dtype_is_refused_as_on_other_devices():
    with pytest.warns(UserWarning, match=r"float64|not supported"), torch.autocast("soft", dtype=torch.float64):
        assert not torch.is_autocast_enabled("soft")


def test_module_spelling():
    with torch.soft.amp.autocast(dtype=torch.bfloat16):
        assert (ones(2, 2) @ ones(2, 2)).dtype == torch.bfloat16
    assert torch.bfloat16 in torch.soft.get_amp_supported_dtype()
    assert torch.amp.is_autocast_available("soft")


@pytest.mark.parametrize(
    "scaler_type", [lambda **k: torch.soft.amp.GradScaler(**k), lambda **k: torch.amp.GradScaler("soft", **k)]
)
def test_grad_scaler_skips_infinite_steps_and_recovers(scaler_type):
    weight = nn.Parameter(ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = scaler_type(init_scale=4.0, growth_interval=2)
    assert scaler.is_enabled()

    def step(value: float) -> None:
        optimizer.zero_grad()
        scaler.scale((weight * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step(float("inf"))
    assert weight.tolist() == [1, 1, 1]  # skipped
    assert scaler.get_scale() == 2.0  # and backed off
    step(1.0)
    assert weight.tolist() == [0.5, 0.5, 0.5]
    step(1.0)
    assert scaler.get_scale() == 4.0  # grown again
    again = scaler_type()
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == 4.0


def test_unscale_then_clip():
    weight = nn.Parameter(ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("soft", init_scale=1024.0)
    scaler.scale((weight * 3).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [3, 3, 3]
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    assert norm.item() == pytest.approx(27**0.5)
    scaler.step(optimizer)
    assert weight.tolist() == pytest.approx([1 - 3**-0.5] * 3)


@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
def test_custom_forward_and_backward(cast_inputs):
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="soft", cast_inputs=cast_inputs)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            out = a @ b
            seen.append(out.dtype)
            return out

        @staticmethod
        @torch.amp.custom_bwd(device_type="soft")
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            seen.append((grad @ b.t()).dtype)
            return (grad @ b.t()).to(a.dtype), (a.t() @ grad).to(b.dtype)

    a = ones(2, 2).requires_grad_()
    with torch.autocast("soft", dtype=torch.bfloat16):
        Product.apply(a, ones(2, 2)).sum().backward()
    expected = torch.float32 if cast_inputs else torch.bfloat16
    assert seen == [expected, expected]
    assert a.grad.dtype == torch.float32
