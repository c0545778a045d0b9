"""What people's scripts do on CUDA beyond one plain training loop: each class that once broke under ditorch."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ditorch

PROGRAMS = Path(__file__).parent / "programs"
PROJECT = Path(__file__).resolve().parents[3]
redirected = pytest.mark.skipif(ditorch.backend.native, reason="PyTorch itself means this device by cuda")
on_soft = pytest.mark.skipif(ditorch.backend.name != "soft", reason="for the software accelerator")


def run(*command: str, **environment: str) -> str:
    paths = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-4000:]}"
    return result.stdout


@on_soft
@pytest.mark.distributed
def test_newer_distributed_code_on_four_ranks() -> None:
    output = run(str(PROGRAMS / "wild.py"), DITORCH_SOFT_DEVICES="4")
    assert output.count(" ok\n") == 13, output


@on_soft
def test_device_tensors_in_other_processes() -> None:
    assert run(str(PROGRAMS / "sharing.py"), DITORCH_SOFT_SHARED_RANDOM="1") == "shared\n"


@redirected
def test_scripted_class_finds_the_names_of_its_caller(tmp_path: Path) -> None:
    (tmp_path / "scripted.py").write_text(
        "import torch\n"
        "def helper(x: torch.Tensor) -> torch.Tensor:\n    return x + 1\n"
        "@torch.jit.script\nclass Adder:\n"
        "    def __init__(self) -> None:\n        self.n = 1\n"
        "    def add(self, x: torch.Tensor) -> torch.Tensor:\n        return helper(x)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import scripted
    finally:
        sys.path.remove(str(tmp_path))
    assert scripted.Adder().add(torch.ones(1, device="cuda")).item() == 2


@redirected
def test_warnings_name_the_line_of_the_user() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.tensor(torch.ones(1), device="cuda")  # a warning of C++
        torch.cuda.amp.GradScaler()  # one of Python
    assert [warning.filename for warning in told] == [__file__] * len(told)
    assert len(told) >= 2


@redirected
def test_a_warning_is_told_once_per_line_and_filtered_by_module() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(2):
            torch.tensor(torch.ones(1), device="cuda")
        torch.tensor(torch.ones(1), device="cuda")
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
        torch.tensor(torch.zeros(1), device="cuda")
    assert len({warning.lineno for warning in told}) == len(told) == 2


@pytest.mark.slow
@redirected
def test_dynamo_is_reset() -> None:
    import torch._dynamo

    torch._dynamo.reset()  # a compiled optimizer step takes the same way
    assert torch.backends.cuda.is_built()


@redirected
@pytest.mark.parametrize("how", ["load", "load_inline", "CUDAExtension"])
def test_cuda_source_is_refused_by_name(how: str, tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    (tmp_path / "kernel.cu").write_text("__global__ void f() {}")
    sources = [str(tmp_path / "kernel.cu")]
    arguments = {
        "load": (cpp_extension.load, {"name": "x", "sources": sources}),
        "load_inline": (cpp_extension.load_inline, {"name": "x", "cpp_sources": "", "cuda_sources": "int f();"}),
        "CUDAExtension": (cpp_extension.CUDAExtension, {"name": "x", "sources": sources}),
    }
    function, given = arguments[how]
    with pytest.raises(ditorch.UnsupportedError, match=r"of CUDA source .* `ditorch scan`"):
        function(**given)


@on_soft
def test_a_memory_snapshot_follows_an_accepted_history(tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history(max_entries=100)
    kept = torch.zeros(1000, device="cuda")
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert sum(segment["total_size"] for segment in snapshot["segments"]) >= kept.nbytes
    torch.cuda.memory._record_memory_history(enabled=None)


@on_soft
def test_one_soft_device_unless_more_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import ditorch.soft

    monkeypatch.delenv("DITORCH_SOFT_DEVICES", raising=False)
    assert ditorch.soft._device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # torchrun --nproc-per-node 3
    assert ditorch.soft._device_count() == 3


# --- operators that only CUDA has ------------------------------------------------------------------


@on_soft
@pytest.mark.skipif(not hasattr(torch.ops.aten.mm, "dtype"), reason="torch has it since 2.8")
def test_products_in_a_wider_type() -> None:
    a, b = (torch.randn(2, 4, 4, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wide = torch.bmm(a, b, out_dtype=torch.float32)
    assert torch.equal(wide, a.float() @ b.float())
    assert torch.equal(torch.mm(a[0], b[0], out_dtype=torch.float32), wide[0])
    added = torch.ones(2, 4, 4, device="cuda")
    assert torch.equal(torch.baddbmm(added, a, b, out_dtype=torch.float32), torch.baddbmm(added, a.float(), b.float()))
    assert torch.addmm(added[0], a[0], b[0], out_dtype=torch.float32).dtype == torch.float32


@on_soft
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["efficient", "flash", "cudnn", "flash by length"])
def test_attention_kernels_by_name(kind: str, causal: bool) -> None:
    parts = [torch.randn(2, 4, 6, 8, device="cuda", dtype=torch.float64, requires_grad=True) for _ in range(3)]
    wanted = F.scaled_dot_product_attention(*parts, is_causal=causal)
    if kind == "flash by length":
        turned = [part.transpose(1, 2) for part in parts]
        forward = torch.ops.aten._flash_attention_forward
        result = forward(*turned, None, None, 6, 6, 0.0, causal, False)[0].transpose(1, 2)
    else:
        middle = () if kind == "flash" else (None, True)
        result = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")(*parts, *middle, 0.0, causal)[0]
    assert torch.allclose(result, wanted)
    gradient = torch.randn_like(wanted)
    for mine, theirs in zip(*(torch.autograd.grad(x, parts, gradient) for x in (result, wanted)), strict=True):
        assert torch.allclose(mine, theirs)


@on_soft
@pytest.mark.parametrize("kind", ["efficient", "flash", "cudnn"])
def test_attention_leaves_the_layout_that_pytorch_expects(kind: str) -> None:
    """DTensor takes it from PyTorch's description of the kernel; `view` then fails on any other."""
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    strides = []
    for device in ("cuda", "meta"):
        whole = torch.empty(2, 6, 4, 8, device=device).transpose(1, 2).requires_grad_()
        parts = [whole, *(torch.empty(2, 4, 6, 8, device=device, requires_grad=True) for _ in range(2))]
        result = forward(*parts, *(() if kind == "flash" else (None, True)))[0]
        strides.append([result.stride(), *(g.stride() for g in torch.autograd.grad(result.sum(), parts))])
    assert strides[0] == strides[1]


@on_soft
def test_attention_drops_the_same_in_both_passes() -> None:
    query, key, value = (torch.randn(1, 2, 16, 4, device="cuda", dtype=torch.float64) for _ in range(3))
    value.requires_grad_()
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    result = attend(query, key, value, None, True, 0.5)[0]
    # Linear in the values: the gradient of the sum gives the sum back only if the mask is the same one.
    (gradient,) = torch.autograd.grad(result.sum(), value)
    assert torch.allclose((gradient * value).sum(), result.sum())


@on_soft
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kinds", [["EFFICIENT"], ["FLASH"], ["CUDNN"], ["FLASH", "EFFICIENT"]])
def test_attention_where_a_program_allows_cuda_kernels_alone(kinds: list[str], dropout: float, masked: bool) -> None:
    """The CPU has one of these kernels, without dropout: it refused what every CUDA device does."""
    backends = [getattr(torch.nn.attention.SDPBackend, f"{kind}_ATTENTION") for kind in kinds]
    query, key, value = (torch.randn(1, 2, 6, 4, device="cuda", dtype=torch.float64) for _ in range(3))
    value.requires_grad_()
    mask = torch.randn(6, 6, device="cuda", dtype=torch.float64) if masked else None
    attend = functools.partial(F.scaled_dot_product_attention, query, key, value, mask)
    with torch.nn.attention.sdpa_kernel(backends):
        if kinds == ["FLASH"] and masked and dropout:  # on CUDA neither
            with pytest.raises(RuntimeError, match="No available kernel"):
                attend(dropout)
            return
        result = attend(dropout)
    (gradient,) = torch.autograd.grad(result.sum(), value)
    assert torch.allclose((gradient * value).sum(), result.sum())
    assert dropout or torch.allclose(result, attend())


@on_soft
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    "names", ["EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION", "MATH EFFICIENT_ATTENTION"]
)
def test_a_checkpoint_attends_alike_in_backward_outside_of_sdpa_kernel(names: str, dropout: float) -> None:
    """CUDA chooses the same kernel again; soft chose another one, which saved another number of tensors."""
    choices = [getattr(torch.nn.attention.SDPBackend, name) for name in names.split()]
    start = torch.randn(1, 2, 6, 4, device="cuda", dtype=torch.float64)
    value = torch.randn_like(start).requires_grad_()

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(start, start, x * 1.0, dropout_p=dropout)

    with torch.nn.attention.sdpa_kernel(choices):
        result = torch.utils.checkpoint.checkpoint(attend, value, use_reentrant=False)
    result.sum().backward()
    # Linear in the values: only the same dropout gives the sum back.
    assert value.grad is not None
    assert torch.allclose((value.grad * value).sum(), result.sum())


@on_soft
def test_truth_values_have_an_absolute_value() -> None:
    """CUDA has dtypes that the CPU lacks; a script counts errors with `(a != b).abs().sum()`."""
    wrong = torch.tensor([True, False, True], device="cuda")
    assert wrong.abs().dtype == torch.bool
    assert wrong.abs().sum().item() == 2
    out = torch.empty(0, dtype=torch.bool, device="cuda")
    assert torch.abs(wrong, out=out) is out
    assert out.tolist() == wrong.clone().abs_().tolist() == [True, False, True]
    assert F.softsign(wrong).tolist() == [0.5, 0.0, 0.5]


@on_soft
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["avg_pool3d", "antialias", "multi_margin", "multilabel_margin", "round", "rrelu"])
def test_half_precision_where_the_cpu_has_none(name: str, dtype: torch.dtype) -> None:
    calls: dict[str, Any] = {
        "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
        "antialias": lambda x: F.interpolate(x[0], size=(2, 2), mode="bilinear", antialias=True),
        "multi_margin": lambda x: F.multi_margin_loss(x.flatten(1), torch.tensor([1], device=x.device)),
        "multilabel_margin": lambda x: F.multilabel_margin_loss(
            x[0, 0, 0], torch.tensor([[1, -1, 0, 0]] * 4).to(x.device)
        ),
        "round": lambda x: x.round(decimals=1) * x,
        "rrelu": lambda x: F.rrelu(x, 0.25, 0.25, training=True),
    }
    x = torch.randn(1, 2, 4, 4, 4).to(dtype)
    mine, wide = x.cuda().requires_grad_(), x.float().requires_grad_()
    result, wanted = calls[name](mine), calls[name](wide)
    assert result.dtype == dtype
    torch.testing.assert_close(result.cpu(), wanted.to(dtype), rtol=1e-2, atol=1e-2)
    result.sum().backward()
    wanted.sum().backward()
    assert mine.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(mine.grad.cpu(), wide.grad.to(dtype), rtol=2e-2, atol=2e-2)


@on_soft
@pytest.mark.filterwarnings("ignore")
def test_a_traced_convolution_is_part_of_the_graph() -> None:
    """TensorBoard's add_graph traces: PyTorch records what `convolution` calls, which soft had hidden."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.ConvTranspose2d(4, 2, 3)
    ).cuda()
    x = torch.randn(2, 3, 8, 8, device="cuda")
    traced = torch.jit.trace(net.eval(), x)
    assert str(traced.inlined_graph).count("aten::_convolution") == 2
    other = torch.randn(1, 3, 8, 8, device="cuda")
    assert torch.equal(traced(other), net(other))


@redirected
def test_the_default_tensor_type_makes_tensors_there() -> None:
    """`torch.Tensor(...)` goes by the default type alone; back to the CPU's type, everything is made there again."""
    program = """
import warnings; warnings.simplefilter("ignore")
import ditorch, torch
def places():
    return [made.device for made in (torch.Tensor([1.0]), torch.Tensor(2, 3), torch.zeros(2), torch.FloatTensor([1]))]
torch.set_default_tensor_type("torch.cuda.DoubleTensor")
print(*places(), torch.Tensor([1.0]).dtype, torch.nn.Parameter(torch.Tensor(2)).device)
torch.set_default_tensor_type(torch.FloatTensor)
print(*places(), torch.Tensor([1.0]).dtype)
import torch._dynamo
"""
    here = "cpu" if ditorch.backend.device_type == "cpu" else "cuda:0"
    assert run("-c", program).splitlines()[-2:] == [
        f"{here} {here} {here} cpu torch.float64 {here}",
        "cpu cpu cpu cpu torch.float32",
    ]


@on_soft
@pytest.mark.parametrize("packed", [False, True])
def test_packed_sequences_do_not_see_each_other(packed: bool) -> None:
    q, k, v = (torch.randn(7, 2, 4, device="cuda") for _ in range(3))
    ends = torch.tensor([0, 3, 7], dtype=torch.int32, device="cuda")
    result = torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, 4, 4, 0.0, packed, False)[0]
    for start, end in ((0, 3), (3, 7)):
        parts = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        wanted = F.scaled_dot_product_attention(*parts, is_causal=packed)[0].transpose(0, 1)
        assert torch.allclose(result[start:end], wanted, atol=1e-5)


@on_soft
def test_eager_flex_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query = torch.randn(1, 1, 128, 16, device="cuda")
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cuda")
    result = flex_attention(query, query, query, block_mask=mask)
    assert torch.allclose(result, F.scaled_dot_product_attention(query, query, query, is_causal=True), atol=1e-5)


@on_soft
def test_kernels_of_cudnn_by_name() -> None:
    aten = torch.ops.aten
    x, weight = torch.randn(2, 4, 6, 6, device="cuda"), torch.randn(8, 4, 3, 3, device="cuda")
    plain = F.conv2d(x, weight, padding=1, stride=2)
    assert torch.equal(aten.cudnn_convolution(x, weight, [1, 1], [2, 2], [1, 1], 1, False, False, False), plain)
    assert torch.equal(aten.cudnn_convolution_relu(x, weight, None, [2, 2], [1, 1], [1, 1], 1), plain.relu())
    back = F.conv_transpose2d(plain, weight, padding=1, stride=2)
    given = ([1, 1], [0, 0], [2, 2], [1, 1], 1, False, False, False)
    assert torch.equal(aten.cudnn_convolution_transpose(plain, weight, *given), back)
    result, mask = aten._fused_dropout(x, 0.75)
    assert torch.allclose(aten._masked_scale(x, mask, 1 / 0.75), result)


@on_soft
def test_every_operator_of_cuda_alone_is_provided_or_refused_with_a_reason() -> None:
    """What PyTorch's own list has for CUDA and not for the CPU."""
    from fnmatch import fnmatch

    from ditorch.soft import cuda_only

    listed = pytest.importorskip("torchgen")
    yaml = pytest.importorskip("yaml")
    path = Path(listed.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    provided, native = set(cuda_only.operators()), ditorch.backend.module._native_operators()
    refused = [pattern.partition("(")[0] for key in cuda_only.REFUSED for pattern in key.split(", ")]
    missing = []
    for function in yaml.load(path.read_text(), loader):
        keys = {key.strip() for keys in function.get("dispatch") or () for key in keys.split(",")}
        name = function["func"].partition("(")[0]
        if "CUDA" not in keys or {"CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"} & keys:
            continue
        base = name.partition(".")[0]
        name = base if name.endswith(("out", "quantized")) else name
        if name in provided or f"aten::{name}" in native or any(fnmatch(base, pattern) for pattern in refused):
            continue
        missing.append(name)
    assert not missing


def test_histograms_of_whole_numbers() -> None:
    """CUDA counts them, the CPU does not; routers of transformers' mixtures of experts do it."""
    chosen = torch.tensor([0, 3, 3, 1, 7, 2, 3], dtype=torch.int32, device="cuda")
    assert torch.histc(chosen, bins=8, min=0, max=7).tolist() == [1, 1, 1, 3, 0, 0, 0, 1]
    assert torch.histc(chosen, bins=2, min=0, max=7).dtype is torch.int32
    assert torch.histc(chosen, bins=4).tolist() == torch.histc(chosen.cpu().double(), bins=4).tolist()
    values = torch.linspace(-1, 1, 33)
    assert torch.equal(torch.histc(values.cuda(), 7).cpu(), torch.histc(values, 7))


# --- training by hand ------------------------------------------------------------------------------


def test_lora_in_bfloat16() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear, rank: int = 2) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(rank, base.in_features, device="cuda", dtype=torch.bfloat16) * 0.02)
            self.b = nn.Parameter(torch.zeros(base.out_features, rank, device="cuda", dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + F.linear(F.linear(x, self.a), self.b)

    torch.manual_seed(0)
    model = nn.Sequential(Lora(nn.Linear(8, 8)), nn.GELU(), Lora(nn.Linear(8, 1))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    frozen = model[0].base.weight.clone()
    x = torch.randn(32, 8, device="cuda", dtype=torch.bfloat16)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(model(x).float(), x.float().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert torch.equal(model[0].base.weight, frozen)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_fabric_on_two_devices() -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    fabric = lightning.Fabric(accelerator="cuda", devices=2, strategy="dp")
    fabric.launch()
    model = nn.Linear(2, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(4, 2, device=fabric.device)).sum()
    fabric.backward(loss)
    optimizer.step()
    assert model.weight.grad is not None


@pytest.mark.skipif(ditorch.backend.name in ("cuda", "cpu"), reason="nothing is patched there")
def test_packages_built_for_cuda_compare_with_what_pytorch_was_built_for() -> None:
    """torchvision and torchaudio refuse to be imported where their release of CUDA is not PyTorch's."""
    names: dict[str, Any] = {"__name__": "torchvision.extension"}
    exec("from torch.version import cuda as found\nimport torch\nread = torch.version.cuda", names)
    assert names["found"] is names["read"] is None
    exec("from torch.version import cuda as found", names | {"__name__": "user"})
    assert torch.version.cuda is not None
    ditorch.deactivate()
    assert torch.version.cuda is None
    assert type(torch.version) is type(torch)
    ditorch.activate()


@on_soft
def test_dlpack_shares_the_memory_of_the_device() -> None:
    x = torch.zeros(3, device="cuda")
    y = torch.from_dlpack(x)
    y += 1
    assert y.device == x.device
    assert x.tolist() == [1, 1, 1]


@on_soft
def test_a_kernel_compiled_from_text_is_refused_by_name() -> None:
    with pytest.raises(ditorch.UnsupportedError, match=r"torch\.cuda\._compile_kernel"):
        torch.cuda._compile_kernel("__global__ void f() {}", "f")


@on_soft
def test_remote_calls_refuse_a_map_of_devices() -> None:
    import torch.distributed.rpc as rpc

    with pytest.raises(ditorch.UnsupportedError, match="device_maps"):
        rpc.TensorPipeRpcBackendOptions(device_maps={"worker": {0: 0}})
    options = rpc.TensorPipeRpcBackendOptions()
    with pytest.raises(ditorch.UnsupportedError, match=r"set_device_map.*tensor\.cpu\(\)"):
        options.set_device_map("worker", {0: 0})
    with pytest.raises(ditorch.UnsupportedError, match="set_devices"):
        options.set_devices(["cuda:0"])
