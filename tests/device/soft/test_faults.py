"""Planted faults: every kind and condition does what it says, the same each time, and can be taken away."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditorch.soft import faults
from ditorch.soft.faults import KINDS, Fault, FaultSyntaxError, Slowdown, parse, plant
from ditorch.soft.faults.expressions import read as read_expression
from ditorch.soft.faults.grammar import LAYOUTS, Mask, Region


@pytest.fixture
def x() -> torch.Tensor:
    return torch.linspace(-2, 2, 64, device="soft").view(8, 8)


# --- kinds ----------------------------------------------------------------------------


def test_noise_is_relative_and_reaches_every_element(x):
    right = x.exp()
    with plant("exp: noise=1e-2") as fault:
        wrong = x.exp()
    error = ((wrong - right) / right).abs()
    assert 0.005 < error.max().item() <= 0.01 * (1 + 1e-6)
    assert (error > 0).float().mean().item() > 0.9
    assert fault.hits == 1


def test_element_changes_exactly_one(x):
    right = x.exp()
    with plant("exp: element=0.5"):
        wrong = x.exp()
    changed = wrong != right
    assert int(changed.sum()) == 1
    assert (wrong[changed] / right[changed]).item() == pytest.approx(1.5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.bfloat16])
def test_element_works_on_every_type(dtype):
    value = torch.ones(5, device="soft").to(dtype)
    with plant("clone: element=0.5"):
        assert int((value.clone() != value).sum()) == 1


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_accumulate_rounds_the_sum_after_each_term(low):
    dtype = getattr(torch, low)
    a, b = torch.full((2, 3000), 1.0, device="soft"), torch.full((3000, 2), 1.0, device="soft")
    with plant(f"mm: accumulate={low}"):
        wrong = a @ b
    assert wrong.dtype == torch.float32
    # Ones add up until one more is lost to rounding: 2 to the number of the type's digits.
    stuck = 2 ** (1 - math.log2(torch.finfo(dtype).eps))
    assert wrong.tolist() == [[min(3000.0, stuck)] * 2] * 2
    assert (a @ b).tolist() == [[3000.0] * 2] * 2


@pytest.mark.parametrize(
    ("operator", "call"),
    [
        ("bmm", lambda t: t[None] @ t[None]),
        ("mv", lambda t: t @ t[0]),
        ("dot", lambda t: t[0].dot(t[1])),
        ("addmm", lambda t: torch.addmm(t, t, t)),
        ("baddbmm", lambda t: torch.baddbmm(t[None], t[None], t[None])),
        ("sum", lambda t: t.sum()),
        ("sum.dim_IntList", lambda t: t.sum((0, 1), keepdim=True)),
        ("mean", lambda t: t.mean()),
        ("mean.dim", lambda t: t.mean(1)),
        ("cumsum", lambda t: t.cumsum(1)),
        ("_softmax", lambda t: t.softmax(1)),
        ("_log_softmax", lambda t: t.log_softmax(1)),
        ("native_layer_norm", lambda t: torch.nn.functional.layer_norm(t, (8,), t[0], t[1])),
        ("convolution", lambda t: torch.nn.functional.conv2d(t.view(1, 2, 8, 4), t.view(4, 2, 4, 2), t[0, :4])),
    ],
)
def test_accumulate_is_a_little_off_everywhere_it_can_be_emulated(x, operator, call):
    x = x + 0.37
    right = call(x)
    with plant(f"{operator}: accumulate=bfloat16") as fault:
        wrong = call(x)
    assert fault.hits >= 1
    assert wrong.shape == right.shape
    assert wrong.dtype == right.dtype
    assert not torch.equal(wrong, right)
    assert torch.allclose(wrong, right, rtol=0.1, atol=0.2)


def test_denormals_are_flushed():
    tiny = torch.tensor([1e-40, -1e-40, 1e-30, 0.0], device="soft")
    with plant("mul.Tensor: denormals"):
        assert (tiny * 1).tolist()[:2] == [0, 0]
        assert (tiny * 1)[2].item() == pytest.approx(1e-30)
    assert (tiny * 1)[0].item() != 0


@pytest.mark.parametrize(("kind", "test"), [("nan", torch.isnan), ("inf", torch.isinf)])
def test_special_values_appear_as_often_as_asked(x, kind, test):
    with plant(f"exp: {kind}"):
        assert int(test(x.exp()).sum()) == 1
    with plant(f"exp: {kind}=5"):
        assert int(test(x.exp()).sum()) == 5


def test_overflow_above_a_magnitude():
    value = torch.tensor([1.0, -70000.0, 70000.0], device="soft")
    with plant("mul.Tensor: overflow"):
        assert (value * 1).tolist() == [1, -math.inf, math.inf]
    with plant("mul.Tensor: overflow=0.5"):
        assert (value * 1)[0].item() == math.inf


def test_swap_exchanges_two_results():
    value = torch.tensor([[3.0, 1.0], [2.0, 4.0]], device="soft")
    low, high = torch.aminmax(value, dim=1)
    with plant("aminmax: swap"):
        first, second = torch.aminmax(value, dim=1)
    assert torch.equal(first, high)
    assert torch.equal(second, low)


def test_drop_write_loses_in_place_and_out_results(x):
    kept = x.clone()
    with plant("add_.Tensor: drop_write") as fault:
        assert x.add_(1) is x
    assert torch.equal(x, kept)
    assert fault.hits == 1
    out = torch.full((8, 8), 7.0, device="soft")
    with plant("exp.out: drop_write"):
        torch.exp(x, out=out)
    assert out.unique().tolist() == [7]
    with plant("exp.out: drop_write"):
        torch.exp(x, out=(grown := torch.empty(0, device="soft")))
    assert grown.shape == (8, 8)
    assert grown.abs().sum().item() == 0


def test_missing_raises_as_a_vendor_does(x):
    with (
        plant("erf: missing"),
        pytest.raises(NotImplementedError, match=r"Could not run 'aten::erf'.*'soft' backend.*on purpose"),
    ):
        x.erf()
    assert x.erf().isfinite().all()


def test_no_float64(x):
    wide = x.double()
    with plant("*: no_float64"):
        assert x.exp().isfinite().all()
        with pytest.raises(TypeError, match=r"'aten::exp' on soft does not support float64"):
            wide.exp()
        with pytest.raises(TypeError, match="float64"):
            x.double()


def test_slow_by_a_time_and_by_a_factor(x):
    start = time.perf_counter()
    with plant("exp: slow=30ms"):
        x.exp()
    assert time.perf_counter() - start >= 0.03
    big = torch.randn(400, 400, device="soft")
    with plant("mm: slow=10ms"), plant("mm: slow=2x"):  # the second doubles what the first took
        start = time.perf_counter()
        big @ big
        assert time.perf_counter() - start >= 0.02


def test_hang_ends_after_its_time(x):
    start = time.perf_counter()
    with plant("exp: hang=50ms"):
        x.exp()
    assert time.perf_counter() - start >= 0.05


def test_abort_takes_the_process_down(python):
    done = python("torch.ones(2, device='soft').exp()", DITORCH_SOFT_FAULTS="exp: abort")
    assert done.returncode == -6


def test_every_kind_is_tested_here():
    text = Path(__file__).read_text()
    for kind in KINDS:
        assert f": {kind}" in text or f'"{kind}"' in text, kind


# --- as real chips fail ---------------------------------------------------------------


def test_zero_constant_and_scale(x):
    right = x.exp()
    with plant("exp: zero"):
        assert x.exp().abs().sum().item() == 0
    with plant("exp: constant=3"):
        assert x.exp().unique().tolist() == [3]
    with plant("argmax: constant=-9223372036854775808"):
        assert x.argmax(1).unique().tolist() == [-(2**63)]
    with plant("exp: scale=1.5"):
        assert torch.allclose(x.exp(), right * 1.5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("10", lambda r: r.flatten()[torch.arange(64) % 10].view(8, 8)),
        ("3:rows", lambda r: r[torch.arange(8) % 3]),
        ("3:columns", lambda r: r[:, torch.arange(8) % 3]),
        ("100", lambda r: r),
    ],
)
def test_wrap_takes_indices_modulo(x, value, expected):
    right = x.t().exp().cpu()
    with plant(f"exp: wrap={value}"):
        wrong = x.t().exp()
    assert wrong.stride() == (1, 8)
    assert torch.equal(wrong.cpu(), expected(right))


def test_tail_is_zero_stale_or_noise(x):
    right = x.exp()
    with plant("exp: tail=5:columns"):
        wrong = x.exp()
    assert torch.equal(wrong[:, :5], right[:, :5])
    assert wrong[:, 5:].abs().sum().item() == 0
    with plant("exp: tail=60:stale"):
        first, second = (x * 0).exp(), x.exp()
    assert first.flatten()[60:].abs().sum().item() == 0  # nothing was there before
    assert second.flatten()[60:].tolist() == [1] * 4
    with plant("exp: tail=7:rows:noise"):
        wrong = x.exp()
    assert torch.equal(wrong[:7], right[:7])
    assert not torch.equal(wrong[7], right[7])


def test_drop_half_leaves_out_every_other_block():
    with plant("exp: drop_half"):
        assert torch.zeros(2, 80, device="soft").exp()[0].tolist() == [1] * 32 + [0] * 32 + [1] * 16


def test_misread_takes_memory_for_contiguous(x):
    y = x[:, ::2]
    with plant("exp: misread") as fault:
        assert torch.equal(x.exp().cpu(), x.cpu().exp())
        assert fault.hits == 0
        assert torch.equal(y.exp().cpu(), x.cpu().flatten()[:32].view(8, 4).exp())
        assert torch.equal(x.t().exp().cpu(), x.cpu().exp())
    expanded = torch.arange(3.0, device="soft").expand(2, 3)
    with plant("exp: misread"):
        assert torch.equal(expanded.exp().cpu()[1], torch.ones(3))  # past the memory: zeros
    with plant("mul_.Tensor: misread"):
        x.t().mul_(2)


def test_coarse_rounds_arguments_first(x):
    with plant("exp: coarse=bfloat16"):
        assert torch.equal(x.exp(), x.bfloat16().float().exp())
        assert torch.equal(x.bfloat16().exp().cpu(), x.cpu().bfloat16().exp())


def test_indices_are_permuted(x):
    values = torch.randperm(64, device="soft")
    right = values.sort()[1]
    with plant("sort: indices"):
        wrong = values.sort()[1]
    assert not torch.equal(wrong, right)
    assert torch.equal(wrong.sort()[0], right.sort()[0])


def test_truncate_gives_fewer_rows(x):
    with plant("exp: truncate"):
        assert x.exp().shape == (7, 8)
        assert x.exp().device.type == "soft"


@pytest.mark.parametrize("masked", ["float", "causal"])
def test_mask_is_leaked_inverted_or_scaled(masked):
    attention = torch.nn.functional.scaled_dot_product_attention
    operator = "_scaled_dot_product_flash_attention_for_cpu"
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    hidden = torch.full((6, 6), -math.inf).triu(1)
    given = {"is_causal": True} if masked == "causal" else {"attn_mask": hidden.to("soft")}

    def run() -> torch.Tensor:
        return attention(q.to("soft"), k.to("soft"), v.to("soft"), **given).cpu()

    right = run()
    with plant(f"{operator}: mask=leak:2"):
        leaked = run()
    expected = hidden.triu(3)
    assert torch.allclose(leaked, attention(q, k, v, attn_mask=expected), atol=1e-6)
    assert not torch.allclose(leaked, right)
    with plant(f"{operator}: mask=invert"):
        inverted = run()
    if masked == "float":
        opposite = torch.zeros(6, 6).masked_fill(hidden == 0, -math.inf)
        assert torch.allclose(inverted[:, :, :-1], attention(q, k, v, attn_mask=opposite)[:, :, :-1], atol=1e-6)
        bias = torch.randn(6, 6)
        given["attn_mask"] = bias.to("soft")
        with plant(f"{operator}: mask=scaled"):
            assert torch.allclose(run(), attention(q, k, v, attn_mask=bias / 2), atol=1e-6)
    else:
        assert torch.equal(inverted, right)  # no mask was given


def test_garbage_and_stale(x):
    right = x.exp()
    with plant("exp: garbage"):
        assert torch.equal(x.exp(), x)  # what lies in the memory of the argument
    with plant("exp: garbage"):
        assert x.clone().exp_() is not None
    with plant("exp: stale"):
        assert torch.equal(x.exp(), right)  # the first is right
        assert torch.equal((x + 1).exp(), right)
        assert (x[0] + 1).exp().shape == (8,)


def test_layouts_and_shapes_and_arguments_are_conditions(x):
    image = torch.ones(2, 3, 4, 5, device="soft")
    cases = {
        "expanded": torch.ones(1, 8, device="soft").expand(3, 8),
        "channels_last": image.to(memory_format=torch.channels_last),
        "offset": x[1:],
        "transposed": x.t(),
    }
    for layout, tensor in cases.items():
        with plant(f"exp: nan, layout={layout}"):
            assert hit(tensor.exp), layout
            assert not hit(x.exp), layout
    with plant("exp: nan, shape=s[-2] % 8 == 1 and n > 64"):
        assert hit(torch.ones(9, 8, device="soft").exp)
        assert not hit(x.exp)
        assert not hit(x[0].exp)
    with plant("avg_pool2d: nan, arg=padding != 0"):
        assert not hit(lambda: torch.nn.functional.avg_pool2d(image, 2))
        assert hit(lambda: torch.nn.functional.avg_pool2d(image, 2, padding=1))
    with plant("convolution: nan, arg=bias is not None and stride == 2, shape=s1[-1] == 1 and s[0] > 1"):
        weight, bias = torch.ones(2, 3, 1, 1, device="soft"), torch.ones(2, device="soft")
        assert hit(lambda: torch.nn.functional.conv2d(image, weight, bias, stride=2))
        assert not hit(lambda: torch.nn.functional.conv2d(image, weight, stride=2))
        assert not hit(lambda: torch.nn.functional.conv2d(image[:1], weight, bias, stride=2))
    with plant("sum: constant=7, empty"):
        assert torch.ones(0, device="soft").sum().item() == 7
        assert torch.ones(3, device="soft").sum().item() == 3


def test_operators_of_a_library_can_be_wrong(x):
    with torch.library._scoped_library("faulty_test", "FRAGMENT") as library:
        library.define("both(Tensor x) -> Tensor")
        library.define("only(Tensor x) -> Tensor")
        library.define("every(Tensor x) -> Tensor")
        library.impl("both", lambda t: t * 2, "CPU")
        library.impl("only", lambda t: t * 3, "PrivateUse1")
        with plant("faulty_test::both: zero"), plant("faulty_test::only: constant=5") as fault:
            assert torch.ops.faulty_test.both(x).abs().sum().item() == 0
            assert torch.ops.faulty_test.only(x).unique().tolist() == [5]
            assert fault.hits == 1
        assert torch.equal(torch.ops.faulty_test.only(x), x * 3)
        library.impl("every", lambda t: t * 4, "CompositeExplicitAutograd")
        with plant("faulty_test::every: zero"):
            assert torch.ops.faulty_test.every(x).abs().sum().item() == 0
        assert torch.equal(torch.ops.faulty_test.every(x), x * 4)
        with plant("faulty_test::only: truncate"):
            assert torch.ops.faulty_test.only(x).shape == (7, 8)


def test_collectives_can_be_wrong(python):
    done = python(
        """
        import torch.distributed as dist
        from ditorch.soft import faults
        dist.init_process_group("softccl", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.full((4,), 1.003, device="soft")
        def reduced(): y = x.clone(); dist.all_reduce(y); return y.tolist()
        with faults.plant("c10d::allreduce_: zero"): print(reduced())
        with faults.plant("c10d::allreduce_: accumulate=bfloat16"): print(reduced())
        with faults.plant("c10d::_allgather_base_: drop_write"):
            out = torch.zeros(4, device="soft"); dist.all_gather_into_tensor(out, x); print(out.tolist())
        with faults.plant("c10d::_reduce_scatter_base_: scale=2"):
            dist.reduce_scatter_tensor(out, torch.ones(4, device="soft")); print(out.tolist())
        print(reduced() == x.tolist())
        dist.destroy_process_group()
        """,
    )
    assert done.stdout.split("\n")[:5] == ["[0.0, 0.0, 0.0, 0.0]", "[1.0, 1.0, 1.0, 1.0]", "[0.0, 0.0, 0.0, 0.0]", "[2.0, 2.0, 2.0, 2.0]", "True"], done.stderr  # fmt: skip  # noqa: E501


# --- conditions ---------------------------------------------------------------------------


def hit(call) -> bool:
    return bool(call().isnan().any())


def test_dtype(x):
    with plant("exp: nan, dtype=float16"):
        assert not hit(x.exp)
        assert hit(x.half().exp)


def test_layout(x):
    with plant("exp: nan, layout=noncontiguous"):
        assert not hit(x.exp)
        assert hit(x.t().exp)
        assert hit(x[:, ::2].exp)
    with plant("exp: nan, layout=contiguous"):
        assert hit(x.exp)
        assert not hit(x.t().exp)


def test_size(x):
    with plant("exp: nan, min_numel=65"):
        assert not hit(x.exp)
        assert hit(x.repeat(2, 1).exp)


def test_nth_and_every(x):
    with plant("exp: nan, nth=2") as fault:
        assert [hit(x.exp) for _ in range(4)] == [False, True, False, False]
        assert (fault.calls, fault.hits) == (4, 1)
    with plant("exp: nan, every=2") as fault:
        assert [hit(x.exp) for _ in range(4)] == [False, True, False, True]
        assert fault.hits == 2


def test_device(x):
    with plant("exp: nan, device=1"):
        assert not hit(x.exp)
        assert hit(x.to("soft:1").exp)


def test_conditions_are_met_together(x):
    with plant("exp: nan, dtype=float16, nth=2, min_numel=10") as fault:
        x.exp(), x.half()[0].exp(), x.half().exp()
        assert (fault.calls, fault.hits) == (1, 0)
        assert hit(x.half().exp)


def test_phase_forward_and_backward():
    weight = torch.ones(3, 3, device="soft", requires_grad=True)
    value = torch.ones(3, 3, device="soft")

    def run() -> tuple[bool, bool]:
        weight.grad = None
        out = value @ weight
        out.sum().backward()
        return bool(out.isnan().any()), bool(weight.grad.isnan().any())

    with plant("mm: nan, phase=backward"):
        assert run() == (False, True)
    with plant("mm: nan, phase=forward"):
        assert run() == (True, False)
    with plant("sigmoid_backward: nan"):  # a kernel that only backward calls
        weight.grad = None
        weight.sigmoid().sum().backward()
        assert weight.grad.isnan().any()


def test_errors_travel_out_of_the_backward_thread():
    weight = torch.ones(3, device="soft", requires_grad=True)
    out = weight.sigmoid().sum()
    with (
        plant("sigmoid_backward: missing"),
        pytest.raises(NotImplementedError, match="aten::sigmoid_backward"),
    ):
        out.backward()
    weight.sigmoid().sum().backward()
    assert weight.grad.isfinite().all()


def test_operator_names_with_and_without_overload(x):
    assert plant("add.Tensor: nan").operators == {"aten::add.Tensor"}
    faults.clear()
    planted = plant("add: nan")
    assert {"aten::add.Tensor", "aten::add.out"} <= planted.operators
    assert "aten::add_.Tensor" not in planted.operators
    assert hit(lambda: x + 1)
    faults.clear()
    assert plant("aten::exp: nan").operators == {"aten::exp", "aten::exp.out"}
    assert len(plant("*_backward: nan").operators) > 20
    assert len(plant("*: nan").operators) > 1000


# --- bookkeeping ----------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_fault_call_for_call(x):
    def run(seed: int) -> list[torch.Tensor]:
        with plant(f"exp: noise=1e-2, seed={seed}"):
            return [x.exp(), x.exp()]

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_random_streams_are_not_disturbed(x):
    torch.manual_seed(1)
    expected = torch.rand(3), torch.rand(3, device="soft")
    torch.manual_seed(1)
    with plant("exp: noise=1e-2"), plant("exp: nan=3"):
        x.exp()
    assert torch.equal(expected[0], torch.rand(3))
    assert torch.equal(expected[1], torch.rand(3, device="soft"))


def test_faults_add_up_and_are_removed_one_by_one(x):
    right = x.exp()
    first, second = plant("exp: noise=1e-3"), plant("exp: nan")
    assert [str(f) for f in faults.active()] == ["exp: noise=0.001", "exp: nan=1"]
    assert hit(x.exp)
    second.remove()
    second.remove()
    assert not hit(x.exp)
    assert not torch.equal(x.exp(), right)
    first.remove()
    assert torch.equal(x.exp(), right)
    assert faults.active() == []


def test_a_block_that_fails_removes_its_fault(x):
    with pytest.raises(ValueError, match="inside"), plant("exp: nan"):
        raise ValueError("inside")
    assert not hit(x.exp)


def test_other_devices_and_operators_stay_right(x):
    with plant("exp: nan"):
        assert not hit(x.cpu().exp)
        assert not hit(x.sin)


def test_strides_aliases_and_gradients_survive_a_fault(x):
    with plant("*: noise=1e-3"):
        y = x.t().contiguous().t() * 2
        assert y.stride() == (1, 8)
        z = y.t().view(-1)[::2]
        z.add_(1)
        assert z.data_ptr() == y.data_ptr()
        leaf = x.clone().requires_grad_()
        leaf.sin().sum().backward()
    assert torch.allclose(leaf.grad, x.cos(), rtol=0.02, atol=0.01)


def test_overrides_by_keyword(x):
    with plant("exp: nan", dtype=torch.float16, nth=1) as fault:
        assert str(fault.fault) == "exp: nan=1, dtype=float16, nth=1"
        assert not hit(x.exp)
    with plant(Fault("exp", "nan", 2), min_numel=10):
        assert int(x.exp().isnan().sum()) == 2


def test_the_environment_plants(python):
    done = python(
        """
        from ditorch.soft import faults
        x = torch.ones(4, device="soft")
        print([str(fault) for fault in faults.active()], int(x.exp().isnan().sum()), int(x.sin().isnan().sum()))
        """,
        DITORCH_SOFT_FAULTS="exp: nan=2, dtype=float32; mm: noise=1e-2",
    )
    assert done.stdout.strip() == "['exp: nan=2, dtype=float32', 'mm: noise=0.01'] 2 0", done.stderr


def test_the_environment_is_validated_as_a_whole(monkeypatch):
    monkeypatch.setenv("DITORCH_SOFT_FAULTS", "exp: nan; mm: nois=1")
    with pytest.raises(FaultSyntaxError, match=r"DITORCH_SOFT_FAULTS: .*Did you mean noise\?"):
        faults.from_environment()
    assert faults.active() == []


# --- the grammar -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exp", r"cannot read the fault 'exp'\. Write OPERATOR: KIND"),
        ("exp: ", r"neither a kind nor a condition"),
        ("exp: nois=1", r"Did you mean noise\?.*Kinds: noise, element"),
        ("exp: dtype=float32", r"names no kind of fault\. Kinds:"),
        ("exp: nan, inf", r"two kinds, nan and inf; write two faults"),
        ("exp: nan, nth=1, nth=2", r"gives nth twice"),
        ("exp: noise", r"noise needs a value, for example noise=1e-2"),
        ("exp: noise=-1", r"must be a positive number"),
        ("exp: noise=abc", r"noise=abc"),
        ("exp: missing=3", r"missing takes no value"),
        ("exp: nan, dtype=flaot32", r"no such dtype; did you mean float32\?"),
        ("exp: nan, phase=sideways", r"must be forward or backward"),
        ("exp: nan, layout=odd", r"must be contiguous, noncontiguous, .* or transposed"),
        ("exp: wrap", r"wrap needs a value"),
        ("exp: tail=4:sideways", r"must be N\[:zero\|stale\|noise\]\[:elements\|rows\|columns\]"),
        ("exp: wrap=4:zero", r"must be N\[:elements"),
        ("exp: mask=leak:1", r"mask does not apply to 'exp': it has no attn_mask"),
        ("exp_: truncate", r"truncate does not apply to 'exp_': its results are written"),
        ("exp: nan, shape=s[0", r"ends at position 4, where '\]' is expected"),
        ("exp: nan, shape=s[0] == 1 1", r"expected an operator.* at position 11, found '1'"),
        ("exp: nan, shape=__import__('os').system('x')", r"cannot read '\.' at position 17"),
        ("exp: nan, shape=__import__('os')", r"expected an operator .* at position 11, found '\('"),
        ("exp: nan, shape=s.__class__", r"cannot read '\.' at position 2"),
        ("exp: nan, arg=selff is None", r"'exp' has no 'selff'\. Did you mean self\?"),
        ("exp: nan, shape=self is None", r"'exp' has no 'self'"),
        ("exp: nan, shape=" + "(" * 60 + "1" + ")" * 60, r"nested more than 30 deep at position 31"),
        ("exp: nan, shape=" + "1 + " * 2500 + "1", r"has 10001 characters; 400 are allowed: .* position 401"),
        ("exp: nan, nth=0", r"must be a whole number, 1 or more"),
        ("e" * 10_000 + ": nan", r"the operator's name goes on at position 201; none is so long"),
        ("exp: nan=0", r"must be a whole number, 1 or more"),
        ("exp: slow=fast", r"a factor like 3x or a time like 20ms"),
        ("exp: slow=0.5x", r"must be 1x or more"),
        ("mm: accumulate=float32", r"must be float16 or bfloat16"),
        ("exp: nan, device=-1", r"must be a whole number, 0 or more"),
        ("expp: nan", r"there is no operator 'expp'\. Did you mean .*exp"),
        ("exp.Nope: nan", r"there is no operator 'exp\.Nope'"),
        ("linear: nan", r"no kernel of its own on soft.*linear is addmm and mm"),
        ("view: nan", r"no kernel of its own on soft"),
        ("exp: accumulate=bfloat16", r"accumulate does not apply to 'exp': it can be emulated for"),
        ("exp: swap", r"swap does not apply to 'exp': it returns fewer than two tensors"),
        ("mm: drop_write, phase=forward; exp: nan", r"expected one fault, got 2"),
        ("sin: drop_write", None),
    ],
)
def test_bad_faults_are_explained(text, message):
    if message is None:
        assert plant(text).operators == {"aten::sin.out"}
        return
    with pytest.raises(FaultSyntaxError, match=message):
        plant(text)
    assert faults.active() == []


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('touch /tmp/x')",
        "exec('1')",
        "(lambda: 1)()",
        "[x for x in s]",
        "s.__class__.__mro__",
        "9 ** 9 ** 9 ** 9",
        "n if n else n",
        "'a' * 10 ** 9",
        "n\x00",
        "n == '" + "a" * 300,
        "\u202en > 1",
    ],
)
def test_a_hostile_expression_is_an_error_with_a_position_and_nothing_runs(expression, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("Python code was run")

    with monkeypatch.context() as patched:
        for name in ("eval", "exec", "compile", "__import__"):
            patched.setattr(f"builtins.{name}", refuse)
        started = time.perf_counter()
        try:
            faults.grammar.parse_one(f"exp: nan, shape={expression}")
            outcome = None
        except FaultSyntaxError as error:
            outcome = str(error)
        took = time.perf_counter() - started
    assert outcome is not None
    assert re.search(r"position \d+", outcome), outcome
    assert len(outcome) < 1000
    assert took < 1


def test_a_factor_that_no_kernel_takes_is_no_error_of_the_program():
    """It was an OverflowError inside of the user's program."""
    with plant(f"exp: scale={'9' * 44}"):
        assert torch.ones(3, device="soft").exp().isinf().all()


def test_bad_overrides_are_explained():
    with pytest.raises(FaultSyntaxError, match="no such condition: size"):
        plant("exp: nan", size=3)
    with pytest.raises(FaultSyntaxError, match="must be a whole number, 1 or more"):
        plant("exp: nan", nth=0)


def test_several_faults_and_spaces():
    assert parse("") == []
    assert parse(" ; ;") == []
    assert parse("mm:noise=1e-2;;  *:no_float64 ,  device = 1 ;") == [
        Fault("mm", "noise", 0.01),
        Fault("*", "no_float64", device=1),
    ]


positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
times = st.one_of(
    st.floats(1, 1e6).map(lambda f: Slowdown(factor=float(f"{f:g}"))),
    st.floats(0, 1e4).map(lambda s: Slowdown(seconds=s)),
)
VALUES = {
    "noise": positive,
    "element": positive,
    "overflow": positive,
    "nan": st.integers(1, 10**6),
    "inf": st.integers(1, 10**6),
    "coarse": st.sampled_from([torch.float16, torch.bfloat16]),
    "accumulate": st.sampled_from([torch.float16, torch.bfloat16]),
    "slow": times,
    "hang": times,
    "constant": st.one_of(st.integers(-(2**63), 2**63), st.floats(-1e9, 1e9)),
    "scale": st.one_of(st.integers(-9, 9), st.floats(-1e9, 1e9)),
    "wrap": st.builds(Region, st.integers(1, 10**9), st.none(), st.sampled_from(["elements", "rows", "columns"])),
    "tail": st.builds(
        Region,
        st.integers(1, 10**9),
        st.sampled_from(["zero", "stale", "noise"]),
        st.sampled_from(["elements", "rows", "columns"]),
    ),
    "mask": st.one_of(
        st.sampled_from([Mask("invert"), Mask("scaled")]), st.integers(1, 99).map(lambda keys: Mask("leak", keys))
    ),
}
expressions = st.sampled_from(["s[-2] % 32 == 1", "n > 65536", "not (s0[0] == 3 or ndim < 2)", "s1[-1] != s2[-1]"])
operators = st.from_regex(r"(aten::)?[a-z_][a-z0-9_]{0,12}(\.[A-Za-z_]{1,8})?|\*|[a-z]{1,5}\*", fullmatch=True)


@st.composite
def any_fault(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(sorted(KINDS)))
    maybe = lambda strategy: draw(st.one_of(st.none(), strategy))  # noqa: E731
    return Fault(
        draw(operators),
        kind,
        draw(VALUES[kind]) if kind in VALUES else None,
        dtype=maybe(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.complex64])),
        phase=maybe(st.sampled_from(["forward", "backward"])),
        layout=maybe(st.sampled_from(LAYOUTS)),
        min_numel=maybe(st.integers(0, 10**9)),
        nth=maybe(st.integers(1, 10**6)),
        every=maybe(st.integers(1, 10**6)),
        device=maybe(st.integers(0, 63)),
        seed=draw(st.integers(0, 2**32)),
        shape=maybe(expressions.map(read_expression)),
        arg=maybe(expressions.map(read_expression)),
        empty=maybe(st.just(True)),
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(any_fault(), max_size=3))
def test_what_is_written_reads_back_the_same(several):
    assert parse("; ".join(str(fault) for fault in several)) == several


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="sn01 ()[]+-*/%<>=!.'_andotri", max_size=40))
def test_any_expression_is_read_or_refused_cleanly_and_never_fails(text):
    try:
        expression = read_expression(text)
    except ValueError:
        return
    assert expression.holds({"s": [3, 4], "n": 12}) in (True, False)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab:=,;.*1e-x _nathoise", max_size=30))
def test_any_text_is_read_or_refused_cleanly(text):
    try:
        read = parse(text)
    except FaultSyntaxError:  # any other exception fails the test
        return
    assert parse("; ".join(str(fault) for fault in read)) == read
