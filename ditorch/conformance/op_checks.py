"""Checks of one operator of PyTorch's database: results, gradients, out=, in place, strides, errors, dtypes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ditorch.conformance import databases, freedoms
from ditorch.conformance.cases import ERROR, NOT_COMPARABLE, PASS, WRONG, Case, Limits, Result, Unit
from ditorch.conformance.coverage import OBSERVER
from ditorch.conformance.trial import (
    DeviceLost,
    Outcome,
    Skip,
    Trial,
    failed,
    is_sticky,
    moved,
    on_host,
    one_line,
    over_samples,
)
from op_tools.call.description import map_tensors, tensors_in
from op_tools.call.traits import traits_of

STAYS_ON_CPU = frozenset({"tensor_split"})
"""Operators whose tensor of sections is on the CPU by contract, on every device."""
DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex32", "complex64", "complex128"),
)
"""The dtypes that the `dtypes` check asks for."""


class OperatorChecks:
    """All checks of one unit; the samples are made once, on the CPU, and moved for each call.

    Example: ``OperatorChecks(unit, "cuda:0", Limits()).run("forward")``
    """

    def __init__(self, unit: Unit, device: str, limits: Limits) -> None:
        found = databases.operators().get(unit.name)
        if found is None:
            raise ValueError(f"this version of PyTorch has no operator {unit.name} in its database")
        self.info, self.unit, self.device, self.limits = found, unit, device, limits
        self.device_type = torch.device(device).type
        self._samples: dict[bool, list[Any]] = {}

    def run(self, check: str) -> Result:
        """Do one check of the unit."""
        checks: dict[str, Callable[[Case], Result]] = {
            "forward": self.forward,
            "backward": self.backward,
            "noncontiguous": self.noncontiguous,
            "out": self.out,
            "inplace": self.inplace,
            "dtypes": self.dtypes,
            "errors": self.errors,
            "double-backward": self.double_backward,
            "forward-mode": self.forward_mode,
        }
        if check not in checks:
            raise ValueError(f"operators have no check {check!r}: {', '.join(checks)}")
        return checks[check](Case(self.unit.what, self.unit.name, self.unit.dtype, check))

    # --- values

    def forward(self, case: Case) -> Result:
        def check(number: int, sample: Any) -> Outcome:
            trial = self._trial(sample)
            return self._free(trial, trial.run())

        return self._each(case, check)

    def backward(self, case: Case) -> Result:
        def check(number: int, sample: Any) -> Outcome:
            trial = self._trial(sample)
            return self._free(trial, trial.run(backward=True, forward=False, number=number))

        return self._each(case, check, grad=True)

    def noncontiguous(self, case: Case) -> Result:
        grad = self.unit.dtype in databases.claimed_backward(self.info, self.device_type)

        def check(number: int, sample: Any) -> Outcome:
            try:
                strided = sample.noncontiguous()
            except Exception as error:  # sparse, quantized: there are no strides
                raise Skip(f"cannot be made non-contiguous: {one_line(error)}") from None
            trial = self._trial(strided)
            try:
                return self._free(trial, trial.run(backward=grad, number=number))
            except Skip:
                return self._free(trial, trial.run())

        return self._each(case, check, grad=grad)

    def inplace(self, case: Case) -> Result:
        function = self.info.get_inplace()

        def check(number: int, sample: Any) -> Outcome:
            if sample.broadcasts_input or not isinstance(sample.input, torch.Tensor):
                raise Skip("the result is larger than the tensor that it would replace")
            same = []

            def call(first: Any, *args: Any, **kwargs: Any) -> Any:
                result = function(first, *args, **kwargs)
                same.append(result is first)
                return sample.output_process_fn_grad(result)

            trial = self._trial(sample, call)
            if sample.input.dtype.is_floating_point or sample.input.dtype.is_complex:
                # The verdict knows the accuracy of kernels by operators, and in-place ones are others to it. Whole
                # numbers stay with the in-place call: its result keeps their dtype.
                trial.reference = self._kept_dtype(sample)
            outcome = trial.run()
            if outcome.status == PASS and same and not same[0]:
                return Outcome(WRONG, "returns another tensor than the one it changed")
            if outcome.status != PASS and (why := _refused(function, *moved(trial.before, "cpu"))):
                return Outcome(NOT_COMPARABLE, f"the CPU refuses it in place: {why}")
            return outcome

        return self._each(case, check)

    def out(self, case: Case) -> Result:
        def check(number: int, sample: Any) -> Outcome:
            trial = self._trial(sample)
            try:
                expected = self._trial(sample, lambda *a, **k: self.info.op(*a, **k)).on_cpu()
            except Exception as error:
                return Outcome(NOT_COMPARABLE, f"the CPU refuses it too: {one_line(error)}")
            kinds = (_Exact, _Strided, _Empty) if number == 0 else ((_Exact, _Strided, _Empty)[number % 3],)
            for kind in kinds:
                outcome = self._into(sample, trial, expected, kind())
                if outcome.status != PASS:
                    return outcome
            return outcome

        return self._each(case, check)

    def _into(self, sample: Any, trial: Trial, expected: Any, kind: _Exact) -> Outcome:
        """Have the results written into tensors of one kind, and judge what is there afterwards."""
        if not _is_tensors(expected):
            raise Skip("the results are not tensors")
        host = map_tensors(expected, kind.make)
        args, kwargs = moved(trial.before, self.device, trial.stay)
        target = moved(host, self.device)
        layout = self._layout(args, target)
        wanted = tuple(target) if isinstance(target, (list, tuple)) else target
        try:
            self.info.op(*args, **kwargs, out=wanted)
            written = on_host(target)
        except Exception as error:
            if is_sticky(error):
                raise DeviceLost(one_line(error)) from error
            why = self._out_on_cpu(trial, host)[0]
            return Outcome(NOT_COMPARABLE, f"the CPU refuses out= too: {why}") if why else failed(error)
        OBSERVER.repeat(lambda: self.info.op(*args, **kwargs, out=wanted))
        changed = layout != self._layout(args, target)
        if kind.keeps_layout and changed and not self._out_on_cpu(trial, host)[1]:
            return Outcome(WRONG, f"out= {kind.name} was given new memory or strides")
        # What the database compares: of the vectors of an SVD, say, those that the matrix determines.
        compared = sample.output_process_fn_grad(_as_returned(written, expected))
        outcome = self._free(trial, trial.judge(freedoms.determined(self.info.name, args, compared)))
        if outcome.status != WRONG:
            return outcome
        return Outcome(WRONG, f"out= {kind.name}: {outcome.message}", outcome.details, outcome.worst)

    def _layout(self, args: Any, results: Any) -> list[Any]:
        compared = tensors_in(freedoms.determined(self.info.name, args, results))
        return [freedoms.layout(tensor, tensor.data_ptr()) for tensor in compared]

    def _out_on_cpu(self, trial: Trial, host: Any) -> tuple[str, bool]:
        """Why the CPU refuses these out= tensors (empty if it does not), and whether it changes their layout."""
        args, kwargs = moved(trial.before, "cpu")
        target = moved(host, "cpu")
        layout = self._layout(args, target)
        try:
            self.info.op(*args, **kwargs, out=tuple(target) if isinstance(target, (list, tuple)) else target)
        except Exception as error:
            return one_line(error), False
        return "", layout != self._layout(args, target)

    # --- derivatives of other kinds

    def double_backward(self, case: Case) -> Result:
        def check(number: int, sample: Any) -> Outcome:
            def gradient(*args: Any, **kwargs: Any) -> Any:
                inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
                results = [t for t in tensors_in(self._call(sample)(*args, **kwargs)) if t.requires_grad]
                if not inputs or not results:
                    raise Skip("no gradient for these arguments")
                # Squares, so that linear operators have a second derivative too.
                total: Any = sum((torch.view_as_real(t) if t.is_complex() else t).square().sum() for t in results)
                found = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True)
                return [g for g in found if g is not None]

            return self._trial(sample, gradient).run(backward=True, forward=False, number=number)

        return self._each(case, check, grad=True)

    def forward_mode(self, case: Case) -> Result:
        from torch.autograd import forward_ad

        def check(number: int, sample: Any) -> Outcome:
            generator = torch.Generator().manual_seed(number)

            def direction(tensor: torch.Tensor) -> torch.Tensor | None:
                if not tensor.requires_grad:
                    return None
                kind = torch.complex64 if tensor.is_complex() else torch.float32
                return torch.randn(tensor.shape, generator=generator, dtype=kind).to(tensor.dtype)

            arguments = ((sample.input, *sample.args), dict(sample.kwargs))
            excluded = freedoms.not_for(self.info.name, *arguments, self.device_type)
            if excluded:
                raise Skip(excluded)
            tangents = [direction(t) for t in tensors_in(arguments)]
            if not any(tangent is not None for tangent in tangents):
                raise Skip("no derivative for these arguments")
            if freedoms.written_twice(self.info.name, arguments[0]):
                raise Skip("several values go to one place: the one that stays there has its own derivative")

            def derivative(primals: Any, tangents: Any) -> Any:
                left = iter(tangents)

                def dual(tensor: torch.Tensor) -> torch.Tensor:
                    tangent = next(left)
                    return tensor if tangent is None else forward_ad.make_dual(tensor.detach(), tangent)

                with forward_ad.dual_level():
                    args, kwargs = map_tensors(primals, dual)
                    results = list(tensors_in(self._call(sample)(*args, **kwargs)))
                    return [forward_ad.unpack_dual(t).tangent for t in results if t.dtype.is_floating_point]

            return self._trial(sample, derivative, arguments=((arguments, tangents), {})).run()

        return self._each(case, check, grad=True)

    # --- refusals and claims

    def errors(self, case: Case) -> Result:
        # The database knows the CPU and CUDA; some inputs are errors on one of the two only.
        made_on = self.device if self.device_type == "cuda" else "cpu"
        with self._quietly():
            try:
                inputs = list(self.info.error_inputs(made_on))
            except Exception as error:
                return Result(case, NOT_COMPARABLE, f"the inputs cannot be made: {one_line(error)}")
            return over_samples(case, inputs, self._error, self.limits)

    def _error(self, number: int, item: Any) -> Outcome:
        sample, expected = item.sample_input, item.error_type
        values = ((sample.input, *sample.args), dict(sample.kwargs))
        on_cpu = self._raised(*moved(values, "cpu"))
        mixed = len({tensor.device.type for tensor in tensors_in(values)}) > 1
        if not (mixed and self.device_type == "cuda") and not isinstance(on_cpu, expected):
            return Outcome(NOT_COMPARABLE, "the CPU accepts it")
        # Made for this device by the database, which mixes devices on purpose; made on the CPU for any other.
        stay = (lambda tensor: tensor.device.type == "cpu") if self.device_type == "cuda" else self._stay
        raised = self._raised(*moved(values, self.device, stay))
        if raised is None:
            return Outcome(WRONG, f"accepted, where {_names(expected)} is expected: {item.error_regex[:120]}")
        if is_sticky(raised):
            raise DeviceLost(one_line(raised)) from raised
        if not isinstance(raised, expected):
            return Outcome(WRONG, f"{one_line(raised)}: expected {_names(expected)}")
        return Outcome(PASS)

    def _raised(self, args: Any, kwargs: Any) -> BaseException | None:
        try:
            on_host(self.info.op(*args, **kwargs))
        except Exception as error:
            return error
        return None

    def dtypes(self, case: Case) -> Result:
        """Every dtype that the database claims must work for some sample; what works beyond that is only noted."""
        claims = set(databases.claimed(self.info, self.device_type))
        borrowed = databases.borrows_claims(self.info, self.device_type)
        missing, beyond, tried = [], [], 0
        with self._quietly():
            for dtype in sorted({*claims, *DTYPES}):
                tried += 1
                why = self._supported(dtype, self.device)
                if why and dtype in claims and borrowed and self._supported(dtype, "cpu"):
                    continue  # the claim is the CPU's, which does not keep it either
                if why and dtype in claims:
                    missing.append(f"{dtype} ({why})")
                elif not why and dtype not in claims:
                    beyond.append(dtype)
        note = f"also does {', '.join(beyond)}, which the database does not claim" if beyond else ""
        if missing:
            return Result(case, ERROR, f"claimed but missing: {'; '.join(missing)}", tried, note=note)
        return Result(case, PASS, samples=tried, note=note)

    def _supported(self, dtype: str, device: str) -> str:
        """Why no sample of a dtype works; empty if one does."""
        first = ""
        seed_everything()
        try:
            samples = self.info.sample_inputs("cpu", getattr(torch, dtype))
            for number, sample in enumerate(samples):
                if number == 3:
                    break
                args, kwargs = moved(((sample.input, *sample.args), dict(sample.kwargs)), device, self._stay)
                try:
                    on_host(self.info.op(*args, **kwargs))
                except Exception as error:
                    if is_sticky(error):
                        raise DeviceLost(one_line(error)) from error
                    first = first or one_line(error)
                else:
                    return ""
        except DeviceLost:
            raise
        except Exception as error:
            return first or f"no sample could be made: {one_line(error)}"
        return first or "the database has no sample"

    # --- common

    def _each(self, case: Case, check: Callable[[int, Any], Outcome], grad: bool = False) -> Result:
        with self._quietly():
            try:
                samples = self._made(grad)
            except Exception as error:
                return Result(case, NOT_COMPARABLE, f"the CPU cannot make samples: {one_line(error)}")
            return over_samples(case, samples, check, self.limits)

    def _made(self, grad: bool) -> list[Any]:
        if grad not in self._samples:
            seed_everything()
            dtype = getattr(torch, self.unit.dtype)
            limit = self.limits.samples
            made = self.info.sample_inputs("cpu", dtype, requires_grad=grad)
            # A few more than asked for, since a check may skip some.
            self._samples[grad] = [s for s, _ in zip(made, range(2 * limit + 4))] if limit is not None else list(made)
        return self._samples[grad]

    def _trial(self, sample: Any, call: Callable[..., Any] | None = None, arguments: Any = None) -> Trial:
        args, kwargs = arguments or ((sample.input, *sample.args), dict(sample.kwargs))
        excluded = freedoms.not_for(self.info.name, args, kwargs, self.device_type)
        if excluded:
            raise Skip(excluded)
        call = call or self._call(sample)
        # Without a mode where it is known: composites of conjugated views go wrong under one in PyTorch (pinv does).
        known = traits_of(self.info.op).random is False or self.info.name.startswith("linalg.")
        random = False if known else None
        name = f"torch.{databases.called(self.info)}"
        return Trial(name, call, args, kwargs, self.device, stay=self._stay, random=random)

    def _call(self, sample: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            results = sample.output_process_fn_grad(self.info.op(*args, **kwargs))
            return freedoms.determined(self.info.name, args, results)

        return call

    def _kept_dtype(self, sample: Any) -> Callable[..., Any]:
        """The call, with truth values in the dtype of its input: what `x.eq_(y)` leaves in x."""
        call = self._call(sample)

        def reference(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = call(first, *args, **kwargs)
            truth = isinstance(result, torch.Tensor) and result.dtype == torch.bool
            return result.to(first.dtype) if truth else result

        return reference

    def _free(self, trial: Trial, outcome: Outcome) -> Outcome:
        """The outcome, unless the device only chose otherwise where it may."""
        if outcome.status != WRONG or trial.outputs is None:
            return outcome
        if self.info.name in freedoms.LU:
            return self._with_pivots(trial, outcome)
        if self.info.name == "logcumsumexp" and trial.outputs.is_complex():
            return trial.judge(freedoms.same_branch(trial.outputs, trial.on_cpu()))
        if self.info.name in freedoms.EIGENVALUES:
            values = next(iter(tensors_in(trial.outputs)), None)
            if values is not None and freedoms.other_order(trial.before[0][0], values):
                return Outcome(NOT_COMPARABLE, "eigenvalues in another order than the CPU's: there is none of right")
        if self.unit.dtype.startswith("float8"):
            adjusted = freedoms.with_overflow_of(trial.outputs, trial.on_cpu())
            return outcome if adjusted is trial.outputs else trial.judge(adjusted)
        return outcome

    def _with_pivots(self, trial: Trial, outcome: Outcome) -> Outcome:
        ours, theirs = list(tensors_in(trial.outputs)), list(tensors_in(trial.on_cpu()))
        if len(ours) != len(theirs) or not freedoms.other_pivots(trial.before[0][0], ours, theirs):
            return outcome
        if trial.gradients is None:
            return Outcome(PASS)
        return Outcome(NOT_COMPARABLE, "other pivots than the CPU's, of equal right: the gradient is another one")

    def _stay(self, tensor: torch.Tensor) -> bool:
        return self.info.name in STAYS_ON_CPU and tensor.dtype == torch.int64 and tensor.ndim < 2

    def _quietly(self) -> Any:
        return _NoWarnings()


def _refused(function: Callable[..., Any], args: Any, kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return one_line(error)
    return ""


class _NoWarnings(warnings.catch_warnings):
    def __enter__(self) -> Any:
        found = super().__enter__()
        warnings.simplefilter("ignore")
        return found


class _Exact:
    """A tensor of the right shape, full of something else."""

    name, keeps_layout = "of the right shape", True

    def make(self, expected: torch.Tensor) -> torch.Tensor:
        return _spoiled(torch.empty_like(expected, memory_format=torch.contiguous_format))


class _Strided(_Exact):
    """The right shape, with gaps between the elements."""

    name = "with strides"

    def make(self, expected: torch.Tensor) -> torch.Tensor:
        wide = _spoiled(torch.empty((*expected.shape, 2), dtype=expected.dtype))
        return wide[..., 0]


class _Empty(_Exact):
    """No elements: it has to be resized."""

    name, keeps_layout = "to be resized", False

    def make(self, expected: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=expected.dtype)


def _spoiled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan")) if tensor.element_size() > 1 else tensor.zero_()
    return tensor.fill_(1)


def _is_tensors(value: Any) -> bool:
    members = value if isinstance(value, (list, tuple)) else [value]
    return bool(members) and all(isinstance(m, torch.Tensor) and m.layout == torch.strided for m in members)


def _as_returned(written: Any, expected: Any) -> Any:
    """Results that went into out=, in the container that the call returns them in: samples take parts by name."""
    if isinstance(expected, tuple) and hasattr(type(expected), "n_fields"):
        return type(expected)(written)
    return written


def _names(kinds: Any) -> str:
    return " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))


def seed_everything() -> None:
    """The same samples in every process (`seed_everything()`)."""
    import numpy

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def checks_of(unit: Unit, device: str, limits: Limits) -> Iterator[tuple[str, Callable[[], Result]]]:
    """The checks of a unit, each ready to run (`for name, run in checks_of(...): run()`)."""
    checks = OperatorChecks(unit, device, limits)
    for check in unit.checks:
        yield check, lambda check=check: checks.run(check)  # type: ignore[misc]
