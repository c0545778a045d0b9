"""Import, deactivate, the CPU backend: what needs no accelerator at all."""

from __future__ import annotations

from tests.unit.ditorch.vendor_stubs import run

WALK = """
import sys, types
import torch, torch.distributed.fsdp, torch.utils.checkpoint, torch.profiler
{warm}

def state():
    seen = {{}}
    spaces = [m for n, m in sys.modules.items() if (n == "torch" or n.startswith("torch.")) and m is not None]
    spaces += [torch.Tensor, torch.UntypedStorage, torch.TypedStorage, torch.nn.Module]
    spaces += [v for m in list(spaces) if isinstance(m, types.ModuleType) for v in list(vars(m).values())
               if isinstance(v, type) and getattr(v, "__module__", "").startswith("torch")]
    for space in spaces:
        for name, value in list(vars(space).items()):
            seen[id(space), name] = value
            function = value.fget if type(value) is property else value
            if type(value) in (staticmethod, classmethod):
                function = value.__func__
            if isinstance(function, types.FunctionType):
                seen[id(space), name, "code"] = (
                    function.__code__, function.__defaults__,
                    None if function.__kwdefaults__ is None else dict(function.__kwdefaults__),
                    {{k: v for k, v in vars(function).items() if k != "__wrapped__"}},
                )
    seen["registry"] = list(torch.serialization._package_registry)
    seen["builtins"] = dict(torch.jit._builtins._get_builtin_table())
    seen["finders"] = list(sys.meta_path)
    return seen, spaces  # the spaces stay alive, so that their numbers stay theirs

before, kept = state()
import os, ditorch
environment = dict(os.environ)
during, kept2 = state()
assert any(before.get(k) is not v for k, v in during.items() if k in before), "nothing was patched"
if {train}:
    x = torch.randn(2, 2, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        (x @ x).sum().backward()
ditorch.deactivate()
after, kept3 = state()
wrong = [k[1:] for k, v in before.items() if isinstance(k, tuple) and len(k) == 2 and after.get(k) is not v]
wrong += [k for k, v in before.items() if not (isinstance(k, tuple) and len(k) == 2) and after.get(k) != v]
# A module attribute may appear by being imported; a patch would be a changed or a new non-module.
added = [k for k in after if k not in before and isinstance(k, tuple) and len(k) == 2
         and k[0] in {{id(s) for s in kept}} and not isinstance(after[k], types.ModuleType)]
added = [k[1] for k in added if k[1] not in {allowed!r}]
assert not wrong, wrong[:20]
assert not added, added[:20]
assert not ditorch.patches()
"""
# What Python and PyTorch add by themselves the first time something is used.
LAZILY_ADDED = {"__warningregistry__", "_C_custom", "__annotations__"}


def test_deactivate_leaves_torch_as_it_was() -> None:
    code = WALK.format(warm="", train=False, allowed=LAZILY_ADDED)
    result = run(code, DITORCH_DEVICE="cpu")
    assert result.returncode == 0, result.stderr


def test_deactivate_after_use_leaves_torch_as_it_was() -> None:
    warm = "import torch._dynamo, torch._inductor; torch.ones(2, requires_grad=True).sum().backward()"
    result = run(WALK.format(warm=warm, train=True, allowed=LAZILY_ADDED), DITORCH_DEVICE="cpu")
    assert result.returncode == 0, result.stderr


def test_activate_again_and_on_another_device() -> None:
    code = """
import torch, ditorch
ditorch.deactivate()
assert ditorch.activate("cpu").name == "cpu" and torch.cuda.is_available()
assert ditorch.activate("cpu").name == "cpu"
count = len(ditorch.patches())
ditorch.deactivate(); ditorch.activate()
assert len(ditorch.patches()) == count
"""
    result = run(code, DITORCH_DEVICE="cpu")
    assert result.returncode == 0, result.stderr


def test_cpu_backend_runs_cuda_code() -> None:
    code = """
import io, torch, ditorch
from torch.utils.data import DataLoader, TensorDataset
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
for (x,) in DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4, pin_memory=True):
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.cuda.stream(torch.cuda.Stream()):
        loss = model(x.to("cuda", non_blocking=True)).float().pow(2).mean()
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
end.record(); torch.cuda.synchronize()
assert start.elapsed_time(end) > 0
assert torch.randn(2, device="cuda:0").device.type == "cpu"
buffer = io.BytesIO(); torch.save(model.state_dict(), buffer); buffer.seek(0)
assert torch.load(buffer, map_location="cuda")["weight"].device.type == "cpu"
torch.cuda.manual_seed(1); a = torch.rand(2, device="cuda"); torch.cuda.manual_seed(1)
assert torch.equal(a, torch.rand(2, device="cuda"))
x = torch.ones(1, device="cuda"); x.record_stream(torch.cuda.current_stream())
try:
    torch.cuda.set_device(1)
except RuntimeError as error:
    assert "one device" in str(error)
else:
    raise AssertionError
"""
    result = run(code, DITORCH_DEVICE="cpu")
    assert result.returncode == 0, result.stderr


def test_import_loads_no_vendor_and_no_extra() -> None:
    code = """
import sys, torch, ditorch
loaded = set(sys.modules)
for name in ("torch_npu", "matplotlib", "pandas", "rich", "ditorch.soft", "torch._dynamo", "torch._inductor"):
    assert name not in loaded, name
"""
    result = run(code, DITORCH_DEVICE="cpu")
    assert result.returncode == 0, result.stderr


def test_every_patch_says_what_why_and_how() -> None:
    code = """
import torch, ditorch
patches = ditorch.patches()
assert len({p.what for p in patches}) == len(patches)
for p in patches:
    assert p.what and p.why and p.kind in ("mapped", "emulated", "hint", "unsupported"), p
    assert p.undo is not None or p.how == "none", p
assert any(p.what == "torch.backends.cudnn.benchmark" and p.kind == "hint" for p in patches)
"""
    result = run(code, DITORCH_DEVICE="cpu")
    assert result.returncode == 0, result.stderr


def test_autocast_for_cuda_is_float16_on_the_cpu_as_well():
    code = """
import torch, ditorch
x = torch.ones(2, 2)
with torch.autocast("cuda"):
    assert (x @ x).dtype is torch.float16 and torch.get_autocast_dtype("cuda") is torch.float16
with torch.autocast("cpu"):
    assert (x @ x).dtype is torch.bfloat16
with torch.autocast("cuda", torch.bfloat16):
    assert (x @ x).dtype is torch.bfloat16 and torch.get_autocast_gpu_dtype() is torch.bfloat16
assert torch.get_autocast_dtype("cuda") is torch.float16 and torch.get_autocast_dtype("cpu") is torch.bfloat16
torch.set_autocast_gpu_dtype(torch.bfloat16)
with torch.autocast("cuda"):
    assert (x @ x).dtype is torch.bfloat16
ditorch.deactivate()
"""
    result = run(code, DITORCH_DEVICE="cpu")
    assert result.returncode == 0, result.stderr


def test_a_build_for_cuda_without_a_gpu_has_no_accelerator_where_cuda_means_the_cpu() -> None:
    done = run(
        """
import torch
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")  # what such a build says
import ditorch
assert torch.cuda.is_available()
assert not torch.accelerator.is_available()
from op_tools.call.devices import accelerator_type
assert accelerator_type() == "cpu", accelerator_type()
ditorch.deactivate()
""",
        DITORCH_DEVICE="cpu",
    )
    assert done.returncode == 0, done.stderr
