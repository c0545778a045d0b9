"""The script that is saved with a wrong call; `reproducer.py` replaces this text and the constants of the call."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import operator
from pathlib import Path
from typing import Any

try:
    import torch
except Exception as problem:
    print(f"could not be tried: {problem}")
    raise SystemExit(2) from None

# --- the call ---
OP = "torch.add"
FUNCTION = "torch.add"
DEFINED_IN = ""  # the file or module that defines it, where PyTorch does not
DEVICE = "cpu"
AUTOCAST: torch.dtype | None = None  # dtype of the autocast region that the call was made in
GRAD = True  # whether autograd recorded the call
IMPORTS: tuple[str, ...] = ()  # what brings the device and the operator
FLAGS: dict[str, Any] = {}  # of PyTorch, which change what kernels compute
# --- what is done with it; the same for every call ---

HERE = Path(__file__).resolve().parent


class CannotTry(Exception):
    """Neither "still there" nor "gone" can be said; the message is the reason."""


# --- reading: plain values and tensors only, nothing in a file is executed ---


def load(path: Path) -> Any:
    """The content of one file."""
    return decoded(torch.load(path, map_location="cpu", weights_only=True))


def decoded(value: Any) -> Any:
    """Values as the call had them."""
    if isinstance(value, (list, tuple)):
        return type(value)(decoded(v) for v in value)
    if not isinstance(value, dict):
        return value
    tag, given = value.get("__op_tools__"), decoded(value.get("value"))
    if tag is None:
        return {k: decoded(v) for k, v in value.items()}
    if tag in ("dtype", "constant"):
        return getattr(torch, given.removeprefix("torch."))
    if tag in ("slice", "range"):
        return {"slice": slice, "range": range}[tag](*given)
    if tag in ("size", "group", "device"):
        return {"size": torch.Size, "group": tuple, "device": torch.device}[tag](given)
    if tag == "ellipsis":
        return Ellipsis
    if "Generator" in str(value.get("type")):
        return None  # the call draws from the default generator
    raise CannotTry(f"an argument of type {value.get('type')} was not saved")


def mapped(value: Any, change: Any) -> Any:
    """The same nest of containers with every leaf changed."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        members = [mapped(v, change) for v in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(v, change) for v in (value.start, value.stop, value.step)))
    return change(value)


def leaves(value: Any) -> list[Any]:
    """Everything in a nest of containers, in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)) and not isinstance(value, torch.Size):
        return [leaf for member in value for leaf in leaves(member)]
    return [value]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


# --- running the call on the device ---


class Enter(torch.autograd.Function):
    """Gives an argument a history, so that in-place operators may change it."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, holder: list[torch.Tensor]) -> torch.Tensor:
        return holder[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Placed:
    """Tensors on the device as they lay in memory in the call: strides, offsets and sharing are kept."""

    def __init__(self, device: torch.device, on_cpu: list[int]) -> None:
        self.device, self.on_cpu = device, on_cpu  # numbers of the tensors that the call had in main memory
        self.memory: dict[Any, torch.Tensor] = {}
        self.made: dict[Any, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.leaves: list[torch.Tensor | None] = []  # for each tensor what to differentiate by, if anything

    def argument(self, value: Any) -> Any:
        """A tensor on the device, the device in place of the one that the call named, anything else as it is."""
        if isinstance(value, torch.device):
            return value if value.type == "cpu" else self.device
        if isinstance(value, str) and value.split(":")[0] in (DEVICE.split(":")[0], "cuda") and DEVICE != "cpu":
            return str(self.device)
        if not isinstance(value, torch.Tensor):
            return value
        strided = value.layout == torch.strided and not value.is_quantized
        where = (value.untyped_storage().data_ptr(), value.storage_offset(), value.stride()) if strided else id(value)
        key = (where, value.shape, value.dtype, value.is_conj(), value.is_neg(), value.requires_grad)
        if key not in self.made:
            copy = self.tensor(value, torch.device("cpu") if len(self.leaves) in self.on_cpu else self.device)
            leaf = copy.requires_grad_() if value.requires_grad else None
            if GRAD and leaf is not None:
                leaf = torch.empty_like(leaf).requires_grad_()
                enter: Any = Enter.apply
                copy = enter(leaf, [copy.detach()])
            self.made[key] = copy, leaf
        copy, leaf = self.made[key]
        self.leaves.append(leaf)
        return copy

    def tensor(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy of one tensor, without a history."""
        if value.layout != torch.strided or value.is_quantized:
            return value.detach().to(device)
        if value.is_neg():  # PyTorch's public functions make no such view
            value = value.resolve_neg()
        storage = value.untyped_storage()
        key = (storage.data_ptr(), device)
        if key not in self.memory:  # bytes, whatever they are seen as
            self.memory[key] = torch.empty(0, dtype=torch.uint8).set_(storage).to(device, copy=True)
        copy = torch.empty(0, dtype=value.dtype, device=device)
        copy.set_(self.memory[key].untyped_storage(), int(value.storage_offset()), value.shape, value.stride())
        return copy.conj() if value.is_conj() else copy


def function() -> Any:
    """The operator."""
    try:
        if FUNCTION.startswith("torch."):
            return operator.attrgetter(FUNCTION.removeprefix("torch."))(torch)
        module, _, name = FUNCTION.partition(":")
        return operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ImportError) as error:
        where = f", which {DEFINED_IN} defines" if DEFINED_IN else ""
        raise CannotTry(f"{OP}{where}, is not known here ({error}); bring it with --import MODULE") from None


def run(device: torch.device, phase: str) -> dict[str, Any]:
    """What the call leaves on the device, in main memory; of a backward, with the gradients that were asked for."""
    saved, call = load(HERE / "device" / "input.pth"), function()
    placed = Placed(device, load(HERE / f"{phase}.pth")["on_cpu"])
    args, kwargs = mapped((saved["args"], saved["kwargs"]), placed.argument)
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.set_grad_enabled(GRAD))
        if AUTOCAST is not None:
            modes.enter_context(torch.autocast(device.type, dtype=AUTOCAST))
        if not tensors((args, kwargs)) and kwargs.get("device") is None:
            modes.enter_context(device)  # a factory takes the default device
        result = call(*args, **kwargs)
    found = {"saved": saved, "function": call, "after": on_host((args, kwargs)), "output": on_host(result)}
    if phase == "forward":
        return found
    asked = asked_for()
    sent = load(HERE / "device" / "grad_outputs.pth")["grad_outputs"]
    outputs = tensors(result)
    if len(sent) != len(outputs):
        raise CannotTry(f"{len(sent)} gradients were saved, but {OP} returned {len(outputs)} tensors")
    pairs = [(t, g) for t, g in zip(outputs, sent) if g is not None and t.requires_grad]
    grads = [placed.tensor(g, t.device).to(t.dtype) for t, g in pairs]
    wanted = {id(leaf): leaf for leaf in map(placed.leaves.__getitem__, asked) if leaf is not None}
    got = torch.autograd.grad([t for t, _ in pairs], list(wanted.values()), grads, allow_unused=True)
    by_leaf = dict(zip(wanted, on_host(got)))
    inputs = [by_leaf.get(id(leaf)) if n in asked else None for n, leaf in enumerate(placed.leaves)]
    return {**found, "sent": sent, "asked": asked, "grad_input": inputs}


def on_host(value: Any) -> Any:
    """The same in main memory."""
    return mapped(value, lambda v: v.detach().cpu() if isinstance(v, torch.Tensor) else v)


# --- is it still wrong? ---


def asked_for() -> list[int]:
    """Numbers of the tensors whose gradients the backward pass was asked for."""
    both = [load(HERE / side / "grad_inputs.pth")["grad_inputs"] for side in ("device", "cpu")]
    return [n for n, sides in enumerate(zip(*both)) if any(g is not None for g in sides)]


def by_op_tools(phase: str, device: torch.device, found: dict[str, Any]) -> tuple[bool, str] | None:
    """The judgement that found the difference, where op_tools is installed and can say something."""
    try:
        judge = importlib.import_module("op_tools.compare.reproduced").judge
        answer: tuple[bool, str] | None = judge(HERE, phase, device.type, found)
    except Exception as error:
        print(f"op_tools cannot judge it ({type(error).__name__}: {error}): the recorded bound decides")
        return None
    return answer


def by_recorded_bound(phase: str, found: dict[str, Any]) -> tuple[bool, str]:
    """Whether a result is again further from the saved reference than the bound that was recorded for each element."""
    for wrong in load(HERE / f"{phase}.pth")["wrong"]:
        name, part, bound = wrong["name"], wrong["part"], wrong["bound"]
        if bound is None:
            raise CannotTry(f"whether {name} is right, only op_tools can tell: its value is not determined")
        ours, theirs = leaves(compared(part, found)), leaves(compared(part, None))
        if len(ours) != len(theirs):
            return True, f"{name}: {len(ours)} results instead of {len(theirs)}"
        problem = difference(ours[wrong["position"]], theirs[wrong["position"]], bound)
        if problem:
            return True, f"{name}: {problem}"
    return False, ""


def compared(part: str, found: dict[str, Any] | None) -> Any:
    """One part of what the device has left, or of the saved reference."""
    if part == "input":  # arguments after the call
        after = found["after"] if found else [load(HERE / "cpu" / "input.pth")[key] for key in ("args", "kwargs")]
        return [*after[0], *tensors(after[1])]
    if found:
        return found[part]
    name, key = ("output", "result") if part == "output" else ("grad_inputs", "grad_inputs")
    return load(HERE / "cpu" / f"{name}.pth")[key]


def difference(mine: Any, want: Any, bound: Any) -> str:
    """What is wrong with one result, "" where nothing is."""
    if isinstance(mine, torch.Tensor) != isinstance(want, torch.Tensor):
        if (mine is None or want is None) and not bool((want if mine is None else mine).any()):
            return ""  # no gradient, or one of zeros
        return f"{type(mine).__name__} instead of {type(want).__name__}"
    if not isinstance(mine, torch.Tensor):
        if not all(isinstance(v, (int, float, complex)) and not isinstance(v, bool) for v in (mine, want)):
            return "" if mine == want else f"{mine!r} instead of {want!r}"
        mine, want = torch.tensor(mine), torch.tensor(want)
    elif kind(mine) != kind(want):
        return f"{kind(mine)} instead of {kind(want)}"
    if not mine.numel():
        return ""
    mine, want = (t.to_dense() if t.layout != torch.strided else t for t in (mine, want))
    wide = torch.complex128 if mine.is_complex() else torch.float64
    near = (mine == want.to(mine.dtype)) | ((mine != mine) & (want != want))
    inexact = mine.is_floating_point() or mine.is_complex()
    off = (mine.to(wide) - want.to(wide)).abs() if inexact else (mine != want).double()
    near |= off <= bound
    if bool(near.all()):
        return ""
    ratio = (off / bound).nan_to_num(nan=float("inf")).masked_fill(near, -1.0)
    place = tuple((ratio == ratio.max()).nonzero()[0].tolist())
    return (
        f"{int((~near).sum())} of {near.numel()} elements, worst at {list(place)}: "
        f"{mine[place].item()} instead of {want[place].item()}, {float(ratio.max()):.3g} times its bound"
    )


def kind(tensor: torch.Tensor) -> str:
    """What must be the same in a reference that has another precision."""
    exact = not (tensor.is_floating_point() or tensor.is_complex())
    return f"{tensor.dtype if exact else 'complex' if tensor.is_complex() else 'float'} {tuple(tensor.shape)}"


def try_again(options: argparse.Namespace) -> bool:
    """Whether the difference is still there; raises CannotTry where that cannot be said."""
    for module in [*IMPORTS, *options.imports]:
        try:
            importlib.import_module(module)
        except ImportError as error:
            if module in options.imports:
                raise CannotTry(f"--import {module}: {error}") from None
    for name, value in FLAGS.items():
        set_flag(name, value)
    device = torch.device(options.device)
    phases = [phase for phase in ("forward", "backward") if (HERE / f"{phase}.pth").exists()]
    if not phases:
        raise CannotTry(f"neither forward.pth nor backward.pth is in {HERE}")
    still = False
    for phase in phases * options.times:
        found = run(device, phase)
        judged = None if options.plain else by_op_tools(phase, device, found)
        wrong, reason = judged or by_recorded_bound(phase, found)
        print(f"{OP} ({phase}) on {device}: {reason if wrong else 'right'}")
        still = still or wrong
    return still


def set_flag(name: str, value: Any) -> None:
    """Set `torch.<name>`, by a call where it is a function; a PyTorch without it does as it pleases."""
    home, _, last = name.rpartition(".")
    with contextlib.suppress(AttributeError, RuntimeError):
        owner = operator.attrgetter(home)(torch) if home else torch
        if callable(getattr(owner, last)):
            getattr(owner, last)(value)
        else:
            setattr(owner, last, value)


def main() -> int:
    """Exit codes are those of the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default=DEVICE, help="where to run it (default: %(default)s)")
    parser.add_argument(
        "--import", dest="imports", metavar="MODULE", action="append", default=[], help="import it first"
    )
    parser.add_argument("--times", type=int, default=1, help="run it so often, for a fault that comes and goes")
    parser.add_argument("--plain", action="store_true", help="compare with the recorded bound, without op_tools")
    try:
        still = try_again(parser.parse_args())
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        print(f"could not be tried: {'' if isinstance(error, CannotTry) else type(error).__name__ + ': '}{lines[0]}")
        return 2
    print("the difference is still there" if still else "the difference is gone")
    return 1 if still else 0


if __name__ == "__main__":
    raise SystemExit(main())
