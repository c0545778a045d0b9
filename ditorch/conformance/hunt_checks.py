"""The hunt: variants of an operator's samples on the device, one after the other; what is wrong is made small."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

from ditorch.conformance import databases, freedoms, hunt_script
from ditorch.conformance.cases import ERROR, NO_DTYPE, NOT_COMPARABLE, PASS, WRONG, Case, Limits, Result, Unit
from ditorch.conformance.novelty import Feature, Pairs, features
from ditorch.conformance.op_checks import OperatorChecks, _Exact, _NoWarnings, _Strided
from ditorch.conformance.trial import DeviceLost, Outcome, Skip, Trial
from ditorch.conformance.variants import Samples, Variant, Variants, resized
from op_tools.call.description import tensors_in

SECONDS: Final = Limits().hunt_seconds
"""For the variants of one operator in one round at most."""
_SHORTEST: Final = 0.2
ROUNDS: Final = 40
"""More than a hunt has time for: it ends by the clock."""
SHRINKING_SECONDS: Final = 8.0
"""To make a call small; less for each further one of a round, so that a round ends within the limit of a case."""
_SHRINKING_SHARE: Final = 4.0
"""The same at most, of an operator's time: in a short hunt on a device with many bugs, all operators get their turn."""
LOST: Final = "the device was lost: "
_WAYS: Final = ("plain", "out", "in place", "backward")
MAX_RESULTS: Final = 1 << 21
"""Elements of all results and gradients: broadcast, small arguments give large ones, and a verdict takes a minute."""
_CANDIDATES: Final = 2
"""Calls that are drawn for each one that is tried."""
_RICH: Final = ("nn.functional.", "conv", "matmul", "mm", "addmm", "bmm", "baddbmm", "index", "scatter", "sum", "sort")
_DTYPES: Final = (
    *("float32", "float32", "float32", "bfloat16", "bfloat16", "float16", "float16", "float64", "int64", "complex64"),
    "bool",
)


class Finding(NamedTuple):
    """A call that the device does wrong.

    >>> Finding("backward, float32, (1, 2): off by 0.5", "size 5 to 2").script
    ''
    """

    message: str
    drawn: str
    """What was changed in PyTorch's sample, before the call was made small."""
    details: str = ""
    script: str = ""


class HuntChecks:
    """The rounds of one operator; what a round draws follows from its number alone.

    What has the CPU's bits is right without a verdict, which takes ten times as long; with `judges_all`, each call
    gets one.

    Example: ``HuntChecks(Unit("hunt", "add", "-", ("round-1",)), "cuda:0", Limits()).run("round-1")``
    """

    def __init__(
        self,
        unit: Unit,
        device: str,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        judges_all: bool = False,
    ) -> None:
        found = databases.operators().get(unit.name)
        if found is None:
            raise ValueError(f"this version of PyTorch has no operator {unit.name} in its database")
        self.info, self.unit, self.device, self.limits = found, unit, device, limits
        self._clock, self._judges_all = clock, judges_all
        self._samples = Samples(found)
        device_type = torch.device(device).type
        self._dtypes = databases.claimed(found, device_type)
        self._with_gradient = databases.claimed_backward(found, device_type)

    def run(self, check: str) -> Result:
        """Do one round."""
        case = Case(self.unit.what, self.unit.name, self.unit.dtype, check)
        ends = self._clock() + min(self.limits.hunt_seconds * _weight(self.unit.name), self.limits.timeout / 4)
        counts = {PASS: 0, WRONG: 0, NOT_COMPARABLE: 0}
        refused, pairs, tried = "", Pairs(), 0
        findings: dict[str, Finding] = {}
        with _NoWarnings():
            for dtype, way, variant, its in self._chosen(check, pairs):
                if self._clock() > ends or tried == self.limits.samples:
                    break
                if way in findings:  # one bug must not hide those of other ways, and is looked into once
                    if len(findings) == len(_WAYS):
                        break
                    continue
                tried += 1
                try:
                    outcome = self._tried(dtype, way, variant)
                except DeviceLost as error:
                    findings[way] = self._lost(way, variant, error)
                    raise DeviceLost(str(error), self._result(case, findings, tried, counts[NOT_COMPARABLE])) from error
                pairs.add(its, accepted=outcome.status == PASS)
                if outcome.status == WRONG:
                    began = self._clock()
                    seconds = min(SHRINKING_SECONDS, _SHRINKING_SHARE * self.limits.hunt_seconds) / (1 + len(findings))
                    try:
                        findings[way] = self._found(dtype, way, variant, outcome, seconds)
                    except DeviceLost as error:  # by a smaller call
                        findings[way] = self._as_drawn(dtype, way, variant, outcome)
                        unclear = counts[NOT_COMPARABLE]
                        raise DeviceLost(str(error), self._result(case, findings, tried, unclear)) from error
                    ends += self._clock() - began
                counts[outcome.status if outcome.status in counts else NOT_COMPARABLE] += 1
                refused = refused or (outcome.message if outcome.status not in counts else "")
        unclear = counts[NOT_COMPARABLE]
        if findings:
            return self._result(case, findings, tried, unclear)
        status = PASS if counts[PASS] else NOT_COMPARABLE
        note = f"the device refuses what the CPU does: {refused}" if refused else ""
        return Result(case, status, "", tried, unclear, note=note)

    def _result(self, case: Case, findings: dict[str, Finding], tried: int, unclear: int) -> Result:
        """A round with findings; one with nothing but a lost device is an error."""
        several = list(findings.values())
        status = ERROR if all(one.message.startswith(LOST) for one in several) else WRONG
        note = "; ".join(f"drawn: {one.drawn}" for one in several)
        details = tuple(text for one in several for text in (one.details, one.script))
        return Result(case, status, " | ".join(one.message for one in several), tried, unclear, 0.0, note, details)

    # --- one call

    def _chosen(self, check: str, pairs: Pairs) -> Iterator[tuple[str, str, Variant, list[Feature]]]:
        """Of every few calls that are drawn, the one with most that is new."""
        drawn = self._drawn(check)
        for first in itertools.islice(drawn, 1):
            yield (*first, features(*first))
        while several := [(*one, features(*one)) for one in itertools.islice(drawn, _CANDIDATES)]:
            yield max(several, key=lambda one: pairs.news(one[3]))

    def _drawn(self, check: str) -> Iterator[tuple[str, str, Variant]]:
        """Dtype, way of calling and variant, without end where the operator has samples."""
        choose = random.Random(f"{check}/{self.unit.name}")
        dtypes = [d for d in _DTYPES if d in self._dtypes] or self._dtypes
        if not dtypes:
            return
        drawn: dict[tuple[str, bool], Iterator[Variant]] = {}
        if "float32" in dtypes:  # before anything else: some kernels are wrong in the first call of a process
            yield from (("float32", "plain", first) for first in Variants.first(self.info, "float32"))
        ways = ["plain", "plain", *(["out"] if self.info.supports_out else [])]
        ways += ["in place"] * 2 if self.info.get_inplace() is not None else []
        for _ in itertools.count():
            dtype = choose.choice(dtypes)
            grad = dtype in self._with_gradient
            way = choose.choice([*ways, *(["backward"] * 3 if grad else [])])
            key = (dtype, way == "backward")
            if key not in drawn:
                made = Variants(self.info, dtype, grad=key[1], seed=check, samples=self._samples)
                drawn[key] = made.drawn()
            variant = next(drawn[key], None)
            if variant is None:
                return
            yield dtype, way, variant

    def _tried(self, dtype: str, way: str, variant: Variant) -> Outcome:
        """One call; the CPU goes first, since an argument that no kernel checks may take the device down."""
        checks = OperatorChecks(Unit("ops", self.unit.name, dtype, ("forward",)), self.device, self.limits)
        sample = _Sample(variant)
        try:
            if freedoms.crashes_on_cpu(self.info.name, variant.args):
                raise Skip("the CPU's kernel takes the process down")
            trial = checks._trial(sample)
            if (why := self._refused(trial, way == "backward")) or (why := _undefined(trial)):
                return Outcome(NOT_COMPARABLE, why)
            if sum(t.numel() for t in tensors_in(trial.expected)) > MAX_RESULTS:
                return Outcome(NOT_COMPARABLE, "the results are too large for a verdict in the time there is")
            if self._judges_all:
                trial.expected = None
            if way == "out":
                expected = checks._trial(sample, lambda *a, **k: self.info.op(*a, **k)).on_cpu()
                return checks._into(sample, trial, expected, _Strided() if len(variant.told) % 2 else _Exact())
            if way == "in place":
                return self._in_place(checks, sample)
            return checks._free(trial, trial.run(backward=way == "backward", forward=True))
        except Skip as reason:
            return Outcome(NOT_COMPARABLE, str(reason))
        except DeviceLost as error:
            raise DeviceLost(f"{way}, {dtype}, {hunt_script.in_words(variant)}: {error}") from error

    def _refused(self, trial: Trial, backward: bool = False) -> str:
        return trial.ask_cpu(backward)

    def _in_place(self, checks: OperatorChecks, sample: _Sample) -> Outcome:
        function = self.info.get_inplace()
        if not isinstance(sample.input, torch.Tensor) or (sample.input.numel() > 1 and 0 in sample.input.stride()):
            raise Skip("several elements share memory")

        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            return sample.output_process_fn_grad(function(first, *args, **kwargs))

        trial = checks._trial(sample, call)
        if why := self._refused(trial):
            return Outcome(NOT_COMPARABLE, why)
        if self._judges_all:
            trial.expected = None
        if sample.input.dtype.is_floating_point or sample.input.dtype.is_complex:
            trial.reference = checks._kept_dtype(sample)
            if trial.refused_by_cpu() or trial.on_cpu().shape != sample.input.shape:
                raise Skip("the result is larger than the tensor that it would replace")
        return trial.run()

    # --- what was found

    def _lost(self, way: str, variant: Variant, error: DeviceLost) -> Finding:
        """A call that takes the device down: it is not made small, since each try costs a process."""
        script = hunt_script.text(self.info, variant, way, self.device, Outcome(ERROR, str(error)))
        return Finding(f"{LOST}{error}", variant.told, "", script)

    def _as_drawn(self, dtype: str, way: str, variant: Variant, outcome: Outcome) -> Finding:
        script = hunt_script.text(self.info, variant, way, self.device, outcome)
        message = f"{way}, {dtype}, {hunt_script.in_words(variant)}: {outcome.message}"
        return Finding(message, variant.told, outcome.details, script)

    def _found(self, dtype: str, way: str, variant: Variant, outcome: Outcome, seconds: float) -> Finding:
        if self._tried(dtype, way, variant).status != WRONG:
            text = f"{way}, {dtype}, {hunt_script.in_words(variant)}: {outcome.message}"
            return Finding(f"wrong once, right when repeated: {text}", variant.told, outcome.details, "")
        smallest, outcome = self._shrunk(dtype, way, variant, outcome, seconds)
        return self._as_drawn(dtype, way, smallest, outcome)._replace(drawn=variant.told)

    def _shrunk(
        self, dtype: str, way: str, variant: Variant, outcome: Outcome, seconds: float
    ) -> tuple[Variant, Outcome]:
        """The smallest variant that is still wrong, as far as the time goes."""
        ends = self._clock() + min(seconds, self.limits.timeout / 4)
        again = True
        while again:
            again = False
            for smaller in _smaller(variant):
                if self._clock() > ends:
                    return variant, outcome
                found = self._tried(dtype, way, smaller)
                if found.status == WRONG:
                    variant, outcome, again = smaller, found, True
                    break
        return variant, outcome


class _Sample:
    """What the checks of operators take for a sample of the database."""

    def __init__(self, variant: Variant) -> None:
        self.input, *self.args = variant.args
        self.kwargs = variant.kwargs
        of_database = variant.sample
        self.output_process_fn_grad: Callable[[Any], Any] = of_database.output_process_fn_grad
        self.broadcasts_input = of_database.broadcasts_input


def _undefined(trial: Trial) -> str:
    """Why a call has no single right result; empty where it has one."""
    name, (args, kwargs) = trial.name.removeprefix("torch."), trial.before
    if freedoms.written_twice(name, args) or freedoms.copied_twice(name, args, kwargs):
        return "several values go to one place"
    return freedoms.free_choice(name, args, kwargs)


def _smaller(variant: Variant) -> Iterator[Variant]:
    """Simpler calls, those that save most first."""
    sizes = sorted({n for t in variant.tensors if t.layout is torch.strided for n in t.shape if n > 1}, reverse=True)
    for old in sizes:
        for new in dict.fromkeys((1, 2, old // 2, old - 1)):
            if 0 < new < old:
                yield resized(variant, old, new)
    for key in variant.kwargs:
        kwargs = {k: v for k, v in variant.kwargs.items() if k != key}
        yield Variant(variant.args, kwargs, variant.changes, variant.sample)
    for chosen, tensor in enumerate(variant.tensors):
        if tensor.layout is torch.strided and not (tensor.is_contiguous() and tensor.storage_offset() == 0):
            yield variant.mapped(lambda number, t, chosen=chosen: _plain(t) if number == chosen else t)  # type: ignore[misc]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)


def is_rich(name: str) -> bool:
    """Whether an operator has many arguments, and gets more time (`is_rich("nn.functional.conv2d")`)."""
    return name.startswith(_RICH)


def _weight(name: str) -> int:
    return 3 if is_rich(name) else 1


def seconds_of_a_round(device_type: str, total: float) -> float:
    """The time for one operator if one round of all operators is to fit into so many seconds of all workers.

    Example: ``seconds_of_a_round("cuda", 60 * 10 * 2)``
    """
    weights = sum(_weight(unit.name) for unit in units(device_type))
    return min(SECONDS, max(_SHORTEST, 0.9 * total / max(1, weights)))


def units(device_type: str) -> list[Unit]:
    """All operators with all rounds, those with many arguments first (`units("cuda")`)."""
    names = [n for n, info in databases.operators().items() if databases.claimed(info, device_type)]
    names.sort(key=lambda name: not name.startswith(_RICH))
    rounds = tuple(f"round-{number + 1}" for number in range(ROUNDS))
    return [Unit("hunt", name, NO_DTYPE, rounds) for name in names]
