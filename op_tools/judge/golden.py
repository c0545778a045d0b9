"""The golden run: the same call on the CPU in double precision, on private copies that keep the layout.

Nothing outside a run changes: no random stream, no default, no flag. Runs may go on in several threads at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from ..call import facts
from ..call.description import Tensor, map_tensors, tensors_in
from ..call.operators.registry import FUNCTIONS
from ..call.traits import OpTraits, traits_of
from ..compat import (
    DispatchMode,
    engine,
    no_torch_function,
    set_grad_enabled,
    top_saved_tensor_hooks,
    without_saved_tensor_hooks,
)
from ..copies.materialise import Cast, Copier
from . import references
from .draws import DrawsRandomNumbers, Substitute
from .draws import draws as draws_numbers
from .gradients import gradients_alone

_HALVES: Final = (torch.float16, torch.bfloat16)
DOUBLE: Final[dict[torch.dtype, torch.dtype]] = {
    **dict.fromkeys((*_HALVES, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}
SINGLE: Final = {**dict.fromkeys(_HALVES, torch.float32), torch.complex32: torch.complex64}
AS_IS: Final[dict[torch.dtype, torch.dtype]] = {}

Graph = tuple[Any, list[Tensor | None]]  # results with their history, and the leaf of each tensor of the arguments


class NoRandomNumbers(DispatchMode):
    """Stops a call before it draws from any random stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_numbers(func, args, kwargs or {}):
            raise DrawsRandomNumbers("two runs draw different numbers")
        return func(*args, **(kwargs or {}))


@functools.cache
def _is_plain(name: str) -> bool:
    """Whether nothing that is known about an operator, by its name alone, changes its golden run: so it is for most."""
    last = facts.last_name(name)
    known = FUNCTIONS.by_name.get(last)
    if known is not None and (known.uninitialised or known.left_out or known.bound_to_dtype or known.bound_on):
        return False
    if known is not None and (known.defaults or known.free_vectors):
        return False
    replaced = facts.on_cpu(name, _is_plain) is not _is_plain
    return not (replaced or last == "view" or "as_strided" in name or facts.may_mutate(name, {}))


@dataclasses.dataclass(frozen=True)
class Source:
    """A call as the device saw it: the function and CPU copies of its arguments, in the device's dtypes."""

    function: Callable[..., Any]
    name: str
    traits: OpTraits
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_outputs: Sequence[Tensor | None] | None = None
    device: str = ""  # the type of the device: what is known of its kernels is taken into account
    rounded_to: torch.dtype | None = None  # autocast rounded the float32 arguments to this dtype first
    autocast: torch.dtype | None = None  # the lower precision of the autocast region around the call
    outputs: Any = None  # what the device returned, for gradients of results whose signs are free
    draws: tuple[Tensor, ...] | None = None  # random numbers that the device drew, in order
    by_reference: bool = False  # the function stands in for the operator, which has no CPU kernel
    only: tuple[int, ...] | None = None  # tensors whose gradients are wanted, by `gradients`; None: by autograd, of all

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors among the arguments, in order (`source.tensors[0]`)."""
        return tuple(tensors_in((self.args, self.kwargs)))

    @functools.cached_property
    def may_mutate(self) -> bool:
        """Whether the call may write to its arguments (`facts.may_mutate`)."""
        return not (_is_plain(self.name) and not self.kwargs) and facts.may_mutate(self.name, self.kwargs)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Source:
        """The same call on other tensors (`source.mapped(torch.square)`)."""
        args, kwargs, sent = map_tensors((self.args, self.kwargs, self.grad_outputs), change)
        return dataclasses.replace(self, args=args, kwargs=kwargs, grad_outputs=sent)


@dataclasses.dataclass
class Run:
    """What one execution left behind: results, arguments as they are afterwards, gradients of the arguments."""

    outputs: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_inputs: list[Tensor | None] | None = None
    wrote: bool = False  # an operator wrote to an argument; kernels that do not say so are not noticed


@dataclasses.dataclass
class GoldenResult:
    """The reference for one call, or the reason why there is none.

    >>> result = run(torch.add, (torch.ones(2, dtype=torch.bfloat16), 1))
    >>> result.comparable, result.outputs
    (True, tensor([2., 2.], dtype=torch.float64))
    """

    comparable: bool
    reason: str
    source: Source
    cast: Cast = dataclasses.field(default_factory=dict)
    run: Run | None = None
    note: str = ""
    random: bool = False
    graph: Graph | None = None  # of a run that was asked to keep it, for one backward pass

    @property
    def outputs(self) -> Any:
        """What the call returned, a tree of CPU tensors."""
        return self.run.outputs if self.run else None

    @property
    def inputs_after(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments after the call: where in-place and `out=` results are (`result.inputs_after[0][0]`)."""
        return (self.run.args, self.run.kwargs) if self.run else ((), {})

    @property
    def grad_inputs(self) -> list[Tensor | None] | None:
        """One gradient (or None) for each tensor among the arguments, in order (`result.grad_inputs[0]`)."""
        return self.run.grad_inputs if self.run else None

    @property
    def cast_info(self) -> dict[torch.dtype, torch.dtype]:
        """The casts that took place, as the console shows them (`{torch.bfloat16: torch.float64}`)."""
        present = {t.dtype for t in self.source.tensors}
        return {source: target for source, target in self.cast.items() if source in present}

    def at(self, shape: tuple[int, ...], places: Tensor, backward: bool) -> GoldenResult | None:
        """The same elementwise call on some elements only; None where it is not that simple (`result.at(...)`)."""
        source = self.source
        made: dict[Any, Tensor] = {}

        def pick(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 and facts.is_optimizer(source.name):  # a number of steps
                return tensor
            key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)
            if key not in made:
                picked = tensor.detach().expand(shape).reshape(-1)[places]
                made[key] = picked.requires_grad_(tensor.requires_grad)
            return made[key]

        if backward and any(t.requires_grad and t.shape != shape for t in source.tensors):
            return None
        if any(d.shape != shape for d in source.draws or ()):
            return None
        try:
            fewer = source.mapped(pick)
            if source.draws is not None:
                fewer = dataclasses.replace(fewer, draws=tuple(map(pick, source.draws)))
            return dataclasses.replace(self, source=fewer, run=_execute(fewer, self.cast, backward, None)[0])
        except Exception:  # shapes that do not broadcast, arguments that name a shape
            return None

    def with_draws(self, draws: tuple[Tensor, ...]) -> GoldenResult:
        """The same call with the random numbers that the device drew (`result.with_draws((mask,))`)."""
        source = dataclasses.replace(self.source, draws=draws)
        return _first_that_works(source, None, source.grad_outputs is not None, False)

    def rerun(self, mode: DispatchMode | None = None, backward: bool = False) -> Run:
        """Run once more on fresh copies, under a dispatch mode (`result.rerun(noise)`)."""
        return _execute(self.source, self.cast, backward, mode)[0]


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype_cast: Cast | None = None,
    grad_outputs: Sequence[Tensor | None] | None = None,
    name: str | None = None,
    traits: OpTraits | None = None,
    device: str = "",
    rounded_to: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    max_bytes: int | None = None,
    keep_graph: bool = False,
    outputs: Any = None,
    draws: tuple[Tensor, ...] | None = None,
    only: tuple[int, ...] | None = None,
) -> GoldenResult:
    """Do a call again on the CPU, float64 in place of every float; never raises for what the call does.

    `args` and `kwargs` are CPU copies of the arguments from *before* the call, in the device's dtypes.
    `grad_outputs`, one per tensor of the result, adds the backward pass. `dtype_cast` overrides the casts.
    `device` is the type of the device whose result will be judged, `rounded_to` and `autocast` are as in `Source`.
    With `keep_graph` the backward pass can be added later, by `backward`. `outputs` are CPU copies of what the device
    returned: vectors whose signs are free decide about the gradients that come back to them. `draws` are the random
    numbers that the device drew in this call. With `only`, the gradients of these tensors are enough, and no results.

    >>> run(torch.mul, (torch.ones(2, requires_grad=True), 3), grad_outputs=[torch.ones(2)]).grad_inputs
    [tensor([3., 3.], dtype=torch.float64)]
    """
    if traits is None:
        traits = traits_of(function)
    name = name or traits.name
    named = references.named(function, name) if references.given else None
    call = (named or function, name, traits, tuple(args), dict(kwargs or {}))
    source = Source(*call, grad_outputs, device, rounded_to, autocast, outputs, draws, named is not None, only)
    reason = _why_not(source, max_bytes)
    if reason:
        return GoldenResult(False, reason, source)
    if keep_graph:
        writes = traits.mutates or source.may_mutate
        keep_graph = grad_outputs is None and not writes and any(t.requires_grad for t in source.tensors)
    return _first_that_works(source, dtype_cast, grad_outputs is not None, keep_graph)


def backward(result: GoldenResult, grad_outputs: Sequence[Tensor | None], outputs: Any = None) -> GoldenResult:
    """The backward pass of a run that kept its graph, which is used up (`backward(result, [torch.ones(2)])`)."""
    graph, result.graph = result.graph, None
    if graph is None or result.run is None:
        raise ValueError("this golden run has no graph: run it with keep_graph=True, which supports one backward pass")
    source = dataclasses.replace(result.source, grad_outputs=grad_outputs, outputs=outputs)
    vars(source)["tensors"] = result.source.tensors  # the arguments are the same
    try:
        with neutral(grad=True):
            grads = _gradients(source, *graph)
    except Exception:  # a kernel for float64 forward only: backward as well, in the dtype that has both
        return _first_that_works(source, None if result.cast is DOUBLE else result.cast, True, False)
    return dataclasses.replace(result, source=source, run=dataclasses.replace(result.run, grad_inputs=grads))


def run_as_is(
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    grad_outputs: Sequence[Tensor | None] | None = None,
) -> tuple[Any, list[Tensor | None] | None]:
    """The call on the CPU in the device's dtypes, on these very arguments: for calls that only move values.

    >>> run_as_is(torch.t, "torch.t", (torch.ones(2, 1),), {})[0].shape
    torch.Size([1, 2])
    """
    with neutral(grad=grad_outputs is not None):
        args, kwargs = mapped_settings(facts.adapt(name, args, kwargs), AS_IS)
        outputs = facts.on_cpu(name, function)(*args, **kwargs)
        if grad_outputs is None:
            return outputs, None
        leaves = [t if t.requires_grad else None for t in tensors_in((args, kwargs))]
        return outputs, _gradients_of(list(zip(tensors_in(outputs), grad_outputs)), leaves)


def autocast_rounds_to(
    name: str, low: torch.dtype, result: Any, arguments: Iterable[Tensor] = ()
) -> torch.dtype | None:
    """The dtype to which autocast with dtype `low` rounded the arguments of a call, None if it did not.

    Told by the result: `autocast_rounds_to("torch.nn.functional.linear", torch.bfloat16, y)`. An operator that autocast
    does not know may call one that it does: then its arguments are all wider than its result.
    """
    if not any(t.dtype == low for t in tensors_in(result)):
        return None
    if facts.last_name(name) in facts.AUTOCAST_LOW:
        return low
    floating = [t.dtype for t in arguments if t.is_floating_point()]
    return low if floating and low not in floating else None


def _why_not(source: Source, max_bytes: int | None) -> str:
    if source.traits.collective:
        return "a collective: its result depends on other processes"
    if not _is_plain(source.name):
        known = FUNCTIONS.by_name.get(facts.last_name(source.name))
        if known is not None and (known.uninitialised or known.left_out):
            return known.left_out or "returns uninitialised memory"
    method = isinstance(getattr(source.function, "__self__", None), type)
    if method and not source.by_reference and references.is_kernel_of_a_class(source.function):
        return references.NO_STEPS
    needed = 0
    for tensor in source.tensors:
        if tensor.is_meta:
            return "a meta tensor has no values"
        needed += 8 * tensor.numel()
    needed += sum([32 * draw.numel() for draw in source.draws or ()])  # scores, softmax, mask, product
    if max_bytes is not None and needed > max_bytes:
        return f"needs {needed / 2**20:,.0f} MiB in double precision; the limit is {max_bytes / 2**20:,.0f} MiB"
    return ""


def _first_that_works(source: Source, dtype_cast: Cast | None, backward: bool, keep_graph: bool) -> GoldenResult:
    """Double precision if the CPU has a kernel for it, then single, then the dtypes as they are."""
    given = source.name, source.args, source.kwargs
    if not _is_plain(source.name) and facts.is_bound_to_dtype(*given, source.device):
        candidates: tuple[Cast, ...] = (AS_IS,)
    elif dtype_cast is not None:
        candidates = (dtype_cast,)
    else:
        candidates = (DOUBLE, SINGLE, AS_IS)
    first_error = ""
    guard = NoRandomNumbers() if source.traits.random is not False and source.draws is None else None
    for cast in candidates:
        try:
            done, graph = _execute(source, cast, backward, guard, keep_graph)
        except DrawsRandomNumbers as error:
            return GoldenResult(False, f"random: {error}", source, random=True)
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            first_error = first_error or f"{type(error).__name__}: {text[0][:200]}"
            continue
        note = "" if cast is candidates[0] else f"the CPU has no double-precision kernel ({first_error})"
        return GoldenResult(True, "", source, cast, done, note=note, graph=graph)
    if first_error.startswith("NotImplementedError: "):
        steps = None if source.by_reference else references.decomposed(source.function)
        if steps is not None:
            source = dataclasses.replace(source, function=steps, by_reference=True)
            return _first_that_works(source, dtype_cast, backward, keep_graph)
        if "'CPU'" in first_error:
            return GoldenResult(False, references.NO_KERNEL, source)
    return GoldenResult(False, f"the CPU cannot run it: {first_error}", source)


# --- one execution ------------------------------------------------------------------------------------


def _execute(
    source: Source, cast: Cast, backward: bool, mode: DispatchMode | None, keep_graph: bool = False
) -> tuple[Run, Graph | None]:
    grad, plain = backward or keep_graph, _is_plain(source.name)
    with neutral(grad):
        copier = Copier(
            cast=cast,
            rounded_to=source.rounded_to,
            grad=grad,
            enter=backward and source.may_mutate,
            whole=not plain and "as_strided" in source.name,  # which reads around its argument
        )
        given, function = (source.args, source.kwargs), source.function
        if not plain or source.kwargs:
            given = facts.adapt(source.name, *given)
            function = facts.on_cpu(source.name, function)
        args, kwargs = mapped_settings(copier.copy(given, source.tensors), cast)
        if backward and mode is None and plain and source.only is not None and not source.by_reference:
            alone = gradients_alone(source.name, args, kwargs, source.grad_outputs or (), source.only)
            if alone is not None:
                args, kwargs = _detached((args, kwargs))
                return Run(None, args, kwargs, alone), None
        drawn = None if source.draws is None else Substitute(source.draws)
        with mode or contextlib.nullcontext(), drawn or contextlib.nullcontext():  # what probes draw is their own
            outputs = function(*args, **kwargs)
            if drawn is not None and not drawn.used_up:
                raise DrawsRandomNumbers("the device draws other numbers than the CPU")
            grads = _gradients(source, outputs, copier.leaves) if backward else None
    graph, wrote = (outputs, copier.leaves) if keep_graph else None, copier.wrote()
    args, kwargs = _detached((args, kwargs)) if grad else (args, kwargs)
    return Run(_detached(outputs), args, kwargs, grads, wrote), graph


class neutral:
    """Whatever modes the calling thread is in, the golden run is in none of them."""

    __slots__ = ("_functions", "_grad", "_more", "_wanted")

    def __init__(self, grad: bool) -> None:
        self._wanted = grad

    def __enter__(self) -> None:
        self._functions = no_torch_function()
        self._functions.__enter__()
        self._more = _less_common_modes(self._wanted)
        self._grad = torch.is_grad_enabled()
        set_grad_enabled(self._wanted)

    def __exit__(self, *error: Any) -> None:
        set_grad_enabled(self._grad)
        if self._more is not None:
            self._more.__exit__(*error)
        self._functions.__exit__(*error)


def _less_common_modes(grad: bool) -> contextlib.ExitStack | None:
    inference, autocast = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    hooks = grad and top_saved_tensor_hooks(True) is not None
    if not (inference or autocast or hooks):
        return None
    stack = contextlib.ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(False))
    if autocast:
        stack.enter_context(torch.autocast("cpu", enabled=False))
    if hooks:
        # checkpointing counts what is saved under its hooks: the golden run is not to be counted
        stack.enter_context(without_saved_tensor_hooks())
    return stack


def differentiated(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], sent: Sequence[Tensor], keep: bool = False
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` without its checks, which import SymPy, and not seen as a pass of the training.

    >>> x = torch.ones(1, requires_grad=True)
    >>> differentiated([3 * x], [x], [torch.ones(1)])
    (tensor([3.]),)
    """
    found = engine.run_backward(tuple(outputs), tuple(sent), keep, False, tuple(inputs), True, accumulate_grad=False)
    return tuple(found)


def _gradients(source: Source, outputs: Any, leaves: list[Tensor | None]) -> list[Tensor | None]:
    pairs = list(zip(tensors_in(outputs), source.grad_outputs or ()))
    if not _is_plain(source.name) and facts.has_free_vectors(source.name):
        for number, (theirs, (output, grad)) in enumerate(zip(tensors_in(source.outputs), pairs)):
            if grad is not None:
                sent = grad.detach().to(device="cpu", dtype=output.dtype)
                pairs[number] = output, facts.align_gradient_signs(source.name, number, theirs, output, sent)
    return _gradients_of(pairs, leaves)


def _gradients_of(pairs: Sequence[tuple[Tensor, Tensor | None]], leaves: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the leaves, for results and the gradients that came back to them."""
    outputs, sent = [], []
    for output, grad in pairs:
        if output.requires_grad and grad is not None:
            outputs.append(output)
            sent.append(grad.detach().to(device="cpu", dtype=output.dtype))
    unique = list({id(leaf): leaf for leaf in leaves if leaf is not None}.values())
    if not outputs or not unique:
        return [None] * len(leaves)
    found = {id(leaf): grad for leaf, grad in zip(unique, differentiated(outputs, unique, sent))}
    return [None if leaf is None else found[id(leaf)] for leaf in leaves]


def _detached(value: Any) -> Any:
    return value.detach() if type(value) is Tensor else map_tensors(value, _unwrapped)


def _unwrapped(tensor: Tensor) -> Tensor:
    """What a wrapper around one tensor holds, such as the result of a collective that has not been waited for."""
    if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
        inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        if len(inside) == 1 and inside[0].shape == tensor.shape:
            return _unwrapped(inside[0])
    return tensor.detach()


def mapped_settings(value: Any, cast: Cast) -> Any:
    """Dtypes follow the cast, devices become the CPU, generators of a device go."""
    kind = type(value)
    if kind is torch.dtype:
        return cast.get(value, value)
    if kind is torch.device:
        return torch.device("cpu")
    if kind is str:
        return "cpu" if facts.is_device_text(value) else value
    if kind is torch.Generator:
        return None
    if kind is list:
        return [mapped_settings(v, cast) for v in value]
    if kind is tuple:
        return tuple([mapped_settings(v, cast) for v in value])
    if kind is dict:
        return {k: mapped_settings(v, cast) for k, v in value.items()}
    return value
