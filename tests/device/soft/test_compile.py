"""torch.compile on soft with the eager and aot_eager backends, and shapes without data."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from tests.device.soft.sweep import difference


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.slow  # importing torch's compiler takes several seconds
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_graph_gives_the_same_gradients(backend):
    torch.compiler.reset()
    eager, compiled = Block().to("soft"), torch.compile(Block().to("soft"), backend=backend, fullgraph=True)
    x = torch.randn(3, 8, device="soft")
    for net in (eager, compiled):
        net(x).square().sum().backward()
    assert not difference(eager(x), compiled(x))
    for a, b in zip(eager.parameters(), compiled.parameters()):
        assert not difference(a.grad, b.grad)
        assert b.grad.device == x.device


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_factories_mutation_and_views_inside_a_graph(backend):
    torch.compiler.reset()

    def step(x, buffer):
        buffer.add_(x.sum(0))
        mask = torch.arange(x.shape[1], device=x.device) > 1
        y = torch.where(mask, x, torch.zeros((), device=x.device)).t()
        return y.view(-1), buffer[1:]

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    x = torch.randn(4, 4, device="soft:1")
    buffers = torch.zeros(4, device="soft:1"), torch.zeros(4, device="soft:1")
    expected, found = step(x.t().contiguous().t(), buffers[0]), compiled(x.t().contiguous().t(), buffers[1])
    assert not difference(expected, found)
    assert not difference(*buffers)
    assert found[1].untyped_storage().data_ptr() == buffers[1].untyped_storage().data_ptr()


@pytest.mark.slow
def test_compiling_again_for_other_shapes_and_devices():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x * 2).sum(-1), backend="aot_eager", fullgraph=True, dynamic=True)
    for shape, device in (((2, 3), "soft:0"), ((4, 5), "soft:0"), ((4, 5), "soft:1"), ((4, 5), "cpu")):
        x = torch.randn(shape, device=device)
        out = compiled(x)
        assert out.device == x.device
        assert torch.equal(out, (x * 2).sum(-1))


@pytest.mark.slow
def test_random_numbers_inside_a_graph():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend="aot_eager", fullgraph=True)
    x = torch.ones(100, device="soft")
    torch.manual_seed(3)
    first = compiled(x)
    torch.manual_seed(3)
    assert torch.equal(first, compiled(x))
    assert 0 < int((first == 0).sum()) < 100


@pytest.mark.slow
def test_autocast_inside_a_graph():
    torch.compiler.reset()

    def step(x):
        with torch.autocast("soft", dtype=torch.bfloat16):
            return x @ x

    assert torch.compile(step, backend="aot_eager", fullgraph=True)(torch.ones(2, 2, device="soft")).dtype == (
        torch.bfloat16
    )


def test_fake_tensors_know_shape_and_device():
    from torch._subclasses import FakeTensorMode

    gc.collect()  # what earlier tests have left may go at any time
    before = torch.soft.memory_allocated()
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(3, 4, device="soft:1"))
        y = torch.randn(4, 5, device="soft:1")
        z = torch.nn.functional.dropout(x @ y)
        assert (z.shape, z.device) == ((3, 5), torch.device("soft:1"))
        assert z.to("cpu").device.type == "cpu"
        assert z[None].sum(0).stride() == (5, 1)
        with pytest.raises(RuntimeError, match="device"):
            x + torch.ones(3, 4)
        big = torch.empty(2**40, device="soft")
        assert big.numel() == 2**40
    assert torch.soft.memory_allocated() == before


def test_meta_and_back():
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    net = net.to_empty(device="soft")
    assert net.weight.device.type == "soft"
    with torch.device("soft:1"):
        assert nn.Linear(2, 2).weight.device == torch.device("soft:1")


def test_make_fx_traces_soft_calls():
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.ones(3, device="soft")
    traced = make_fx(lambda t: t.sin().add_(1).view(-1))(x)
    assert torch.equal(traced(x), x.sin() + 1)
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.sin.default", "aten.add_.Tensor", "aten.view.default"]


def test_attention_is_traced():
    import torch.nn.functional as F

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).sum()

    x = torch.randn(1, 2, 8, 4, device="soft", requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager")
    torch.testing.assert_close(compiled(x), attend(x))
    compiled(x).backward()
    assert x.grad is not None


@pytest.mark.slow  # Dynamo alone takes 10 s
def test_compiled_code_after_the_redirect_was_taken_back(python: Any) -> None:
    code = """
        import torch, ditorch

        def f(x):
            return x + torch.arange(3, device=x.device)

        def run(device):
            torch._dynamo.reset()
            return torch.compile(f, backend="eager", fullgraph=True)(torch.ones(3, device=device)).tolist()

        assert run("cuda") == [1.0, 2.0, 3.0]
        ditorch.deactivate()
        assert run("soft") == [1.0, 2.0, 3.0]
        ditorch.activate()
        assert run("cuda") == [1.0, 2.0, 3.0]
    """
    done = python(code, load=False, DITORCH_DISABLE_MOCK="")
    assert done.returncode == 0, done.stderr[-2000:]
