"""What a device may do otherwise than the CPU, and what it may not: freedoms are no excuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ditorch.conformance import freedoms
from ditorch.conformance.cases import NOT_COMPARABLE, PASS, WRONG, Limits
from ditorch.conformance.op_checks import OperatorChecks
from ditorch.conformance.trial import Outcome, Trial, is_sticky


def checks_of(name: str, op: Any = None, dtype: str = "float32", device_type: str = "cpu") -> OperatorChecks:
    """Checks of an operator that is in no database."""
    made = OperatorChecks.__new__(OperatorChecks)
    made.info = SimpleNamespace(name=name, op=op)
    made.unit = SimpleNamespace(name=name, dtype=dtype)
    made.device, made.device_type, made.limits = "cpu", device_type, Limits()
    return made


def sample_of(*args: Any, process: Any = lambda results: results, **kwargs: Any) -> Any:
    return SimpleNamespace(
        input=args[0], args=args[1:], kwargs=kwargs, output_process_fn_grad=process, broadcasts_input=False
    )


# --- samples for others


def test_samples_that_cuda_does_not_take_are_left_out() -> None:
    a, b = torch.ones(3, 2), torch.ones(3, 1)
    assert freedoms.not_for("linalg.lstsq", (a, b), {"driver": "gelsy"}, "cuda")
    assert not freedoms.not_for("linalg.lstsq", (a, b), {"driver": "gels"}, "cuda")
    assert not freedoms.not_for("linalg.lstsq", (a, b), {"driver": "gelsy"}, "npu")
    assert freedoms.not_for("linalg.ldl_solve", (a.cfloat(), b), {"hermitian": True}, "cuda")
    assert not freedoms.not_for("linalg.ldl_solve", (a, b), {"hermitian": True}, "cuda")
    assert not freedoms.not_for("linalg.solve", (a, b), {"driver": "gelsy"}, "cuda")


def test_inputs_that_mix_devices_stay_where_they_are() -> None:
    mixed = SimpleNamespace(
        sample_input=sample_of(torch.ones(3, device="meta"), torch.ones(3)), error_type=RuntimeError, error_regex="same"
    )
    checks = checks_of("add", lambda a, b: (a + b) is None, device_type="cuda")
    checks.device = "meta"  # a device other than the CPU, on every machine
    assert checks._error(0, mixed).status == PASS


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul with m 32 n 15", False),
        ("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling cublasGemmEx", False),
        ("CUDA error: out of memory", False),
    ],
)
def test_a_refusal_is_no_loss_of_the_device(text: str, lost: bool) -> None:
    assert is_sticky(RuntimeError(text)) is lost


# --- results in place and in out=


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_truth_values_take_the_dtype_of_what_they_replace(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 2, 3]).to(dtype)
    y = torch.tensor([1, 5, 3]).to(dtype)
    checks = checks_of("eq", torch.eq)
    trial = Trial("torch.eq", torch.Tensor.eq_, (x, y), {}, "cpu", checks._kept_dtype(sample_of(x, y)))
    assert trial.run().status == PASS
    broken = Trial("torch.eq", lambda a, b: a.eq_(b).neg_(), (x, y), {}, "cpu", checks._kept_dtype(sample_of(x, y)))
    assert broken.run().status == WRONG


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(1, 3))
def test_strides_that_no_element_depends_on_are_free(shape: list[int], step: int) -> None:
    spaced = torch.empty((*shape, step))[..., 0]
    plain = torch.empty(shape)
    same = freedoms.layout(spaced, 64) == freedoms.layout(plain, 64)
    assert same is (step == 1 or max(shape) <= 1 or 0 in shape)


def test_other_memory_is_seen() -> None:
    x = torch.empty(2)
    assert freedoms.layout(x, 64) != freedoms.layout(x, 128)


def test_statistics_of_an_evaluation_are_free() -> None:
    results = (torch.ones(3, 2), torch.ones(2), torch.ones(2))
    weights = (torch.ones(3, 2), None, None, None, None)
    assert len(freedoms.determined("native_batch_norm", (*weights, False, 0.1, 1e-5), results)) == 1
    assert len(freedoms.determined("native_batch_norm", (*weights, True, 0.1, 1e-5), results)) == 3
    assert freedoms.determined("var_mean", (torch.ones(2), False), results) is results


def test_places_that_are_written_twice() -> None:
    values = torch.ones(2, 1, 2, 2)
    once = torch.tensor([0, 1, 2, 3]).view(1, 1, 2, 2).repeat(2, 1, 1, 1)
    twice = torch.tensor([0, 1, 1, 3]).view(1, 1, 2, 2).repeat(2, 1, 1, 1)
    assert not freedoms.written_twice("nn.functional.max_unpool2d", (values, once))
    assert freedoms.written_twice("nn.functional.max_unpool2d", (values, twice))
    assert not freedoms.written_twice("scatter", (values, twice))


def test_rows_that_are_written_twice() -> None:
    zeros, ones = torch.zeros(4, 4), torch.ones(3, 4)
    for places, expected in (([0, 1, 2], False), ([2, 1, 2], True)):
        index = torch.tensor(places)
        assert freedoms.copied_twice("index_copy", (zeros, 0, index, ones), {}) is expected
        assert freedoms.copied_twice("put", (zeros, index, torch.ones(3)), {}) is expected
        assert freedoms.copied_twice("scatter", (zeros, 0, index[:, None], ones), {}) is expected
        assert freedoms.copied_twice("index_put", (zeros, (index,), ones), {}) is expected
        assert not freedoms.copied_twice("put", (zeros, index, torch.ones(3)), {"accumulate": True})
        assert not freedoms.copied_twice("scatter", (zeros, 0, index[:, None], 1.0), {})
    two = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    assert not freedoms.copied_twice("index_put", (zeros, two, torch.ones(3)), {})


def test_overflow_of_eight_bits() -> None:
    ours = torch.tensor([448.0, 448.0, -448.0, 2.0]).to(torch.float8_e4m3fn)
    theirs = torch.tensor([float("nan"), 448.0, float("nan"), float("nan")]).to(torch.float8_e4m3fn)
    found = freedoms.with_overflow_of(ours, theirs).float()
    assert found.isnan().tolist() == [True, False, True, False]  # a 2 instead of NaN stays what it is
    assert freedoms.with_overflow_of(torch.ones(2), torch.ones(2)).tolist() == [1, 1]


# --- factors of complex matrices


def by_modulus(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """LU factors, with the element of the largest absolute value as pivot, as CUDA's batched kernels choose it."""
    packed, pivots = matrices.clone(), torch.zeros(matrices.shape[:-1], dtype=torch.int32)
    for a, chosen in zip(packed, pivots):
        for k in range(a.shape[-1]):
            pivot = int(a[k:, k].abs().argmax()) + k
            chosen[k] = pivot + 1
            a[[k, pivot]] = a[[pivot, k]]
            a[k + 1 :, k] /= a[k, k].clone()
            a[k + 1 :, k + 1 :] -= a[k + 1 :, k, None] * a[k, None, k + 1 :]
    return packed, pivots


@pytest.fixture(params=[torch.complex64, torch.complex128])
def matrices(request: pytest.FixtureRequest) -> torch.Tensor:
    return torch.randn(40, 5, 5, dtype=request.param, generator=torch.Generator().manual_seed(0))


def test_other_pivots_are_as_good(matrices: torch.Tensor) -> None:
    theirs = torch.linalg.lu_factor(matrices)
    ours = by_modulus(matrices)
    assert not torch.equal(ours[1], theirs[1])  # |z| and |re| + |im| have other largest elements here
    assert freedoms.other_pivots(matrices, ours, theirs)
    assert freedoms.other_pivots(matrices, torch.lu_unpack(*ours), torch.lu_unpack(*theirs))
    assert freedoms.other_pivots(matrices, torch.lu_unpack(*ours)[1:], torch.lu_unpack(*theirs)[1:])  # of linalg.lu
    lower, upper = torch.lu_unpack(*ours)[1:]
    assert not freedoms.other_pivots(matrices, (lower, upper * 1.01), torch.lu_unpack(*theirs)[1:])
    assert not freedoms.other_pivots(matrices, theirs, theirs)  # the same pivots: no excuse for other numbers


@pytest.mark.parametrize("fault", ["number", "pivot", "other matrices", "no pivots"])
def test_other_pivots_are_no_excuse(matrices: torch.Tensor, fault: str) -> None:
    theirs = torch.linalg.lu_factor(matrices)
    packed, pivots = by_modulus(matrices)
    if fault == "number":
        packed[3, 4, 4] *= 1 + 1e3 * torch.finfo(matrices.dtype).eps
    elif fault == "pivot":
        pivots[3, 0] = 1 + pivots[3, 0] % 5
    elif fault == "other matrices":
        packed, pivots = by_modulus(matrices.mT)
    else:
        packed, pivots = unpivoted(matrices), torch.arange(1, 6, dtype=torch.int32).expand(40, 5)
    assert not freedoms.other_pivots(matrices, (packed, pivots), theirs)


def unpivoted(matrices: torch.Tensor) -> torch.Tensor:
    packed = matrices.clone()
    for k in range(5):
        packed[:, k + 1 :, k] /= packed[:, k, k, None]
        packed[:, k + 1 :, k + 1 :] -= packed[:, k + 1 :, k, None] * packed[:, k, None, k + 1 :]
    return packed


def test_gradients_of_other_pivots_are_others(matrices: torch.Tensor) -> None:
    checks = checks_of("linalg.lu_factor", torch.linalg.lu_factor)
    wrong = Outcome(WRONG, "other numbers")
    trial = Trial("torch.linalg.lu_factor", torch.linalg.lu_factor, (matrices,), {}, "cpu")
    trial.outputs = by_modulus(matrices)
    assert checks._free(trial, wrong).status == PASS
    trial.gradients = [matrices]
    assert checks._free(trial, wrong).status == NOT_COMPARABLE
    trial.outputs[0][0, 0, 0] += 1
    assert checks._free(trial, wrong) is wrong
    trial.outputs = None
    assert checks._free(trial, wrong) is wrong


# --- vectors that a matrix does not determine


def test_what_is_written_is_compared_as_what_is_returned() -> None:
    """The last rows of Vh of a wide matrix are any basis of what is left."""

    def turned(a: torch.Tensor, out: Any = None) -> Any:
        results = torch.linalg.svd(a)
        if a.dtype == torch.float32:  # the device; the reference is in double precision
            results[2][3:] = results[2][3:].flip(0) * -1
        if out is not None:
            for target, result in zip(out, results):
                target.resize_(result.shape).copy_(result)
        return results

    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    checks = checks_of("linalg.svd", turned)
    sample = sample_of(x, process=lambda usv: usv[2][:3].abs())
    checks._each = lambda case, check, grad=False: check(0, sample)  # type: ignore[method-assign,assignment,misc]
    outcome = checks.out(None)  # type: ignore[arg-type]
    assert outcome.status == PASS, outcome.message


# --- results that are one of several


def test_values_that_go_to_one_place_have_no_single_result() -> None:
    x, source = torch.zeros(3, 3), torch.ones(2, 2)
    assert freedoms.copied_twice("as_strided_scatter", (x, source, (2, 2), (3, 3)), {})
    assert not freedoms.copied_twice("as_strided_scatter", (x, source, (2, 2), (3, 1)), {})


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "free"),
    [
        ("mode", (torch.tensor([[1.0, 1.0, 2.0], [3.0, 3.0, 3.0]]),), {}, False),
        ("mode", (torch.tensor([[1.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),), {}, True),
        ("mode", (torch.tensor([[1.0, 1.0], [1.0, 2.0]]), 0), {}, True),
        ("mode", (torch.tensor([[1.0, 1.0], [1.0, 1.0]]),), {"dim": 0}, False),
        ("mode", (torch.zeros(0, 3).bfloat16(),), {}, False),
        ("topk", (torch.ones(3), 2), {}, False),
        ("topk", (torch.ones(3), 2), {"sorted": False}, True),
        ("topk", (torch.ones(3), 2, -1, True, False), {}, True),
    ],
)
def test_a_choice_among_equals_is_free(name: str, args: Any, kwargs: Any, free: bool) -> None:
    assert bool(freedoms.free_choice(name, args, kwargs)) is free


def test_eigenvalues_have_no_order_but_must_be_those_of_the_matrix() -> None:
    matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0])).to(torch.complex64)
    values = torch.linalg.eigvals(matrix)
    assert freedoms.other_order(matrix, values[[1, 0, 2]])
    assert not freedoms.other_order(matrix, values)
    assert not freedoms.other_order(matrix, values[[1, 0, 2]] + torch.tensor([0.1, 0, 0]))
    assert not freedoms.other_order(matrix, values[[1, 1, 2]])
    checks = checks_of("linalg.eigvals", torch.linalg.eigvals, "complex64")
    trial = Trial("torch.linalg.eigvals", torch.linalg.eigvals, (matrix,), {}, "cpu")
    trial.outputs = values[[1, 0, 2]]
    assert checks._free(trial, Outcome(WRONG)).status == NOT_COMPARABLE
    trial.outputs = values * 2
    assert checks._free(trial, Outcome(WRONG)).status == WRONG


def test_complex_logarithms_of_sums_have_no_branch() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.complex64)
    checks = checks_of("logcumsumexp", torch.logcumsumexp, "complex64")
    trial = Trial("torch.logcumsumexp", torch.logcumsumexp, (x, 1), {}, "cpu")
    right = torch.logcumsumexp(x, 1)
    for outputs, status in ((right + 2j * torch.pi, PASS), (right + 3j, WRONG), (right * 1.01 + 2j * torch.pi, WRONG)):
        trial.outputs = outputs
        assert checks._free(trial, Outcome(WRONG)).status == status


@pytest.mark.parametrize("text", ["invalid argument", "invalid configuration argument"])
def test_a_kernel_that_was_not_started_does_not_cost_the_device(text: str) -> None:
    assert not is_sticky(RuntimeError(f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported"))


# --- what the verdict learnt from a hunt on a GPU


@pytest.mark.parametrize("name", ["put", "scatter"])
def test_values_are_added_into_memory_in_any_order(name: str) -> None:
    """Judged as moves they were held to a single rounding: two false alarms on an H200."""
    values = torch.randn(1100, generator=torch.Generator().manual_seed(3))
    index = torch.zeros(1100, dtype=torch.int64)
    args: Any = (torch.zeros(1), index, values, True) if name == "put" else (torch.zeros(1), 0, index, values)
    kwargs = {} if name == "put" else {"reduce": "add"}
    other = torch.zeros(1)
    for value in values.sort().values:
        other += value
    trial = Trial(f"torch.{name}", getattr(torch, name), args, kwargs, "cpu")
    assert trial.judge(other).status == PASS
    assert trial.judge(other + 0.1).status == WRONG


@pytest.mark.parametrize("name", ["median", "nanmedian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_median_of_an_expanded_tensor_is_that_of_its_elements(name: str, dtype: torch.dtype) -> None:
    """The CPU's kernel sorts in place what shares memory: it made a right device look wrong."""
    x = torch.tensor([[-9], [0], [-2]], dtype=dtype).expand(3, 5)
    trial = Trial(f"torch.{name}", getattr(torch, name), (x, -1), {}, "cpu")
    values, indices = getattr(torch, name)(x.contiguous(), -1)
    assert trial.judge((values, indices)).status == PASS
    assert trial.judge((values + 1, indices)).status == WRONG
