"""Calls that draw random numbers, on the run's thread: the state of the generator, and the draws of calls with dropout.

To find out what a call drew inside, the device does it once more from the same state of its generator, on copies, and
the draws are noted (`judge/draws.py`). Then the generators go on from where the call left them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

import torch

from ..call import facts
from ..call.description import Tensor, tensors_in
from ..call.devices import get_rng_state, set_rng_state
from ..call.functions import function_of
from ..call.operators.registry import CPU
from ..compat import count_dispatch_modes, no_dispatch_modes, top_saved_tensor_hooks, without_saved_tensor_hooks
from ..copies.operands import Operands, bytes_of, stage
from ..judge import references
from ..judge.draws import DrawsRandomNumbers, Recorder
from ..judge.random_draws import States
from .ladder import ComparedCall

_MAX_KINDS: Final = 20_000
_MIN_REPEATED: Final = 2  # calls of an operator that cannot be judged otherwise, then one of so many
_REPEAT_EVERY: Final = 32
SAME_BITS: Final = "repeated only: the device gives the same bits again"
OTHER_BITS: Final = "repeated only: the device gives other bits for the same call"


@dataclasses.dataclass(eq=False)
class Drawn:
    """What is known of the random numbers of one call."""

    states: States | None  # of the generator, before and after the call
    laws: tuple[tuple[Any, ...], ...] = ()  # of each draw inside the call
    staged: Operands | None = None  # the draws; where that is in doubt, the share of each result that came out the same
    reason: str = ""  # why the draws inside are not known


class Repeater:
    """Looks after the calls of a run that may draw random numbers.

    >>> before = repeater.before(call)  # doctest: +SKIP
    >>> drawn = repeater.after(call, compared, before)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._never: set[Hashable] = set()  # kinds of calls that draw nothing
        self._repeatable: dict[torch.device, bool] = {}  # whether the same state gives the same numbers again

    def before(self, call: Any) -> tuple[Tensor, Tensor] | None:
        """The states of the generators of device and CPU; None where nothing is drawn."""
        if (call.op, call.inputs.number) in self._never:
            return None
        state = get_rng_state(call.device)
        return None if state is None else (state, torch.get_rng_state())

    def after(self, call: Any, compared: ComparedCall, states: tuple[Tensor, Tensor]) -> Drawn | None:
        """What the call drew; None where nothing."""
        now = get_rng_state(call.device)
        assert now is not None
        drew, law = not torch.equal(states[0], now), compared.traits.facts.law
        drawn = Drawn((states[0].numpy().tobytes(), now.numpy().tobytes()))
        if law:
            return drawn
        if facts.last_name(call.op) in facts.BY_CUDNN and call.device.type not in CPU:
            # cuDNN draws from a state of its own, which a repetition would move: later steps would draw other numbers
            return Drawn(None, reason="random: its kernel keeps a state of its own") if drew else None
        if (drew or compared.traits.random) and compared.before is not None and _may_be_repeated(compared):
            repeated = self._repeat(call, compared, states)
            if repeated is not None:
                return dataclasses.replace(repeated, states=drawn.states)
            drew = False
        if not drew and call.inputs.number and len(self._never) < _MAX_KINDS:
            self._never.add((call.op, call.inputs.number))
        return None

    def stopped(self, call: Any, compared: ComparedCall, states: tuple[Tensor, Tensor] | None) -> bool:
        """Find out what a call drew that did not return, since checkpointing needed no more; whether it worked."""
        if states is None or call.result is not None or compared.before is None or not _may_be_repeated(compared):
            return False
        drawn = self._repeat(call, compared, states) if self._is_repeatable(call.device) else None
        if drawn is None or drawn.staged is None:
            return False
        compared.drawn = drawn
        return True

    def _repeat(self, call: Any, compared: ComparedCall, states: tuple[Tensor, Tensor]) -> Drawn | None:
        device = call.device
        recorder = Recorder(lambda probe: _from_here(device, probe))
        assert compared.before is not None
        try:
            with _set_back(device, states), _same_region(compared), recorder:
                args, kwargs = _own_arguments(compared)
                result = compared.function(*args, **kwargs)
            if not recorder.draws:
                return None
            with torch.no_grad(), no_dispatch_modes() if count_dispatch_modes() else contextlib.nullcontext():
                shares: list[Tensor] = []
                if recorder.probed or not self._is_repeatable(device):
                    shares = [_same_share(a, b) for a, b in zip(tensors_in(call.result), tensors_in(result))]
                staged = stage(([draw.values for draw in recorder.draws], shares))
        except DrawsRandomNumbers as error:
            return Drawn(None, reason=f"random: {error}")
        except Exception as error:  # no memory, most likely
            return Drawn(None, reason=f"random: it could not be repeated ({type(error).__name__})")
        return Drawn(None, tuple([draw.law for draw in recorder.draws]), staged)

    def _is_repeatable(self, device: torch.device) -> bool:
        known = self._repeatable.get(device)
        if known is None:
            ones, state = torch.ones(512, device=device), get_rng_state(device)
            assert state is not None
            first, second = [_from_here(device, lambda: torch.dropout(ones, 0.5, True)) for _ in range(2)]
            known = self._repeatable[device] = torch.equal(first != 0, second != 0)
        return known


class Unjudged:
    """Operators that run on the device alone: nothing says what is right, but the same call must give the same bits."""

    def __init__(self) -> None:
        self._operators: dict[Any, bool] = {}
        self._calls: Counter[str] = Counter()
        self._known: dict[str, str] = {}

    def note(self, call: Any, compared: ComparedCall) -> None:
        """Repeat a call now and then, on the run's thread, and note what came of it."""
        function = compared.function
        alone = self._operators.get(function)
        if alone is None:
            alone = self._operators[function] = references.runs_on_the_device_alone(function, read_only=True)
        if not alone:
            return
        self._calls[call.op] += 1
        if self._calls[call.op] <= _MIN_REPEATED or not self._calls[call.op] % _REPEAT_EVERY:
            found = again(call, compared)
            if found and self._known.get(call.op) != OTHER_BITS:
                self._known[call.op] = found
        if call.op in self._known:
            compared.notes["repeated"] = self._known[call.op]


def again(call: Any, compared: ComparedCall) -> str:
    """What a repetition of a call that has just run shows; empty where it cannot be made (`again(call, compared)`)."""
    state = get_rng_state(call.device)
    try:
        with _same_region(compared), torch.no_grad():
            result = compared.function(*call.args, **call.kwargs)
            pairs = list(zip(tensors_in(call.result), tensors_in(result)))
            same = all(float(_same_share(a, b)) == 1 for a, b in pairs)
    except Exception:  # no memory, most likely
        return ""
    now = get_rng_state(call.device)
    if state is not None and now is not None and not torch.equal(state, now):
        set_rng_state(call.device, state)
        return ""
    return SAME_BITS if same else OTHER_BITS


def _may_be_repeated(call: ComparedCall) -> bool:
    """Whether it is a function of PyTorch's: one of the user's may do anything besides."""
    try:
        return call.op.startswith(("torch.", "aten.")) and function_of(call.op) == call.function
    except Exception:
        return False


def _own_arguments(call: ComparedCall) -> Any:
    before = call.before
    assert before is not None
    writes = call.traits.mutates or facts.may_mutate(call.op, before.tree[1])
    return before.tensors([bytes_of(s).clone() for s in before.storages] if writes else None)


@contextlib.contextmanager
def _set_back(device: torch.device, states: tuple[Tensor, Tensor]) -> Iterator[None]:
    """Generators as they were; afterwards they go on from where they are now."""
    now, on_host = get_rng_state(device), torch.get_rng_state()
    assert now is not None
    try:
        if not torch.equal(on_host, states[1]):  # other threads may use it: it is left alone if the call does not
            torch.set_rng_state(states[1])
        set_rng_state(device, states[0])
        yield
    finally:
        if not torch.equal(on_host, torch.get_rng_state()):
            torch.set_rng_state(on_host)
        set_rng_state(device, now)


def _from_here(device: torch.device, probe: Callable[[], Any]) -> Any:
    state = get_rng_state(device)
    assert state is not None
    try:
        return probe()
    finally:
        set_rng_state(device, state)


@contextlib.contextmanager
def _same_region(call: ComparedCall) -> Iterator[None]:
    """Numerics as around the call, without the user's modes and hooks; autocast keeps no copy of an argument."""
    cached = torch.is_autocast_cache_enabled()
    with contextlib.ExitStack() as stack:
        if count_dispatch_modes():
            stack.enter_context(no_dispatch_modes())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if top_saved_tensor_hooks(True) is not None:
            stack.enter_context(without_saved_tensor_hooks())
        stack.enter_context(torch.set_grad_enabled(call.region.grad_enabled))
        torch.set_autocast_cache_enabled(False)
        stack.callback(torch.set_autocast_cache_enabled, cached)
        yield


def _same_share(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape or not a.numel():
        return torch.ones((), device=a.device) if a.shape == b.shape else torch.zeros((), device=a.device)
    a, b = a.detach(), b.detach()
    return ((a == b) | ((a != a) & (b != b))).float().mean()
