"""Backward nodes that work with other tensors than their forward had: activation checkpointing, and hooks of the user.

`torch.utils.checkpoint(use_reentrant=False)` keeps the nodes of the first forward and gives them what a second one
saves. Both save the same number of tensors in the same order, which tells which calls belong together: the gradients of
the first are those of the arguments of the second. What other hooks for saved tensors give back is not known.
Nothing here runs unless such hooks are on when a call is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from ..call.description import Tensor, TensorMeta
from ..compat import (
    STOPS_RECOMPUTATION,
    Checkpointed,
    checkpoint_of,
    count_dispatch_modes,
    keeps_saved_values,
    reusable_results,
)
from .hooks import Hooks

if TYPE_CHECKING:
    from .intercept import Call, Interceptor

# By checkpoint: the calls of its first forward, by the number of the first tensor that they saved, with the next one's.
_calls: Final[weakref.WeakKeyDictionary[Any, dict[int, tuple[int, weakref.ref[Call]]]]] = weakref.WeakKeyDictionary()

_NOT_SEEN: Final = "checkpointing computed its tensors again, and that call was not compared"
_STOPPED: Final = "checkpointing computed its result again, and did not return it"
_IN_PART: Final = "selective checkpointing took a part of it from the first forward"


class Saving:
    """Where the tensors that a call saves for its backward go to; made before the call."""

    __slots__ = ("_hooks", "checkpoint", "reusable", "start")

    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks
        self.checkpoint: Checkpointed | None = checkpoint_of(hooks)
        again = self.checkpoint is not None and self.checkpoint.again
        self.start = 0 if self.checkpoint is None else self.checkpoint.saved()
        self.reusable = reusable_results() if again and count_dispatch_modes() else 0

    def ran(self, call: Call, tools: Iterable[Hooks]) -> None:
        """The call has run, and no tool has been told yet."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            if not keeps_saved_values(self._hooks):
                name = getattr(self._hooks[0], "__qualname__", type(self._hooks[0]).__qualname__)
                _doubt(call, tools, f"the hook {name} may have changed the tensors that it saved")
        elif not checkpoint.again:
            end = checkpoint.saved()
            if end > self.start:
                _calls.setdefault(checkpoint.frame, {})[self.start] = (end, weakref.ref(call))
                _doubt(call, tools, _NOT_SEEN)
        else:
            reused = self.reusable - reusable_results() if self.reusable else 0
            whole = reused and self._first_results(call)
            self._link(call, tools, bool(whole), _IN_PART if reused and not whole else "")

    def stopped(self, call: Call, tools: Iterable[Hooks], error: BaseException, interceptor: Interceptor) -> None:
        """The call has raised an error: checkpointing needs nothing more, and ends with the kernel of the call done."""
        checkpoint = self.checkpoint
        first = self._first(call)
        if type(error) is not STOPS_RECOMPUTATION or checkpoint is None or first is None:
            return
        given = {t.data_ptr() for t in call.tensors}
        made = [t for t in checkpoint.tensors(self.start) if t.data_ptr() not in given]
        results: list[Tensor] = []
        described = interceptor.descriptions.of(tuple(made), {}, results, True)
        if len(made) == 1 and _looks(described.args) == _looks(first.outputs.args):
            call.result, call.outputs, call.results = made[0], described, results
            for tool in tools:
                try:
                    tool.after(call)
                except Exception as problem:
                    tool.failed(call, problem)
            self._link(call, tools, False, "")
        else:
            self._link(call, tools, True, _STOPPED if made else "")
        call.release()

    def _first(self, call: Call) -> Call | None:
        """The call of the first forward that saved the tensors that this one has computed again."""
        if self.checkpoint is None:
            return None
        end, reference = _calls.get(self.checkpoint.frame, {}).get(self.start, (0, None))
        first = reference() if reference is not None and end == self.checkpoint.saved() else None
        return first if first is not None and first.op == call.op else None

    def _first_results(self, call: Call) -> bool:
        first = self._first(call)
        return first is not None and first.outputs.data_ptrs == call.outputs.data_ptrs

    def _link(self, call: Call, tools: Iterable[Hooks], reused: bool, doubt: str) -> None:
        first = self._first(call)
        if first is None:
            return
        first.notes["again"] = call  # alive as long as the first
        for tool in tools:
            try:
                tool.computed_again(first, call, reused, doubt)
            except Exception as error:
                tool.failed(call, error)


def _looks(results: tuple[Any, ...]) -> list[Any]:
    return [r._replace(requires_grad=False) if isinstance(r, TensorMeta) else r for r in results]


def _doubt(call: Call, tools: Iterable[Hooks], reason: str) -> None:
    for tool in tools:
        try:
            tool.doubts_gradients(call, reason)
        except Exception as error:
            tool.failed(call, error)
