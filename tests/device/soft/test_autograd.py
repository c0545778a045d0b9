"""Autograd on soft: in threads, twice, forward, through torch.func, checkpoints, hooks and custom functions."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import func, nn
from torch.utils.checkpoint import checkpoint

from tests.device.soft.sweep import difference


def same(cpu, soft) -> None:
    why = difference(cpu, soft)
    assert not why, why


def both(function, *host):
    """Run on both devices with the same leaves."""
    results = []
    for device in ("cpu", "soft"):
        leaves = [t.detach().clone().to(device).requires_grad_(t.is_floating_point()) for t in host]
        results.append(function(*leaves))
    same(*results)
    return results[1]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def test_gradients_equal_the_cpus():
    def run(x):
        net = model().to(x.device)
        net(x).square().mean().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    both(run, torch.randn(5, 8))


def test_backward_runs_on_threads_of_the_devices():
    seen = {}

    class Where(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen[grad.device.index] = (threading.get_native_id(), torch.soft.current_device())
            return grad

    a = torch.ones(2, device="soft:0", requires_grad=True)
    b = torch.ones(2, device="soft:1", requires_grad=True)
    (Where.apply(a).sum() + Where.apply(b).sum().to("soft:0")).backward()
    assert a.grad.tolist() == b.grad.tolist() == [1, 1]
    assert {index: current for index, (_, current) in seen.items()} == {0: 0, 1: 1}
    assert len({thread for thread, _ in seen.values()} | {threading.get_native_id()}) == 3


def test_backward_from_many_threads_at_once():
    results: list[torch.Tensor | None] = [None] * 8
    # Made here: models that are initialised in threads would draw from one generator at the same time.
    nets = [model().to(f"soft:{index % 2}") for index in range(8)]

    def work(index: int) -> None:
        device, net = f"soft:{index % 2}", nets[index]
        for _ in range(5):
            net.zero_grad()
            net(torch.full((3, 8), float(index), device=device)).sum().backward()
        results[index] = net[0].weight.grad.cpu()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, found in enumerate(results):
        net = model()
        net(torch.full((3, 8), float(index))).sum().backward()
        same(net[0].weight.grad, found)


def test_an_error_in_a_backward_thread_is_raised_here():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("broken on purpose")

    x = torch.ones(2, device="soft", requires_grad=True)
    with pytest.raises(ValueError, match="broken on purpose"):
        Broken.apply(x).sum().backward()


def test_a_process_that_ends_right_after_backward_ends_well(python):
    done = python(
        """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core: threads rarely run when they could
        for _ in range(3):
            child = os.fork()
            if child == 0:
                x = torch.ones(3, device="soft", requires_grad=True)
                y = torch.autograd.grad((x * 2).sum(), [x])
                raise SystemExit
            assert os.waitpid(child, 0)[1] == 0
        """
    )
    assert done.returncode == 0, done.stderr


def test_double_backward():
    def run(x, w):
        y = (x @ w).tanh().pow(2).sum()
        (gx,) = torch.autograd.grad(y, x, create_graph=True)
        return gx, torch.autograd.grad(gx.square().sum(), [x, w])

    both(run, torch.randn(3, 4), torch.randn(4, 5))


def test_gradcheck():
    x = torch.randn(3, 4, dtype=torch.float64, device="soft", requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: torch.nn.functional.gelu(t).softmax(-1), (x,))
    assert torch.autograd.gradgradcheck(lambda t: (t.sin() * t).sum(), (x,))


def test_forward_mode():
    def run(x):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
            out = torch.autograd.forward_ad.unpack_dual(torch.nn.functional.layer_norm(dual.sin(), (4,)))
            return out.primal, out.tangent

    both(run, torch.randn(3, 4))


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: func.grad(lambda t: t.sin().sum())(x),
        lambda x: func.vmap(lambda t: (t * t).sum())(x),
        lambda x: func.vmap(func.grad(lambda t: t.sin().sum()))(x),
        lambda x: func.vmap(lambda a, b: a @ b, in_dims=(0, None))(x, x.t()),
        lambda x: func.jvp(torch.sin, (x,), (torch.ones_like(x),)),
        lambda x: func.vjp(torch.sin, x)[1](torch.ones_like(x)),
        lambda x: func.jacrev(torch.sin)(x[0]),
        lambda x: func.jacfwd(torch.sin)(x[0]),
        lambda x: func.hessian(lambda t: t.sin().sum())(x[0]),
        lambda x: func.linearize(torch.sin, x)[1](torch.ones_like(x)),
        lambda x: func.functionalize(lambda t: t.clone().add_(1).view(-1).mul_(2))(x),
    ],
)
def test_torch_func(transform):
    both(lambda x: transform(x.detach()), torch.randn(3, 4))


def test_per_sample_gradients():
    def run(x):
        net = model().to(x.device)
        parameters = {name: p.detach() for name, p in net.named_parameters()}

        def loss(parameters, sample):
            return func.functional_call(net, parameters, (sample,)).square().mean()

        return func.vmap(func.grad(loss), in_dims=(None, 0))(parameters, x.detach())

    results = [run(torch.linspace(-1, 1, 24).view(3, 8).to(device)) for device in ("cpu", "soft")]
    assert torch.allclose(results[0]["0.weight"], results[1]["0.weight"].cpu())


def test_vmap_randomness_follows_the_devices_generator():
    def run(device):
        torch.manual_seed(3)
        x = torch.ones(4, 5, device=device)
        return func.vmap(lambda t: t * torch.rand(5, device=device), randomness="different")(x)

    same(run("cpu"), run("soft"))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpoint(reentrant, dropout):
    def run(x):
        net = model().to(x.device)
        torch.manual_seed(5)

        def block(t):
            return torch.nn.functional.dropout(net(t), dropout)

        checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    both(run, torch.randn(5, 8))


def test_hooks():
    calls = []
    x = torch.ones(3, device="soft", requires_grad=True)
    x.register_hook(lambda grad: grad * 2)
    x.register_post_accumulate_grad_hook(lambda t: calls.append(("accumulated", t.grad.device.type)))
    y = x * 3
    y.grad_fn.register_hook(lambda grads_in, grads_out: calls.append(("node", grads_out[0].device.type)))
    layer = nn.Linear(3, 1, bias=False, device="soft")
    layer.register_forward_hook(lambda module, args, out: calls.append(("forward", out.device.type)))
    layer.register_full_backward_hook(lambda module, gi, go: calls.append(("module", go[0].device.type)))
    nn.init.ones_(layer.weight)
    layer(y).sum().backward()
    assert x.grad.tolist() == [6, 6, 6]
    assert sorted(calls) == [("accumulated", "soft"), ("forward", "soft"), ("module", "soft"), ("node", "soft")]


def test_saved_tensor_hooks_can_move_to_the_host():
    x = torch.ones(3, device="soft", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = x * x
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    assert x.grad.device.type == "soft"


def test_custom_function_with_mutation_and_views():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.save_for_backward(factor)
            ctx.mark_dirty(x)
            return x.mul_(factor)

        @staticmethod
        def backward(ctx, grad):
            (factor,) = ctx.saved_tensors
            return grad * factor, None

    def run(x, factor):
        y = Scale.apply(x * 1, factor.detach())
        y[0].sum().backward()
        return y, x.grad

    both(run, torch.randn(3, 4), torch.randn(4))


def test_inplace_on_views_is_differentiable():
    def run(x):
        y = x * 1
        y[:, 1].mul_(2)
        y.t()[2].add_(y[0, 0])
        y.sum().backward()
        return y, x.grad

    both(run, torch.randn(4, 4))


def test_a_changed_saved_tensor_is_noticed():
    x = torch.ones(3, device="soft", requires_grad=True)
    y = x.exp()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_anomaly_mode_names_the_operation():
    x = torch.zeros(2, device="soft", requires_grad=True)
    with (
        torch.autograd.detect_anomaly(check_nan=True),
        pytest.warns(UserWarning, match="SqrtBackward"),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        (x.sqrt() * 0).sum().backward()


def test_gradients_across_devices():
    x = torch.ones(3, requires_grad=True)
    y = x.to("soft:0") * 2
    (y.to("soft:1") * 3).sum().cpu().backward()
    assert x.grad.tolist() == [6, 6, 6]
    assert x.grad.device.type == "cpu"


def test_work_on_the_device_in_a_forked_child_is_the_error_that_cuda_gives(python):
    done = python(
        """
        import os
        torch.set_num_threads(2)
        x = torch.ones(1000, 1000, device="soft", requires_grad=True)
        loss = (x @ x).sum()  # threads of OpenMP
        def child(work):
            pid = os.fork()
            if pid == 0:
                torch.manual_seed(0)  # as a DataLoader's worker does
                torch.ones(3).add(1)
                try:
                    work()
                except RuntimeError as error:
                    os._exit(7 if "Cannot re-initialize CUDA in forked subprocess" in str(error) else 1)
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        child(loss.backward)
        child(lambda: torch.ones(1000, 1000, device="soft", requires_grad=True).sum().backward())
        loss.backward()
        """
    )
    assert (done.returncode, done.stdout.split()) == (0, ["7", "7"]), done.stderr
