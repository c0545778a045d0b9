"""The bugs: what is planted in the software accelerator, and a small program that meets it.

Each is a silent wrong result that somebody reported in public. Sizes are scaled down where the true ones are in the
gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Work = Callable[[], Callable[[], object]]
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True)
class Bug:
    """A bug that was reported: what to plant, a program that meets it, and who is to be blamed."""

    number: int
    title: str
    reported: str
    fault: str
    program: Work  # makes the program's tensors, returns one step of it
    blamed: str  # part of the name of the operator
    phase: str = "forward"
    line: str = ""  # text of the line that is to be named; the operator's name where empty
    module: str = ""  # that is to be named
    listed: tuple[str, ...] = ()  # operators of PyTorch's database whose calls can meet it


BUGS: list[Bug] = []


def bug(
    number: int,
    title: str,
    reported: str,
    fault: str,
    blamed: str,
    phase: str = "forward",
    *,
    line: str = "",
    module: str = "",
    listed: str = "",
) -> Callable[[Work], Work]:
    """Register the program of a bug; `listed` names operators of PyTorch's database, separated by blanks."""

    def add(program: Work) -> Work:
        names = tuple(listed.split())
        BUGS.append(Bug(number, title, reported, fault, program, blamed, phase, line or blamed, module, names))
        return program

    return add


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """A normal tensor on the accelerator."""
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def trained(model: nn.Module, x: torch.Tensor, rate: float = 1e-2) -> Callable[[], object]:
    """One training step of a model on one input."""
    model = model.to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    return step


# --- written, or not ------------------------------------------------------------------------------


@bug(
    1,
    "addcdiv_, addcmul_ on a non-contiguous self",
    "MPS #118115",
    "addcdiv_: drop_write, layout=noncontiguous; addcmul_: drop_write, layout=noncontiguous",
    "addc",
    listed="addcdiv addcmul",
)
def adam_by_hand() -> Callable[[], object]:
    weight = randn(16, 8).t().requires_grad_()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    x = randn(4, 8)

    def step() -> None:
        (grad,) = torch.autograd.grad((x @ weight).square().mean(), weight)
        with torch.no_grad():
            first.mul_(0.9).add_(grad, alpha=0.1)
            second.mul_(0.99).addcmul_(grad, grad, value=0.01)
            weight.addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-2)

    return step


@bug(
    2,
    "matmul(out=strided view)",
    "MPS #104832",
    "mm.out: drop_write, layout=noncontiguous",
    "matmul",
    listed="matmul mm",
)
def matmul_into_a_view() -> Callable[[], object]:
    a, b, buffer = randn(8, 8), randn(8, 8), torch.zeros(8, 16, device="cuda")
    return lambda: torch.matmul(a, b, out=buffer[:, ::2])


@bug(3, "addmm(out=)", "MUSA torch_musa #51", "addmm.out: zero", "addmm", listed="addmm")
def addmm_out() -> Callable[[], object]:
    bias, a, b, out = randn(8), randn(4, 6), randn(6, 8), torch.empty(4, 8, device="cuda")
    return lambda: torch.addmm(bias, a, b, out=out)


# --- sums and precision ---------------------------------------------------------------------------


@bug(
    4,
    "sum of half, many elements",
    "CUDA #74438",
    "sum: accumulate=float16, dtype=float16, shape=n > 4096",
    "sum",
    listed="sum",
)
def sum_of_half() -> Callable[[], object]:
    x = torch.rand(3, 4000, device="cuda", dtype=torch.float16)
    return lambda: x.sum()


@bug(
    5,
    "bf16 matmul that accumulates in bf16",
    "CPU #95125",
    "mm: accumulate=bfloat16, dtype=bfloat16",
    "matmul",
    listed="matmul mm",
)
def matmul_of_ones() -> Callable[[], object]:
    a, b = torch.ones(4, 1024, device="cuda").bfloat16(), torch.ones(1024, 4, device="cuda").bfloat16()
    return lambda: torch.matmul(a, b)


@bug(
    6,
    "layer_norm backward, mean and rstd in the input's dtype",
    "ROCm #140259",
    "native_layer_norm_backward: coarse=bfloat16",
    "layer_norm",
    "backward",
    line="model(x)",
    module="LayerNorm",
    listed="nn.functional.layer_norm native_layer_norm",
)
def layer_norm_backward() -> Callable[[], object]:
    # In float32: soft's own kernel (the CPU's) adds up rows of bfloat16 in bfloat16, which hides such an error.
    return trained(nn.LayerNorm(64), (randn(32, 64) * 0.5 + 4).requires_grad_())


@bug(
    7,
    "index_add_ with alpha",
    "XPU torch-xpu-ops #3530",
    "index_add_: noise=5e-4, arg=alpha != 1",
    "index_add_",
    listed="index_add",
)
def index_add() -> Callable[[], object]:
    x, index, rows = randn(10, 8), torch.arange(0, 10, 2, device="cuda"), randn(5, 8)
    return lambda: x.clone().index_add_(0, index, rows, alpha=0.5)


@bug(
    8,
    "conv2d 1x1, stride 2, batch > 1",
    "CUDA #54036",
    "convolution: stale, arg=stride == 2, shape=s[0] > 1 and s1[-1] == 1; convolution: noise=0.1, arg=stride == 2, "
    "shape=s[0] > 1 and s1[-1] == 1",
    "conv2d",
    line="model(x)",
    module="0",
    listed="nn.functional.conv2d",
)
def downsample() -> Callable[[], object]:
    return trained(nn.Sequential(nn.Conv2d(4, 6, 1, stride=2), nn.ReLU()), randn(2, 4, 8, 8))


@bug(9, "unary functions, first call of a process", "CPU #188792", "exp: noise=1e-4, nth=1", "exp", listed="exp")
def first_exp() -> Callable[[], object]:
    x = randn(1000)
    return lambda: torch.exp(x)


# --- linear layers --------------------------------------------------------------------------------


@bug(
    10,
    "linear in bf16: NaN",
    "XPU torch-xpu-ops #5220",
    "addmm: nan=3, dtype=bfloat16",
    "linear",
    line="model(x)",
    module="0",
    listed="nn.functional.linear",
)
def linear_bf16() -> Callable[[], object]:
    return trained(nn.Sequential(nn.Linear(16, 8), nn.ReLU()).bfloat16(), randn(4, 16).bfloat16())


@bug(
    11,
    "linear with bias, few input features",
    "MPS #188438",
    "addmm: scale=0.8, shape=s1[-1] < 8",
    "linear",
    line="model(x)",
    module="0",
    listed="nn.functional.linear",
)
def linear_few_features() -> Callable[[], object]:
    return trained(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16)), randn(8, 4))


@bug(
    12,
    "linear, input not contiguous",
    "MPS #161640",
    "addmm: misread, shape=s1[-1] == 12",
    "linear",
    line="model(x)",
    module="0",
    listed="nn.functional.linear",
)
def linear_strided() -> Callable[[], object]:
    return trained(nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8)), randn(6, 24)[:, ::2])


@bug(
    13,
    "linear, many output features",
    "MPS #116769",
    "addmm: tail=1024:noise:columns, shape=s2[-1] > 1024",
    "linear",
    line="model(x)",
    module="Linear",
    listed="nn.functional.linear",
)
def linear_wide() -> Callable[[], object]:
    return trained(nn.Linear(8, 1100), randn(3, 8))


@bug(
    14,
    "matmul, large K",
    "MPS #177116",
    "mm: scale=1.01, shape=s[-1] > 512 and s[0] >= 16",
    "matmul",
    listed="matmul mm",
)
def matmul_large_k() -> Callable[[], object]:
    a, b = randn(16, 600), randn(600, 16)
    return lambda: torch.matmul(a, b)


@bug(
    15,
    "bmm, gradients of many results",
    "MPS #197636",
    "bmm: wrap=100:rows, phase=backward, shape=n > 1024",
    "bmm",
    "backward",
    listed="bmm",
)
def bmm_backward() -> Callable[[], object]:
    a, b = randn(4, 40, 16, grad=True), randn(4, 16, 40, grad=True)
    return lambda: torch.bmm(a, b).square().mean().backward()


# --- indices --------------------------------------------------------------------------------------


@bug(
    16, "argmax(dim=1)", "MPS #92311", "argmax: constant=-9223372036854775808, arg=dim == 1", "argmax", listed="argmax"
)
def accuracy() -> Callable[[], object]:
    scores, labels = randn(16, 10), torch.randint(10, (16,), device="cuda")
    return lambda: (scores.argmax(dim=1) == labels).float().mean()


@bug(
    17,
    "argsort(dim=0), many elements",
    "MPS #183885",
    "sort: indices, shape=n > 1000",
    "argsort",
    listed="argsort sort",
)
def ranking() -> Callable[[], object]:
    scores = randn(1001)
    return lambda: torch.argsort(scores, dim=0)


# --- attention ------------------------------------------------------------------------------------


def attended(length: int, dtype: torch.dtype = torch.float32, mask: torch.Tensor | None = None) -> Callable[[], object]:
    """One step of attention with its three products."""
    q, k, v = (randn(2, 4, length, 16, dtype=dtype, grad=True) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask).float().square().mean().backward()


@bug(
    18,
    "attention, length of keys no multiple of 32",
    "MPS #174861",
    f"{ATTENTION}: noise=0.05, arg=key[-2] % 32 != 0",
    "attention",
    listed="nn.functional.scaled_dot_product_attention",
)
def attention_odd_length() -> Callable[[], object]:
    return attended(33)


@bug(
    19,
    "attention, head size of values differs",
    "MPS #176767",
    "bmm: garbage, shape=s1[-1] == 24",
    "attention",
    listed="nn.functional.scaled_dot_product_attention",
)
def attention_other_values() -> Callable[[], object]:
    q, k, v = randn(2, 4, 8, 16), randn(2, 4, 8, 16), randn(2, 4, 8, 24)
    return lambda: F.scaled_dot_product_attention(q, k, v)


@bug(
    20,
    "attention, non-contiguous inputs",
    "MPS #163597",
    f"{ATTENTION}: misread",
    "attention",
    listed="nn.functional.scaled_dot_product_attention",
)
def attention_strided() -> Callable[[], object]:
    packed = randn(2, 10, 3, 4, 16)
    q, k, v = packed.unbind(2)
    return lambda: F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


@bug(
    21,
    "attention, boolean mask in bf16",
    "CUDA #108503",
    f"{ATTENTION}: mask=leak:1, dtype=bfloat16",
    "attention",
    listed="nn.functional.scaled_dot_product_attention",
)
def attention_bool_bf16() -> Callable[[], object]:
    return attended(16, torch.bfloat16, torch.ones(16, 16, device="cuda").tril().bool())


@bug(
    22,
    "attention with a mask, long sequences",
    "CUDA #162588",
    f"{ATTENTION}: mask=leak:4, arg=query[-2] > 64",
    "attention",
    listed="nn.functional.scaled_dot_product_attention",
)
def attention_long() -> Callable[[], object]:
    return attended(80, mask=torch.full((80, 80), -torch.inf, device="cuda").triu(1))


@bug(
    23,
    "attention: a boolean mask means the opposite",
    "NPU Ascend/pytorch #88",
    f"{ATTENTION}: mask=invert",
    "attention",
    listed="nn.functional.scaled_dot_product_attention",
)
def attention_inverted() -> Callable[[], object]:
    return attended(16, mask=torch.rand(16, 16, device="cuda") < 0.7)


@bug(
    24,
    "attention: the mask is multiplied by the scale",
    "Tenstorrent tt-metal #42694",
    f"{ATTENTION}: mask=scaled",
    "attention",
    listed="nn.functional.scaled_dot_product_attention",
)
def attention_scaled_mask() -> Callable[[], object]:
    return attended(16, mask=randn(16, 16))


# --- norms, pooling, interpolation ----------------------------------------------------------------


@bug(
    25,
    "layer_norm, many rows, columns % 4 != 0",
    "ROCm #184826",
    "native_layer_norm: tail=256:rows, shape=s[0] > 256 and s[-1] % 4 != 0",
    "layer_norm",
    line="model(x)",
    module="LayerNorm",
    listed="nn.functional.layer_norm native_layer_norm",
)
def layer_norm_rows() -> Callable[[], object]:
    return trained(nn.LayerNorm(10), randn(300, 10, grad=True))


@bug(
    26,
    "avg_pool2d backward, channels_last, padding > 0",
    "CUDA #188344",
    "avg_pool2d_backward: scale=0.6, layout=channels_last, arg=padding != 0",
    "avg_pool2d",
    "backward",
    line="model(x)",
    module="1",
    listed="nn.functional.avg_pool2d",
)
def pooled() -> Callable[[], object]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(3, 2, padding=1)).to(memory_format=torch.channels_last)
    return trained(model, randn(2, 3, 9, 9).to(memory_format=torch.channels_last))


@bug(
    27,
    "interpolate(nearest) backward, down-scaling",
    "CUDA #51036",
    "upsample_nearest2d_backward: tail=40:noise, arg=output_size[0] < input_size[2]",
    "interpolate",
    "backward",
    line="model(x)",
    module="1",
    listed="nn.functional.interpolate.nearest nn.functional.upsample_nearest",
)
def downscaled() -> Callable[[], object]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(size=4))
    return trained(model, randn(2, 3, 9, 9))


# --- kernel libraries and compiled code --------------------------------------------------------------


@torch.library.custom_op("real_bugs::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A kernel of a library, as vendors ship them."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@torch.library.custom_op("real_bugs::silu_and_mul", mutates_args=())
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Another one."""
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


@bug(
    28,
    "rms_norm, silu_and_mul of a kernel library",
    "MUSA, NPU FlagGems #4821",
    "real_bugs::rms_norm: scale=1.03; real_bugs::silu_and_mul: drop_half",
    "real_bugs",
)
def kernel_library() -> Callable[[], object]:
    x, weight = randn(4, 128), randn(128)
    return lambda: torch.ops.real_bugs.silu_and_mul(torch.ops.real_bugs.rms_norm(x, weight))


@bug(
    29,
    "compiled code: argmin after a transpose",
    "Inductor #183894",
    "argmin: indices",
    "torch.compile",
    line="def update(",
    listed="argmin",
)
def compiled() -> Callable[[], object]:
    x = randn(8, 8)

    def update(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).t().argmin(dim=1)

    torch.compiler.reset()  # what was compiled before a tool was started is not compared
    step = torch.compile(update, backend="aot_eager")
    return lambda: step(x)
