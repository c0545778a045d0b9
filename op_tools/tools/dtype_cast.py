"""OpDtypeCast: computes chosen operators in another dtype; results and gradients keep the original one."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch

from .. import settings
from ..call.description import Tensor, map_tensors, tensors_in
from ..call.devices import NARROWER, autocast_dtype, get_rng_state, quiet, set_rng_state
from ..copies.host_copies import version_of
from ..view import console
from ..watch.intercept import Call
from .base import Tool

_DEFAULT: Final = "torch.float16->torch.float32,torch.bfloat16->torch.float32"
_FLOATING: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_SIGNATURES: Final = 10_000


class OpDtypeCast(Tool):
    """Compute operators in another dtype, as `OP_DTYPE_CAST_DICT` or `<OP>_OP_DTYPE_CAST_DICT` say.

    >>> os.environ["OP_DTYPE_CAST_DICT"] = "torch.float16->torch.float32"  # doctest: +SKIP
    >>> with op_tools.OpDtypeCast(ops=["torch.nn.functional.softmax"]):    # doctest: +SKIP
    ...     model(x)
    """

    name = "OpDtypeCast"
    prefix = "OP_DTYPE_CAST"
    feature = "cast_dtype"
    transforms = True
    announces = True
    order = 70  # outside OpFallback: what is cast may then run on the CPU
    wants_pointers = False
    columns: ClassVar[dict[str, str]] = {
        "call_id": "INTEGER",
        "site": "INTEGER",
        "target": "TEXT",
        "action": "TEXT",
        "config": "TEXT",
    }

    def prepare(self) -> None:
        self._casts = settings.Casts.from_environment()
        if self.only is not None:  # a feature may be applied before its variable is set: it is read at each call
            self._casts = settings.Casts(os.environ)
        self._by_op: dict[str, tuple[str, dict[torch.dtype, torch.dtype]]] = {}
        self._narrowed = False  # whether a cast to float64 became one to float32
        self._result_dtypes: dict[Any, tuple[torch.dtype | None, ...]] = {}

    def _map_for(self, op: str) -> tuple[str, dict[torch.dtype, torch.dtype]]:
        known = self._by_op.get(op)
        if known is not None and self.only is None:
            return known
        variable, text = self._casts.text(op)
        text = text or _DEFAULT
        if known is None or known[0] != text:
            known = self._by_op[op] = (text, settings.parse_dtype_map(text, variable))
        return known

    def transform(self, call: Call, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        traits = call.traits
        if traits.view or traits.conversion or traits.collective or traits.factory:
            return run(call.args, call.kwargs)
        config, mapping = self._map_for(call.op)
        if not any(t.dtype in mapping for t in tensors_in((call.args, call.kwargs))):
            return run(call.args, call.kwargs)
        expected = self._expected_dtypes(call)
        self.count(call)
        cast: dict[int, tuple[Tensor, Tensor]] = {}  # the original and its copy, by the id of the original
        actions: list[tuple[str, str]] = []

        def change(index: int, tensor: Tensor) -> Tensor:
            target = mapping.get(tensor.dtype)
            if target is None:
                return tensor
            if id(tensor) not in cast:
                cast[id(tensor)] = (tensor, self._converted(tensor, target))
            copy = cast[id(tensor)][1]
            if copy is not tensor:
                actions.append((f"input[{index}]", f"{tensor.dtype} -> {copy.dtype}"))
            return copy

        args = [map_tensors(arg, functools.partial(change, index)) for index, arg in enumerate(call.args)]
        named = enumerate(call.kwargs.items(), len(args))
        kwargs = {key: map_tensors(value, functools.partial(change, index)) for index, (key, value) in named}
        cast = {key: pair for key, pair in cast.items() if pair[0] is not pair[1]}
        versions = [version_of(copy) for _, copy in cast.values()]
        with torch.autocast(call.device.type, enabled=False):
            result = run(tuple(args), kwargs)
        for (original, copy), version in zip(cast.values(), versions):
            if version_of(copy) != version:  # an in-place operator wrote to the cast copy
                original.copy_(copy)
        back = {id(copy): original for original, copy in cast.values()}
        result = _restored(result, back, expected, actions)
        call.notes[self] = (actions, config)
        return result

    def _converted(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        try:
            return tensor.to(dtype)
        except TypeError:  # a device without float64
            if dtype not in NARROWER:
                raise
            self._narrowed = True
            return tensor.to(NARROWER[dtype])

    def _expected_dtypes(self, call: Call) -> tuple[torch.dtype | None, ...]:
        """The dtypes that the operator itself would return: seen once per operator and input dtypes."""
        tensors = list(tensors_in((call.args, call.kwargs)))
        signature = (
            call.op,
            tuple((t.dtype, t.dim() == 0) for t in tensors),
            str(call.kwargs.get("dtype")),
            torch.is_autocast_enabled(call.device.type) if tensors else False,
        )
        known = self._result_dtypes.get(signature)
        if known is None:
            if len(self._result_dtypes) > _MAX_SIGNATURES:
                self._result_dtypes.clear()
            known = self._result_dtypes[signature] = _probe(call)
        return known

    def after(self, call: Call) -> None:
        noted = call.notes.pop(self, None)
        if noted is None:
            return
        actions, config = noted
        site = self.site(call)
        for target, action in actions:
            self.record(call.id, site, target, action, config)
        if self.view.full and actions:
            rows = [[call.op, target, action, config] for target, action in actions]
            self.view.block(console.table(console.CAST_COLUMNS, rows))
        if self._narrowed:
            self.no_double()


def _restored(
    result: Any, back: dict[int, Tensor], expected: tuple[torch.dtype | None, ...], actions: list[tuple[str, str]]
) -> Any:
    """The result in the dtypes that are expected; `back` has the originals of arguments that are handed back."""
    numbered = enumerate(itertools.chain(expected, itertools.repeat(None)))

    def restore(tensor: Tensor) -> Tensor:
        number, dtype = next(numbered)
        original = back.get(id(tensor))
        if original is not None:
            dtype = original.dtype
        elif dtype is None or dtype == tensor.dtype:
            return tensor
        actions.append((f"output[{number}]", f"{tensor.dtype} -> {dtype}"))
        return tensor.to(dtype) if original is None else original

    return map_tensors(result, restore)


def _probe(call: Call) -> tuple[torch.dtype | None, ...]:
    """Run the operator as it is on private copies and see what comes out; the run's state is untouched."""
    device = call.device
    low = autocast_dtype(device.type)
    try:
        with quiet():
            cpu_state = torch.get_rng_state()
            state = get_rng_state(device) if device.type != "cpu" else None
            copies: dict[int, Tensor] = {}

            def private(tensor: Tensor) -> Tensor:
                return copies.setdefault(id(tensor), tensor.detach().clone())

            try:
                with torch.autocast(device.type, dtype=low, enabled=low is not None):
                    result = call.function(
                        *map_tensors(call.args, private),
                        **{k: map_tensors(v, private) for k, v in call.kwargs.items()},
                    )
            finally:
                torch.set_rng_state(cpu_state)
                if state is not None:
                    set_rng_state(device, state)
        return tuple(t.dtype if t.dtype in _FLOATING else None for t in tensors_in(result))
    except Exception:
        # The device may lack this operator in the original dtype, which is why it is cast.
        return _promoted(call)


def _promoted(call: Call) -> tuple[torch.dtype | None, ...]:
    given = [t.dtype for t in tensors_in((call.args, call.kwargs)) if t.dtype in _FLOATING]
    return (functools.reduce(torch.promote_types, given) if given else None,) * 64
