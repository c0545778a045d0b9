"""Judges a saved call that was run again, as it was judged in the run that saved it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import settings
from ..call.traits import traits_of
from ..copies.invocation import Invocation
from ..files.captures import read
from ..files.header import read_header
from ..judge.verdict import NOT_COMPARABLE, WRONG, Rules
from .judges.host import Comparer, ForwardRun
from .ladder import BACKWARD, Job


def judge(folder: Path, phase: str, device: str, found: Mapping[str, Any]) -> tuple[bool, str] | None:
    """Whether a result is wrong, and the reason; None where it cannot be compared.

    `found` is what `reproduce.py` has: the arguments as saved, the function, and what the device left of them.
    """
    saved = found["saved"]
    op, site, region = read_header(saved)
    function = found["function"]
    call = Invocation(0, op, function, traits_of(function, op), site, region._replace(device=device))
    job = Job(call, phase, args=saved["args"], kwargs=saved["kwargs"])
    forward = None
    if phase == BACKWARD:
        sent, grads = found["sent"], found["grad_input"]
        job.values = sent, grads
        job.unasked = tuple([n for n in range(len(grads)) if n not in found["asked"]])
        forward = ForwardRun(returned=found["output"])
        forward.done.set()
    else:
        job.values = (*found["after"], found["output"])
    rules = read(folder / f"{phase}.pth")["rules"]
    casts = settings.Casts(rules["casts"])
    judged = Comparer(Rules(rules["standard"], rules["tolerances"], casts)).compare(job, forward)
    return None if judged.verdict == NOT_COMPARABLE else (judged.verdict == WRONG, judged.reason)
