"""``torch.compile`` keeps working on code that says cuda."""

from __future__ import annotations

import pytest
import torch

import ditorch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


def test_compiled_training_step_equals_the_eager_one() -> None:
    def train(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).cuda()
        run = torch.compile(model) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = run(torch.ones(4, 8, device="cuda")).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train(True) == pytest.approx(train(False), rel=2e-2)


@pytest.mark.skipif(not ditorch.backend.shows_as_cuda, reason="CPU tensors cannot be shown as cuda")
def test_devices_inside_compiled_code() -> None:
    @torch.compile(fullgraph=True)
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cuda":
            return x - 1
        y = torch.zeros(3, device="cuda") + torch.ones(3, device=x.device) + torch.arange(3).to("cuda")
        return y + x.new_ones(3)

    assert f(torch.ones(3, device="cuda")).tolist() == [2.0, 3.0, 4.0]
