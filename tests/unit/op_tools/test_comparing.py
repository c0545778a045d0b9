"""Comparing on the host: what a forward leaves for its backward, also when both are under way at once."""

from __future__ import annotations

import threading
from typing import Any

import torch

from op_tools.call.traits import traits_of
from op_tools.compare.comparing import Comparer, Comparison, Memory
from op_tools.judge.verdict import RIGHT, Rules


def comparison(phase: str, function: Any, args: tuple[Any, ...], host: dict[str, Any], memory: Memory) -> Comparison:
    traits = traits_of(function)
    return Comparison(phase, traits.name, function, traits, "cuda", (0, 0), args, {}, host, 1000, memory=memory)


def test_a_backward_waits_for_the_signs_that_its_forward_brings() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    x = (x + x.T).requires_grad_()
    values, vectors = torch.linalg.eigh(x)
    turned = vectors * torch.tensor([-1.0, 1.0, -1.0, 1.0])  # as right as the others
    sent = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    (grad,) = torch.autograd.grad(turned, [x], sent)
    memory, comparer = Memory(), Comparer(Rules())
    back = comparison(
        "backward", torch.linalg.eigh, (x,), {"grad_outputs": [None, sent], "grad_inputs": [grad]}, memory
    )
    early = threading.Thread(target=comparer.compare, args=(back,))
    early.start()
    early.join(0.3)
    assert early.is_alive(), "the signs are not known yet"
    result = (values.detach(), turned.detach())
    ahead = comparison(
        "forward", torch.linalg.eigh, (x,), {"args": (x.detach(),), "kwargs": {}, "result": result}, memory
    )
    assert comparer.compare(ahead).verdict == RIGHT
    early.join(30)
    assert back.judgement is not None
    assert back.judgement.verdict == RIGHT
