"""Comparing on the host: what a forward leaves for its backward, also when both are under way at once."""

from __future__ import annotations

import threading
from typing import Any

import torch

from op_tools.call.traits import traits_of
from op_tools.compare.judges.host import Comparer, ForwardRun
from op_tools.compare.ladder import Job
from op_tools.copies.invocation import Invocation, Region, Site
from op_tools.judge.verdict import RIGHT, Rules


def job(phase: str, function: Any, args: tuple[Any, ...], values: tuple[Any, ...]) -> Job:
    traits = traits_of(function)
    call = Invocation(1, traits.name, function, traits, Site(), Region("cuda"))
    return Job(call, phase, args=args, values=values, nbytes=1000)


def test_a_backward_waits_for_the_signs_that_its_forward_brings() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    x = (x + x.T).requires_grad_()
    values, vectors = torch.linalg.eigh(x)
    turned = vectors * torch.tensor([-1.0, 1.0, -1.0, 1.0])  # as right as the others
    sent = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    (grad,) = torch.autograd.grad(turned, [x], sent)
    forward, comparer = ForwardRun(), Comparer(Rules())
    back, found = job("backward", torch.linalg.eigh, (x,), ([None, sent], [grad])), []
    early = threading.Thread(target=lambda: found.append(comparer.compare(back, forward)))
    early.start()
    early.join(0.3)
    assert early.is_alive(), "the signs are not known yet"
    result = (values.detach(), turned.detach())
    ahead = job("forward", torch.linalg.eigh, (x,), ((x.detach(),), {}, result))
    assert comparer.compare(ahead, forward).verdict == RIGHT
    early.join(30)
    assert [judgement.verdict for judgement in found] == [RIGHT]
