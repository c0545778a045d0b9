"""OpObserve: shows and records the arguments and results of operators."""

from __future__ import annotations

import json
from array import array
from typing import Any, ClassVar

from ..call.traits import OpTraits
from ..view import console
from ..watch.intercept import Call
from .base import Tool
from .light import noted


class OpObserve(Tool):
    """Record what every operator is called with: shapes, strides, dtypes, values, places.

    >>> with op_tools.OpObserve() as observe:  # doctest: +SKIP
    ...     model(x)
    >>> observe.records()[0]["op"]             # doctest: +SKIP
    'torch.nn.functional.linear'
    """

    name = "OpObserve"
    prefix = "OP_OBSERVE"
    feature = "dump_op_args"
    order = 30
    columns: ClassVar[dict[str, str]] = {
        "call_id": "INTEGER",
        "site": "INTEGER",
        "step": "INTEGER",
        "data_ptrs": "BLOB",
    }

    def light(self, traits: OpTraits) -> tuple[Any, ...] | None:
        if type(self) is not OpObserve or self.view.full or self.gated or self.only is not None or self._store is None:
            return None
        return noted(self, traits.name, self._store.flush_when_due, self._new_rows, self._run_key)

    def after(self, call: Call) -> None:
        self.count(call)
        site = self.site(call)
        pointers = call.inputs.data_ptrs + call.outputs.data_ptrs
        self.record(call.id, site, call.step, array("Q", pointers).tobytes())
        if self.view.full:
            self.view.block(
                f"{call.op}    forward_id: {call.id}",
                call.location,
                self.view.tables.render(site, call.op, lambda: console.call_rows(call.inputs, call.outputs), pointers),
            )

    def decode_row(self, row: dict[str, Any]) -> None:
        row["data_ptrs"] = list(array("Q", row["data_ptrs"]))
        described = json.loads(row.pop("described") or "{}")
        row["inputs"], row["outputs"] = described.get("inputs", []), described.get("outputs", [])
