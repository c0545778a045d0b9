"""OpAutoCompare: compares every operator with a golden run on the CPU, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from .. import archive, console, cpu_check, settings, store
from ..cpu_check import Comparison, Tolerances, all_right, compare
from ..devices import quiet
from ..intercept import Call
from ..opcall import Described, Tensor, TensorMeta, describe, labelled, map_tensors, tensors_in
from ..snapshot import Unpacker
from .base import Tool


class OpAutoCompare(Tool):
    """Compare each operator's results and gradients with the CPU while the training runs.

    >>> with op_tools.OpAutoCompare() as comparison:  # doctest: +SKIP
    ...     train_step()
    >>> [row["name"] for row in comparison.records() if not row["allclose"]]  # doctest: +SKIP
    """

    name = "OpAutoCompare"
    prefix = "OP_AUTOCOMPARE"
    order = 20
    wants_backward = True
    columns: ClassVar[dict[str, str]] = {
        "call_id": "INTEGER",
        "site": "INTEGER",
        "phase": "TEXT",
        "name": "TEXT",
        "allclose": "INTEGER",
        "max_abs_diff": "REAL",
        "max_relative_diff": "REAL",
        "atol": "REAL",
        "rtol": "REAL",
        "error_info": "TEXT",
    }

    def prepare(self) -> None:
        self._tolerances = Tolerances()
        self._casts: dict[str, dict[torch.dtype, torch.dtype]] = {}
        cpu_check.cast_map("torch.add")  # a mistake in the variable is an error now
        self._unpacker = Unpacker()
        self._wrong = 0
        self._compared = 0
        self._folder = settings.results_dir() / "op_capture_results"
        self.csv_path: Path | None = None

    # -- forward --------------------------------------------------------------------------------------

    def before(self, call: Call) -> None:
        reason = cpu_check.why_not(call.traits, call.kwargs)
        if reason is not None:
            self.found(call, "skipped", f"not comparable: {reason}", once=True)
            return
        grad_enabled = torch.is_grad_enabled()
        with quiet():
            call.notes[self] = cpu_check.take_inputs(call.args, call.kwargs, grad_enabled)

    def after(self, call: Call) -> None:
        inputs = call.notes.pop(self, None)
        if inputs is None:
            return
        cast = self._casts.get(call.op)
        if cast is None or self.only is not None:
            cast = self._casts[call.op] = cpu_check.cast_map(call.op)
        inputs = inputs.on_host(self._unpacker)
        try:
            reference = self._reference(call, inputs, cast)
        except cpu_check.NotComparable as reason:
            self.found(call, "skipped", f"not comparable: {reason}", once=True)
            return
        except Exception as error:
            self.found(call, "skipped", f"not comparable: the CPU cannot run it ({_first_line(error)})", once=True)
            return
        self.announce(call)
        with quiet():
            device_args = self._to_host((call.args, call.kwargs))
            result = self._to_host(call.result)
            mine, theirs = _compared(*device_args), _compared(reference.args, reference.kwargs)
            rows = compare(call.op, "input", mine, theirs, self._tolerances)
            rows += compare(call.op, "output", result, reference.result, self._tolerances)
        call.notes[self] = (reference, inputs)
        self._keep(call, "forward", rows)
        if self.view.full:
            self._show_forward(call, reference, rows)
        if not all_right(rows):
            self._save(call, {"device": self._forward_parts(call, inputs, result), "cpu": _golden_parts(reference)})

    def _reference(
        self, call: Call, inputs: cpu_check.Inputs, cast: dict[torch.dtype, torch.dtype]
    ) -> cpu_check.Golden:
        mutates = call.traits.mutates or "out" in call.kwargs or bool(call.kwargs.get("inplace"))
        state = torch.get_rng_state()
        try:
            with torch._C.DisableTorchFunction(), torch.random.fork_rng(devices=[]):
                return cpu_check.run(_plain_function(call), inputs, cast, mutates)
        finally:
            torch.set_rng_state(state)

    def _to_host(self, value: Any) -> Any:
        return map_tensors(value, lambda t: t.detach().cpu())

    # -- backward -------------------------------------------------------------------------------------

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        noted = call.notes.get(self)
        if noted is None:
            return
        reference, inputs = noted
        with torch.enable_grad():
            expected = reference.backward(grad_outputs)
        found = [g.detach().cpu() if g is not None else None for g in grad_inputs]
        paired = [(g, e) for g, e, leaf in zip(found, expected, reference.leaves) if leaf is not None or g is not None]
        rows = compare(
            call.op, "grad", [_or_zero(g, e) for g, e in paired], [_or_zero(e, g) for g, e in paired], self._tolerances
        )
        self._keep(call, "backward", rows)
        host_outputs = [g.detach().cpu() if g is not None else None for g in grad_outputs]
        if self.view.full:
            self._show_backward(call, reference, host_outputs, grad_inputs, expected, rows)
        if not all_right(rows):
            device_parts = {
                **self._forward_parts(call, inputs, None),
                "grad_outputs": {"grad_outputs": archive.encode(tuple(host_outputs))},
                "grad_inputs": {"grad_inputs": archive.encode(tuple(found))},
            }
            cpu_parts = {"grad_inputs": {"grad_inputs": archive.encode(tuple(expected))}}
            self._save(call, {"device": device_parts, "cpu": cpu_parts})

    # -- results --------------------------------------------------------------------------------------

    def _keep(self, call: Call, phase: str, rows: list[Comparison]) -> None:
        site = self.site(call)
        self._compared += 1
        for row in rows:
            self.record(call.id, site, phase, *row[:1], int(row.allclose), *row[2:])
        wrong = [row for row in rows if not row.allclose]
        if wrong:
            self._wrong += 1
            worst = max(wrong, key=lambda r: r.max_abs_diff)
            self.found(
                call,
                "difference",
                f"{worst.name} differs from the CPU: max_abs_diff {worst.max_abs_diff:.9g} "
                f"(atol {worst.atol:g}, rtol {worst.rtol:g}) {worst.error_info}".rstrip(),
            )

    def _forward_parts(self, call: Call, inputs: cpu_check.Inputs, result: Any) -> dict[str, dict[str, Any]]:
        args, kwargs = inputs.values()
        facts = {
            "name": call.op,
            "id": call.id,
            "location": call.location,
            "step": call.step,
            "grad_enabled": inputs.grad_enabled,
            "autocast": None,
            "rng": None,
        }
        parts = {"input": {**facts, "args": archive.encode(args), "kwargs": archive.encode(kwargs)}}
        if result is not None:
            parts["output"] = {"name": call.op, "result": archive.encode(result)}
        return parts

    def _save(self, call: Call, sides: dict[str, dict[str, dict[str, Any]]]) -> None:
        stamp = call.notes.setdefault((self, "stamp"), store.time_label())
        folder = self._folder / call.op / settings.process_label() / "autocompare" / str(call.id) / stamp
        lines = []
        for side, parts in sides.items():
            (folder / side).mkdir(parents=True, exist_ok=True)
            for part, payload in parts.items():
                path = folder / side / f"{part}.pth"
                if not path.exists():
                    archive.save(path, payload)
                    lines.append(f"{path} saved")
        self.view.block(*lines)

    def finish(self) -> None:
        rows = self.records()
        header = ["forward_id", *console.COMPARE_COLUMNS]
        body = [[str(row["call_id"]), *_cells(_comparison(row))] for row in rows]
        if self.view.full and rows and self.only is None:
            self.view.block(console.table(header, body))
        folder = settings.results_dir() / "op_autocompare_result"
        self.csv_path = folder / f"op_autocompare_info_pid{settings.process_label()}_{store.time_label()}.csv"
        store.write_csv(self.csv_path, header, [[cell.strip() for cell in row] for row in body])

    def summary(self) -> list[str]:
        skipped = sum(f.kind == "skipped" for f in self.findings_now)
        return [
            f"{self._compared} comparisons, {self._wrong} with differences, {skipped} operators not comparable",
            f"comparisons in {self.csv_path}",
        ]

    def polish(self, row: dict[str, Any]) -> None:
        row.pop("described", None)
        row["allclose"] = bool(row["allclose"])

    # -- what is shown --------------------------------------------------------------------------------

    def _show_forward(self, call: Call, reference: cpu_check.Golden, rows: list[Comparison]) -> None:
        cpu_inputs = describe(reference.args, reference.kwargs)
        cpu_outputs = describe((reference.result,))
        shown = [
            *labelled(call.inputs, "inputs"),
            *labelled(call.outputs, "outputs"),
            *labelled(cpu_inputs, "inputs(cpu)"),
            *labelled(cpu_outputs, "outputs(cpu)"),
        ]
        pointers = call.inputs.data_ptrs + call.outputs.data_ptrs + cpu_inputs.data_ptrs + cpu_outputs.data_ptrs
        self._show(call, reference, shown, pointers, rows)

    def _show_backward(
        self,
        call: Call,
        reference: cpu_check.Golden,
        grad_outputs: list[Tensor | None],
        grad_inputs: list[Tensor | None],
        expected: list[Tensor | None],
        rows: list[Comparison],
    ) -> None:
        parts: list[tuple[Described, str]] = [
            (describe(tuple(g for g in grad_outputs if g is not None)), "grad_output(cpu)"),
            (describe(tuple(grad_inputs)), "grad_inputs"),
            (describe(tuple(expected)), "grad_inputs(cpu)"),
        ]
        shown: list[tuple[str, TensorMeta | str]] = []
        pointers: tuple[int, ...] = ()
        for described, what in parts:
            shown += labelled(described, what)
            pointers += described.data_ptrs
        self._show(call, reference, shown, pointers, rows)

    def _show(
        self,
        call: Call,
        reference: cpu_check.Golden,
        shown: list[tuple[str, TensorMeta | str]],
        pointers: tuple[int, ...],
        rows: list[Comparison],
    ) -> None:
        info = f"    cpu_dtype_cast_info(from:to): {reference.cast}" if reference.cast else ""
        self.view.block(
            f"{call.op} forward_id: {call.id}{info}",
            call.location,
            console.tensor_table(call.op, shown, pointers),
            console.table(console.COMPARE_COLUMNS, [_cells(row) for row in rows]),
            "",
        )


def _cells(row: Comparison) -> list[str]:
    return [
        f"{row.name:<30}",
        str(row.allclose),
        console.number(row.max_abs_diff),
        console.number(row.max_relative_diff),
        console.number(row.atol),
        console.number(row.rtol),
        row.error_info,
    ]


def _comparison(row: dict[str, Any]) -> Comparison:
    nan = float("nan")
    return Comparison(
        row["name"],
        row["allclose"],
        nan if row["max_abs_diff"] is None else row["max_abs_diff"],
        nan if row["max_relative_diff"] is None else row["max_relative_diff"],
        row["atol"],
        row["rtol"],
        row["error_info"],
    )


def _compared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What is compared of the arguments: all positional ones, and tensors given by keyword."""
    return [*args, *tensors_in(kwargs)]


def _or_zero(grad: Tensor | None, other: Tensor | None) -> Tensor | None:
    # No gradient and a gradient of zeros are the same.
    if grad is None and other is not None:
        return torch.zeros_like(other)
    return grad


def _golden_parts(reference: cpu_check.Golden) -> dict[str, dict[str, Any]]:
    def plain(value: Any) -> Any:
        return archive.encode(map_tensors(value, lambda t: t.detach()))

    return {
        "input": {"name": "", "args": plain(reference.args), "kwargs": plain(reference.kwargs)},
        "output": {"result": plain(reference.result)},
    }


def _plain_function(call: Call) -> Any:
    """`Tensor.cuda()` and its like have no meaning on the CPU: there they change nothing."""
    if call.traits.transfer and call.op.rsplit(".", 1)[-1] not in ("to", "cpu"):
        return lambda tensor, *args, **kwargs: tensor
    return call.function


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__
