"""Runs of a compiled function's graph on the CPU: in float64, in its own dtypes, and with roundings moved at random."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from ..call import facts
from ..call.description import Tensor, map_tensors, tensors_in
from ..call.equality import same_values
from ..call.graphs import ENTER_AUTOCAST, EXIT_AUTOCAST, OP, Graph, Step
from ..call.traits import OpTraits
from .allowances import TF32, known_weakness, tf32_allowed
from .golden import AS_IS, DOUBLE, GoldenResult, NoRandomNumbers, Run, Source, mapped_settings

_HALVES: Final = (torch.float16, torch.bfloat16)
_TO_DTYPE: Final = frozenset({"float", "half", "bfloat16", "double"})
_TO_DEVICE: Final = frozenset({"cuda", "npu", "xpu", "cpu", "musa", "mlu"})


class Jitter:
    """Moves numbers by up to so many units of rounding, at random; the same seed moves them alike.

    >>> bool((Jitter(1)(torch.ones(3, dtype=torch.float64), 0.1) - 1).abs().max() < 0.1)
    True
    """

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.scale = scale

    def __call__(self, tensor: Tensor, unit: float) -> Tensor:
        return tensor * self.factors(tensor, unit)

    def factors(self, tensor: Tensor, unit: float) -> Tensor:
        """Numbers around one, in the precision of a tensor."""
        drawn = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64)
        return drawn.mul_(2).sub_(1).mul_(unit * self.scale).add_(1).to(tensor.real.dtype)


@dataclasses.dataclass(eq=False)
class Runner:
    """A graph as a function of its arguments and constants, on the CPU or where its arguments are.

    `wide`: every number is float64. `here`: on the device, as eager runs it; `seen` gets each call and its result.
    """

    graph: Graph
    wide: bool = False
    here: bool = False
    jitter: Jitter | None = None
    device: str = ""  # the type of the device that is judged
    seen: Callable[[Step, Any, Any, Callable[[], Any]], Any] | None = None
    written: set[int] = dataclasses.field(default_factory=set)

    def __call__(self, *args: Any) -> Any:
        if self.jitter is not None:
            with torch.no_grad():
                for argument in {id(a): a for a in args if isinstance(a, Tensor)}.values():
                    self._move(argument, self.jitter)
        versions = [a._version if isinstance(a, Tensor) else 0 for a in args]
        result = self._run(self.graph, args)
        after = [a._version if isinstance(a, Tensor) else 0 for a in args]
        self.written |= {n for n, (old, new) in enumerate(zip(versions, after)) if old != new}
        return result

    def _move(self, tensor: Tensor, jitter: Jitter) -> None:
        """Move an argument, which is a private copy, in its own memory; whole numbers stay: masks, counts, labels."""
        if not tensor.is_floating_point():
            return
        own = tensor.detach()
        inner = torch.float32 if self.graph.dtypes - {torch.float64} else torch.float64
        factors = jitter.factors(own, torch.finfo(inner).eps / 2)
        try:
            own.mul_(factors.masked_fill_(own == own.round(), 1.0))
        except RuntimeError:  # elements that share memory
            return

    def _run(self, graph: Graph, args: tuple[Any, ...]) -> Any:
        from torch.fx.node import map_arg

        given = len(graph.arguments)
        env: dict[Any, Any] = dict(zip((*graph.arguments, *graph.constant_nodes), args))
        if len(env) != len(args):
            raise ValueError(f"{len(args)} arguments instead of {given + len(graph.constants)}")
        for step in graph.steps:
            node = step.node
            word = step.name.rpartition(".")[2]
            if word in (ENTER_AUTOCAST, EXIT_AUTOCAST) and not self.here:
                env[node] = None  # dtypes are those that Dynamo noted
            elif node.args and getattr(node.args[0], "name", "") in graph.parts:
                env[node] = self._run(graph.parts[node.args[0].name], tuple(map_arg(node.args[1:], env.__getitem__)))
            else:
                named = map_arg(node.kwargs, env.__getitem__)
                env[node] = self._step(step, map_arg(node.args, env.__getitem__), named)
            for used in step.done_with:
                env.pop(used, None)
        return map_arg(graph.result, env.__getitem__)

    def _step(self, step: Step, args: Any, kwargs: Any) -> Any:
        args, kwargs = _plain(args), _plain(kwargs)
        if self.here:
            call = functools.partial(_called, step.node, args, kwargs)
            return call() if self.seen is None else self.seen(step, args, kwargs, call)
        args, kwargs = mapped_settings((args, kwargs), DOUBLE if self.wide else AS_IS)
        if not self.wide:
            args, kwargs = _as_autocast_does(step, args, kwargs)
        elif self.jitter is not None and is_coarse(step.name, self.device):
            jitter = self.jitter
            args, kwargs = map_tensors((args, kwargs), lambda t: jitter(t, TF32) if t.is_floating_point() else t)
        result = _called(step.node, args, kwargs, self.wide)
        return self._stored(step, result, list(tensors_in((args, kwargs))))

    def _stored(self, step: Step, result: Any, given: list[Tensor]) -> Any:
        """A result in the dtype that it has in this run, with the rounding that it gets when it is stored."""
        known = list(step.dtypes)
        memory = {t.untyped_storage()._cdata for t in given} if self.jitter is not None else set()

        def store(tensor: Tensor) -> Tensor:
            dtype = known.pop(0) if known else tensor.dtype
            if not tensor.is_floating_point():
                return tensor
            if self.wide:
                tensor = tensor.to(torch.float64) if tensor.dtype in DOUBLE else tensor
            elif dtype.is_floating_point and tensor.dtype != dtype:
                tensor = tensor.to(dtype)
            if self.jitter is None or tensor.untyped_storage()._cdata in memory:
                return tensor
            unit = TF32 if dtype == torch.float32 and is_coarse(step.name, self.device) else 0.0
            return self.jitter(tensor, max(unit, torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0))

        return map_tensors(result, store)


@functools.lru_cache(maxsize=4096)
def _is_weak(name: str, device: str) -> bool:
    return any(known_weakness(name, phase, device, torch.float32) for phase in ("forward", "backward"))


def is_coarse(name: str, device: str) -> bool:
    """Whether a device may do a call on float32 in TF32, or its kernel is known to be as coarse."""
    products = device == "cuda" and facts.last_name(name) in facts.AUTOCAST_LOW and tf32_allowed(name)
    return products or _is_weak(name, device)


def _called(node: Any, args: Any, kwargs: Any, wide: bool = False) -> Any:
    if node.op == "call_function":
        return node.target(*args, **kwargs)
    own, *rest = args
    if wide and node.target in _TO_DTYPE:
        return own.double()
    if node.target in _TO_DEVICE and own.is_cpu:
        return own.cpu()
    return getattr(own, node.target)(*rest, **kwargs)


def _plain(value: Any) -> Any:
    """Containers of torch.fx as Python's own: what a call gets must be its own to change."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, slice):
        return slice(*map(_plain, (value.start, value.stop, value.step)))
    if type(value) is tuple:
        return tuple([_plain(v) for v in value])
    return value


def _as_autocast_does(step: Step, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call that returns another float than these are, as autocast has them in that call."""
    floats = {t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()}
    wanted = next((dtype for dtype in step.dtypes if dtype.is_floating_point), None)
    if wanted is None or not floats or floats == {wanted} or step.node.op == "call_method":
        return args, kwargs
    low = wanted in _HALVES and facts.last_name(step.name) in facts.AUTOCAST_LOW
    mixed = len(floats) > 1 and wanted == torch.float32 and not floats.isdisjoint(_HALVES)
    if not (low or mixed) or step.name.endswith("_") or kwargs.get("out") is not None:
        return args, kwargs
    changed: tuple[Any, Any] = map_tensors((args, kwargs), lambda t: t.to(wanted) if t.is_floating_point() else t)
    return changed


# --- runs -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GraphSource(Source):
    """A run of compiled code as the device saw it: all that it got is in `args`, constants last."""

    @functools.cached_property
    def may_mutate(self) -> bool:
        """Graphs may write to their arguments."""
        return True


class Runs:
    """The runs of one graph on the same arguments: each is made once, when somebody asks for it.

    >>> Runs(graph, args, "cuda").own.outputs  # doctest: +SKIP
    """

    def __init__(self, graph: Graph, args: tuple[Any, ...], device: str, grad_outputs: Any = None) -> None:
        self.graph, self.device = graph, device
        self.backward = grad_outputs is not None
        traits = OpTraits(OP, graph_function, random=None, mutates=True)
        self._source = GraphSource(graph_function, OP, traits, args, {}, grad_outputs, device)

    @functools.cached_property
    def own(self) -> Run | Exception:
        """In the graph's own dtypes; the error where the CPU cannot do it."""
        runner = Runner(self.graph, device=self.device)
        try:
            run = self._golden(runner).rerun(NoRandomNumbers(), self.backward)
        except NotImplementedError as error:
            return error
        except RuntimeError as error:
            return error
        self.learn(runner, run)
        return run

    @functools.cached_property
    def exact(self) -> Run:
        """In float64."""
        runner = Runner(self.graph, wide=True, device=self.device)
        run = self._golden(runner).rerun(NoRandomNumbers(), self.backward)
        self.learn(runner, None)
        return run

    def moved(self, seed: int, scale: float = 1.0) -> Run:
        """In float64, with every stored number moved by up to so many units of rounding of its own dtype."""
        runner = Runner(self.graph, wide=True, jitter=Jitter(seed, scale), device=self.device)
        return self._golden(runner).rerun(None, self.backward)

    def golden(self) -> GoldenResult:
        """The run in float64 as the golden run of one call, for those who ask how uncertain it is."""
        return dataclasses.replace(self._golden(Runner(self.graph, wide=True, device=self.device)), run=self.exact)

    def learn(self, runner: Runner, run: Run | None) -> None:
        """Remember which arguments the graph writes to; not all operators count that."""
        if run is not None and self.graph.writes is None:
            pairs = enumerate(zip(self._source.args, run.args))
            runner.written |= {n for n, (old, new) in pairs if isinstance(old, Tensor) and not same_values(old, new)}
        if run is not None or self.graph.writes is not None:
            self.graph.writes = runner.written | (self.graph.writes or set())

    def _golden(self, runner: Runner) -> GoldenResult:
        source = dataclasses.replace(self._source, function=runner)
        return GoldenResult(True, "", source, DOUBLE if runner.wide else AS_IS)


def graph_function(*args: Any) -> Any:
    """Stands for compiled code where a function is asked for."""
    raise NotImplementedError("compiled code has no function that could be called")


def coarsest(graph: Graph, tensors: Iterable[Tensor]) -> torch.dtype:
    """The float with the largest unit of rounding that numbers of a run are stored in."""
    dtypes = [d for d in (*graph.dtypes, *(t.dtype for t in tensors)) if d.is_floating_point]
    return max(dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float32)
