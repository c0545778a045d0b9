"""PyTorch's module database: every nn.Module gives on soft what it gives on the CPU, gradients too."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.device.soft import sweep

# PyTorch runs other operators for them on devices than on the CPU (fused cells; oneDNN on the CPU alone).
ROUNDED = {"nn.GRU", "nn.GRUCell", "nn.LSTM", "nn.LSTMCell", "nn.RNN"}


def modules() -> list[Any]:
    from ditorch.conformance.databases import modules as known

    return list(known().values())


def run(info: Any, case: Any, device: str, training: bool) -> Any:
    sweep.seed_everything()
    module = info.module_cls(*case.constructor_input.args, **case.constructor_input.kwargs).to(device).train(training)
    args, kwargs = sweep.moved((case.forward_input.args, case.forward_input.kwargs), device)
    out = module(*args, **kwargs)
    leaves = [t for t in (*sweep.tensors((args, kwargs)), *module.parameters()) if t.requires_grad and t.is_leaf]
    return out, sweep.gradients(out, leaves)


def compare(info: Any, case: Any, training: bool) -> str:
    try:
        expected = run(info, case, "cpu", training)
    except Exception:
        return ""  # not for the CPU either
    found = run(info, case, "soft", training)
    why = sweep.difference(expected, found)
    if why and info.name in ROUNDED:
        pairs = zip(sweep.tensors(expected), sweep.tensors(found))
        return "" if all(torch.allclose(a, b.cpu(), rtol=1e-4, atol=1e-5) for a, b in pairs) else why
    return why


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_modules_equal_the_cpus(part):
    wrong, count = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in modules()[part::4]:
            for training in (True, False):
                sweep.seed_everything()
                for case in info.module_inputs_func(
                    info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
                ):
                    if case.forward_input is not None:
                        count += 1
                        why = compare(info, case, training)
                        wrong += [f"{info.name}: {why}"] if why else []
    assert count > 50
    assert not wrong, "\n".join(wrong)
