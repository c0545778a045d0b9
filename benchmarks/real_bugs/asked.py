"""The bugs and `ditorch conformance`: the operators concerned, as the plain run and the hunt ask for them."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from benchmarks.real_bugs.answers import Answer
from benchmarks.real_bugs.bugs import Bug
from benchmarks.real_bugs.scripts import Scripts
from benchmarks.real_bugs.watched import always, planted
from ditorch.conformance import databases
from ditorch.conformance.cases import FAILURES, WRONG, Limits, Result, Unit
from ditorch.conformance.hunt_checks import HuntChecks, seconds_of_a_round
from ditorch.conformance.op_checks import OperatorChecks
from ditorch.conformance.trial import Trial

PLAIN: Final = "conformance"
HUNT: Final = "`--hunt`"
DEVICE: Final = "soft:0"
MINUTES: Final = 10
CORES: Final = 2
_DTYPES: Final = ("float32", "bfloat16", "float16", "int64")
_NONE: Final = "not in op_db"


def load() -> None:
    """Import PyTorch's databases and the verdict's own tables before anything is timed."""
    databases.operators()
    # As workers do: the verdict imports PyTorch's decompositions on first use, and the clock must not see that.
    x = torch.linspace(-1, 1, 12).reshape(3, 4).bfloat16().requires_grad_()
    Trial("torch.softmax", torch.softmax, (x, 1), {}, "cpu").run(backward=True)


def plain(bug: Bug) -> Answer:
    """The checks that the plain run makes of the operators concerned, in four dtypes, until one is wrong."""
    began, hits = time.process_time(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for unit in _units(bug):
            for check in unit.checks:
                with planted(bug.fault) as all_planted:
                    result = _checked(unit, check)
                    hits += sum(one.hits for one in all_planted)
                if result.status in FAILURES and _checked(unit, check).status not in FAILURES:
                    note = f"{result.case}: {result.message[:120]}"
                    return Answer(hits, True, True, note=note, seconds=round(time.process_time() - began, 2))
    return Answer(hits, note="" if bug.listed else _NONE, seconds=round(time.process_time() - began, 2))


def _units(bug: Bug) -> Iterator[Unit]:
    for name in bug.listed:
        found = databases._operator_units(name, databases.operators()[name], "soft")
        by_dtype = {unit.dtype: unit for unit in found}
        yield from (by_dtype[dtype] for dtype in _DTYPES if dtype in by_dtype)


def _checked(unit: Unit, check: str) -> Result:
    return OperatorChecks(unit, DEVICE, Limits(timeout=600)).run(check)


def hunted(bug: Bug, scripts: Scripts | None = None, check: str = "round-1") -> Answer:
    """One round of the operators concerned, in the time that ten minutes on two cores have for each.

    It is CPU time, since the machine may be busy: that does less in a second than an idle one.
    """
    began, hits, tried = time.process_time(), 0, 0
    for name in bug.listed:
        limits = Limits(timeout=2_400, hunt_seconds=seconds_of_a_round("soft", 60 * MINUTES * CORES))
        unit = Unit("hunt", name, "-", ())
        with planted(bug.fault) as all_planted:
            result = HuntChecks(unit, DEVICE, limits, clock=time.process_time).run(check)
            tried += result.samples
            hits += sum(one.hits for one in all_planted)
        # The same calls without the fault.
        again = replace(limits, samples=result.samples, hunt_seconds=600)
        if result.status == WRONG and hits and HuntChecks(unit, DEVICE, again).run(check).status != WRONG:
            seconds = round(time.process_time() - began, 2)
            script = _again(result, bug, scripts)
            return Answer(hits, True, True, reproduced=script, note=result.message[:160], seconds=seconds)
    note = f"no, in {tried} calls" if bug.listed else _NONE
    return Answer(hits, note=note, seconds=round(time.process_time() - began, 2))


def _again(result: Result, bug: Bug, scripts: Scripts | None) -> str:
    if scripts is None or len(result.details) < 2:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "found.py"
        script.write_text(result.details[1], encoding="utf-8")
        with_it = scripts.run(script, DITORCH_DEVICE="soft", DITORCH_SOFT_FAULTS=always(bug.fault))
        return f"{with_it}/{scripts.run(script, DITORCH_DEVICE='soft')}"
