"""A call that a device does wrong, as a script of its own: PyTorch and the device's package are all that it needs."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ditorch.conformance.trial import Outcome
from ditorch.conformance.variants import Variant
from op_tools.call.description import map_tensors

_MAX_VALUES = 4_096

_SCRIPT = '''"""{title}

Exit status: 0 the device gives what the CPU gives, 1 it does not, 2 it could not be tried.
"""

import sys

import torch

nan, inf = float("nan"), float("inf")
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # as in the hunt
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "{device}"
try:
    if DEVICE.partition(":")[0] not in ("cpu", "cuda", "xpu", "mps"):
        import ditorch
    DEVICE = torch.device(DEVICE)
    torch.empty(1, device=DEVICE)
except Exception as error:
    sys.exit(print(f"could not be tried: {{type(error).__name__}}: {{error}}") or 2)


PLACE = {place}  # part, number, element, and how far it may be off the result in float64
NARROW = []


def strided(values, dtype, shape, stride, offset=0, grad=False):
    """A tensor that lies in memory as it did."""
    flat = torch.tensor(values, dtype=dtype)
    return lambda device: flat.to(device, copy=True).as_strided(shape, stride, offset).detach().requires_grad_(grad)


def dense(seed, dtype, shape, grad=False):
    """Random numbers: the values do not matter."""
    flat = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return lambda device: flat.to(device, copy=True).detach().requires_grad_(grad)


def wide(x):
    """The same in float64."""
    kind = torch.complex128 if x.is_complex() else torch.float64
    return x.detach().to(kind).requires_grad_(x.requires_grad) if x.is_complex() or x.is_floating_point() else x


{function}
TENSORS = [
{tensors}
]


def call(device, wider=False):
    t = [make(device) for make in TENSORS]
    if wider:
        t = [wide(x) for x in t]
{body}


def exact(part, number):
    """What a result or gradient is in float64."""
    return call("cpu", wider=True)[part == "grad_input"][number].detach()


def parts(results, gradients):
    """All that came out, by its part and number."""
    both = {{"output": results, "grad_input": gradients}}
    return {{(p, n): x.detach().cpu() for p, some in both.items() for n, x in enumerate(some) if x is not None}}


def apart(a, b):
    """How far two tensors are apart, element by element; infinitely far where one of them alone is not a number."""
    a, b = (x.to(torch.complex128 if a.is_complex() else torch.float64) for x in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(inf, inf))


def facts(number, a, b, again):
    """What one needs to judge a difference: the worst element here, on the CPU and in float64; whether it repeats."""
    try:
        truth, kind = exact(*number), "in float64"
    except Exception as error:
        print(f"not known in float64: {{type(error).__name__}}: {{error}}")
        truth, kind = b, "on the CPU"
    if not a.numel() or a.shape != truth.shape:
        return
    off, usual = apart(a, truth), apart(b, truth)
    where = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    differing = int((apart(a, b) != 0).sum())
    ours, theirs, right = (x[where].item() for x in (a, b, truth))
    print(f"{{number}}: {{differing}} of {{a.numel()}} elements are not the CPU's")
    print(f"  largest error {{float(off.max()):.6g}}, of the CPU {{float(usual.max()):.6g}}")
    print(f"  at {{where}}: {{ours!r}} here, {{theirs!r}} on the CPU, {{right!r}} {{kind}}")
    print(f"  done again: {{'the same result' if not apart(a, again).any() else 'another result'}}")


try:
    expected = parts(*call("cpu"))
    found = parts(*call(DEVICE))
    repeated = parts(*call(DEVICE))
except Exception as error:
    sys.exit(print(f"could not be tried: {{type(error).__name__}}: {{error}}") or 2)
wrong = 0
if PLACE is not None:
    part, number, where, allowed = PLACE
    try:
        value, right = found[part, number][where], exact(part, number)[where]
        if not abs(value.to(right.dtype) - right) <= allowed:
            print(f"{{part}} {{number}} at {{where}}: {{value}} instead of {{right}}; {{allowed}} may be off")
            wrong += 1
    except Exception as error:
        print(f"not known in float64: {{type(error).__name__}}: {{error}}")
for number, a in found.items():
    b = expected[number]
    if a.shape != b.shape or a.dtype != b.dtype:
        print(f"{{number}}: {{tuple(a.shape)}} {{a.dtype}} instead of {{tuple(b.shape)}} {{b.dtype}}")
        wrong += 1
        continue
    rough = {{torch.bfloat16: 2e-2, torch.float16: 2e-3}}.get(a.dtype, 1e-5)
    a, b = (x.float() if x.is_floating_point() and x.element_size() == 1 else x for x in (a, b))
    size = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0
    if not torch.allclose(a, b, rtol=rough, atol=rough * size, equal_nan=True):
        print(f"{{number}}: the device gives")
        print(a)
        print("instead of")
        print(b)
        wrong += 1
if wrong:
    for number, a in found.items():
        if a.shape == expected[number].shape:
            facts(number, a, expected[number], repeated[number])
print("the difference is still there" if wrong else "the difference is gone")
sys.exit(1 if wrong else 0)
'''


def text(info: Any, variant: Variant, way: str, device: str, outcome: Outcome) -> str:
    """The script (`text(info, variant, "backward", "cuda:0", Outcome(WRONG, "off by 0.57"))`)."""
    tensors = variant.tensors
    kept = outcome.worst is not None and all(t.layout is torch.strided and _is_short(t) for t in tensors)
    numbers = {id(t): number for number, t in reversed(list(enumerate(tensors)))}
    args, kwargs = map_tensors((variant.args, variant.kwargs), lambda t: _Name(f"t[{numbers[id(t)]}]"))
    given = [_source(a) for a in args] + [f"{key}={_source(value)}" for key, value in kwargs.items()]
    name, function = _function(info)
    if way == "in place":
        name, function = f"torch.Tensor.{info.name}_", ""
    if way == "out":
        apart = outcome.message.startswith("out= with strides")
        made = (
            "torch.full((*r.shape, 2), 7, dtype=r.dtype, device=device)[..., 0]" if apart else "torch.full_like(r, 7)"
        )
        body = (
            f"    results = {name}({', '.join(given)})\n"
            "    several = isinstance(results, (list, tuple))\n"
            "    if device == 'cpu':  # what is right: the CPU may not fill out= either\n"
            "        return list(results) if several else [results], []\n"
            f"    into = [{made} for r in (results if several else [results])]\n"
            f"    {name}({', '.join(given)}, out=tuple(into) if several else into[0])\n"
            "    return into, []"
        )
    else:
        body = f"    results = {name}({', '.join(given)})\n"
        body += "    results = results if isinstance(results, (list, tuple)) else [results]\n"
        body += "    results = [r for r in results if isinstance(r, torch.Tensor)]\n"
        if way == "backward":
            body += (
                "    used = [r for r in results if r.requires_grad]\n"
                "    numbers, kinds = torch.Generator().manual_seed(0), (torch.float32, torch.complex64)\n"
                "    sent = [torch.randn(r.shape, generator=numbers, dtype=kinds[r.is_complex()]) for r in used]\n"
                "    NARROW[:] = NARROW or [r.dtype for r in used]\n"
                "    sent = [s.to(kind).to(r.dtype).to(device) for s, kind, r in zip(sent, NARROW, used)]\n"
                "    leaves = [x for x in t if x.requires_grad]\n"
                "    found = torch.autograd.grad(used, leaves, sent, allow_unused=True)\n"
                "    gradients = {id(x): g for x, g in zip(leaves, found)}\n"
                "    return results, [gradients.get(id(x)) for x in t]"
            )
        else:
            body += "    return results, []"
    return _SCRIPT.format(
        place=tuple(outcome.worst) if kept and outcome.worst is not None else None,
        title=f"{info.name}, {way}: {outcome.message}".replace('"""', "'''").replace("\\", "\\\\"),
        device=device,
        function=function,
        tensors="\n".join(f"    {_tensor(number, t)}," for number, t in enumerate(tensors)),
        body=body,
    )


def in_words(variant: Variant) -> str:
    """Shapes, strides and arguments in short (`"(2, 3) strides (1, 2), padding=1"`)."""

    def short(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return f"{value!r:.60}"
        layout = "" if value.layout is not torch.strided or value.is_contiguous() else f" strides {value.stride()}"
        return f"{tuple(value.shape)}{layout}"

    parts = [short(a) for a in variant.args]
    return ", ".join([*parts, *(f"{key}={short(value)}" for key, value in variant.kwargs.items())])


class _Name(str):
    """Source text of a tensor in the script."""


def _source(value: Any) -> str:
    if isinstance(value, _Name):
        return str(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_source(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_source(v)}" for key, v in value.items()) + "}"
    return repr(value)


def _function(info: Any) -> tuple[str, str]:
    """How the script calls the operator, and what it defines for that."""
    try:
        if functools.reduce(getattr, info.name.split("."), torch) is info.op:
            return f"torch.{info.name}", ""
    except AttributeError:
        pass
    lines = (
        "import types, unittest",
        "HELPER = types.ModuleType('expecttest')  # the database imports two names of it, and uses neither",
        "HELPER.TestCase, HELPER.ACCEPT = unittest.TestCase, False",
        "sys.modules.setdefault('expecttest', HELPER)",
        "from torch.testing._internal.common_methods_invocations import op_db",
        f"NAME = {(info.name, info.variant_test_name)!r}",
        "OPERATOR = next(o for o in op_db if (o.name, o.variant_test_name) == NAME)",
    )
    return "OPERATOR.op", "\n".join(lines) + "\n"


def _tensor(number: int, tensor: torch.Tensor) -> str:
    grad = ", grad=True" if tensor.requires_grad else ""
    if tensor.layout is not torch.strided:
        return f"lambda device: {number}  # a {tensor.layout} tensor"
    plain = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage(), 0, (_length(tensor),), (1,))
    if not _is_short(tensor):
        return f"dense({number}, {tensor.dtype}, {tuple(tensor.shape)}{grad})"
    return (
        f"strided({plain.tolist()}, {tensor.dtype}, {tuple(tensor.shape)}, {tuple(tensor.stride())}, "
        f"{tensor.storage_offset()}{grad})"
    )


def _is_short(tensor: torch.Tensor) -> bool:
    return _length(tensor) <= _MAX_VALUES


def _length(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()
