"""Captures, records, stores and fault strings that are damaged, or made to do damage."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch

from op_tools import cli, settings
from op_tools.call.filter import OpFilter
from op_tools.files import archive, captures
from op_tools.files.archive import ArchiveError
from op_tools.replay import pool
from op_tools.replay.outcome import ERROR, Options, Outcome
from op_tools.settings import SettingsError
from op_tools.trace import format as trace_format
from op_tools.trace.record import Recorder
from op_tools.view.store import Store

OPTIONS = Options(device="cpu", acc_check=True, time_limit=20.0, memory_limit=1 << 30)
_PUBLIC = (
    *("torch.add", "torch.matmul", "torch.nn.functional.linear", "torch.nn.functional.embedding", "torch.gather"),
    *("torch.index_select", "torch.Tensor.exp", "torch.cat", "torch.Tensor.view", "torch.Tensor.expand", "torch.ones"),
    *("torch.full", "torch.arange", "torch.Tensor.repeat", "torch.nn.functional.conv2d", "torch.Tensor.as_strided"),
)


def _operators() -> list[str]:
    return [*_PUBLIC * 20, *(f"aten.{name}" for name in dir(torch.ops.aten) if not name.startswith("__"))]


def _value(choose: random.Random) -> Any:
    kind = choose.randrange(9)
    shape = tuple(choose.choice((0, 1, 2, 3, 4)) for _ in range(choose.randrange(4)))
    if kind < 3:
        return torch.rand(shape)
    if kind == 3:
        return torch.randint(-5, choose.choice((3, 10**6, 2**40)), shape)
    if kind == 4:
        return torch.ones(1).expand(choose.choice((3, 10**6, 10**11)))
    if kind == 5:
        return choose.choice((0, 1, -1, 2, 10**6, 10**12, 2**62, 0.5, float("nan"), True, None))
    if kind == 6:
        return [choose.choice((0, 1, 2, -1, 10**9)) for _ in range(choose.randrange(4))]
    if kind == 7:
        return [torch.rand(shape) for _ in range(choose.randrange(3))]
    return choose.choice(("sum", "mean", "cuda", "x" * 10, torch.float64, torch.device("cpu")))


def made(folder: Path, choose: random.Random, operators: list[str]) -> Path:
    """A well-formed capture of an operator with arguments that nobody would give it."""
    folder.mkdir(parents=True)
    args = tuple(_value(choose) for _ in range(choose.randrange(1, 6)))
    kwargs = {"dim": choose.choice((0, 1, 99))} if choose.random() < 0.2 else {}
    facts = {"name": choose.choice(operators), "id": 1, "location": "a.py:1\n=evil", "grad_enabled": True}
    archive.save(folder / "input.pth", {**facts, "args": archive.encode(args), "kwargs": archive.encode(kwargs)})
    return folder


def aimed(folder: Path, choose: random.Random, schemas: list[Any]) -> Path:
    """A capture whose arguments have the types that the operator wants, so that it runs, and hostile values."""
    folder.mkdir(parents=True)
    schema = choose.choice(schemas)
    args, kwargs = [], {}
    for argument in schema.arguments:
        if argument.has_default_value() and choose.random() < 0.7:
            if not argument.kwarg_only:
                args.append(argument.default_value)
            continue
        value = _of_type(str(argument.type), choose)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    name = schema.name.replace("::", ".") + (f".{schema.overload_name}" if schema.overload_name else "")
    facts = {"name": name, "id": 1, "location": "a.py:1", "grad_enabled": True}
    archive.save(folder / "input.pth", {**facts, "args": archive.encode(tuple(args)), "kwargs": archive.encode(kwargs)})
    return folder


_NUMBERS: Final = (0, 1, -1, 2, 3, 7, 10**6, 10**12, 2**62, -(2**63))


def _tensor_of(choose: random.Random) -> torch.Tensor:
    shape = tuple(choose.choice((0, 1, 2, 3, 4)) for _ in range(choose.choice((1, 2, 2, 3, 4))))
    kind = choose.randrange(6)
    if kind < 3:
        return torch.rand(shape)
    if kind == 3:
        return torch.randint(-5, choose.choice((3, 10**6, 2**40)), shape)
    return torch.rand(shape).double() if kind == 4 else torch.ones(shape, dtype=torch.bool)


def _of_type(kind: str, choose: random.Random) -> Any:
    if kind.startswith("Optional[") and choose.random() < 0.4:
        return None
    kind = kind.removeprefix("Optional[").rstrip("]") if kind.startswith("Optional[") else kind
    if kind.startswith("List["):
        inner = kind[5:].rstrip("]")
        return [_of_type(inner, choose) for _ in range(choose.choice((0, 1, 2, 2, 3)))]
    made: dict[str, Any] = {
        "Tensor": lambda: _tensor_of(choose),
        "int": lambda: choose.choice(_NUMBERS),
        "float": lambda: choose.choice((0.0, 0.5, -1.0, 1e308, float("nan"), float("inf"))),
        "bool": lambda: choose.random() < 0.5,
        "number": lambda: choose.choice((*_NUMBERS, 0.5, float("nan"))),
        "str": lambda: choose.choice(("sum", "mean", "none", "linear", "x" * 100, "\0")),
        "Device": lambda: torch.device("cpu"),
    }
    return made.get(kind, lambda: choose.choice((0, 1, None)))()


def mutated(folder: Path, choose: random.Random, sound: bytes) -> Path:
    """A sound capture with some bytes changed, cut out, or cut off."""
    folder.mkdir(parents=True)
    content = bytearray(sound)
    for _ in range(choose.randrange(1, 6)):
        place = choose.randrange(len(content))
        if choose.random() < 0.8:
            content[place] = choose.randrange(256)
        elif choose.random() < 0.5:
            del content[place : place + choose.randrange(1, 50)]
        else:
            del content[place + 1 :]
    (folder / "input.pth").write_bytes(content)
    return folder


def captured(count: int, folder: Path, choose: random.Random, jobs: int = 1) -> Counter[str]:
    """Replay so many hostile captures in worker processes; what came of them, and of the memory."""
    archive.save(
        folder / "sound.pth",
        {"name": "torch.add", "id": 1, "args": (torch.rand(40), torch.rand(40)), "kwargs": {}},
    )
    sound, operators = (folder / "sound.pth").read_bytes(), _operators()
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
    folders = []
    for number in range(count):
        place = folder / str(number)
        if number % 3 == 0:
            folders.append(mutated(place, choose, sound))
        else:
            folders.append(made(place, choose, operators) if number % 3 == 1 else aimed(place, choose, schemas))
    found: Counter[str] = Counter()
    outcomes = list(pool.replay_all(folders, OPTIONS, jobs=jobs))
    for outcome in outcomes:
        found["captures"] += 1
        found[_kind(outcome)] += 1
    found["unanswered"] += count - len(outcomes)
    found["code executed"] += Path("exploded").exists()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    found["over the memory limit"] += peak > 6 * OPTIONS.memory_limit  # PyTorch itself takes half a gigabyte
    return found


def _kind(outcome: Outcome) -> str:
    if outcome.status != ERROR:
        return "ran"
    for text, kind in (("died", "worker crashed"), ("time limit", "time limit"), ("memory", "memory limit")):
        if text in outcome.reason:
            return kind
    return "refused"


def flipped(count: int, folder: Path, choose: random.Random) -> Counter[str]:
    """Flip one bit of the tensor data of sound captures: is each noticed?"""
    path, x = folder / "input.pth", torch.rand(50_000)
    archive.save(path, {"name": "torch.exp", "args": (x,), "kwargs": {}})
    whole = path.read_bytes()
    first = whole.index(x.numpy().tobytes())
    found: Counter[str] = Counter()
    with open(path, "r+b", buffering=0) as file:
        for _ in range(count):
            place = first + choose.randrange(x.nbytes)
            os.pwrite(file.fileno(), bytes([whole[place] ^ (1 << choose.randrange(8))]), place)
            try:
                captures.encoded(path)
                found["missed"] += 1
            except ArchiveError:
                found["noticed"] += 1
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    return found


def recorded(count: int, folder: Path, choose: random.Random) -> Counter[str]:
    """Damage records files; `op_tools records` must show or refuse them."""
    store = Store(folder / "x.sqlite")
    store.table("findings", {"tool": "TEXT", "op": "TEXT", "kind": "TEXT", "message": "TEXT"}).append(
        ("OpX", "torch.add", "wrong", "off")
    )
    store.close()
    sound = (folder / "x.sqlite").read_bytes()
    found: Counter[str] = Counter()
    for number in range(count):
        content = bytearray(sound)
        for _ in range(choose.randrange(1, 30)):
            content[choose.randrange(len(content))] = choose.randrange(256)
        path = folder / f"{number}.sqlite"
        path.write_bytes(content[: choose.randrange(len(content)) + 1] if number % 4 == 0 else content)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                found["shown" if cli.show_records(path) == 0 else "refused"] += 1
            except Exception:
                found["raised"] += 1
        path.unlink()
    return found


def traced(count: int, folder: Path, choose: random.Random) -> Counter[str]:
    """Damage traces, and make small ones that claim to be large; `trace show` and `diff` must refuse or read them."""
    path = folder / "rank0.optrace"
    with trace_format.TraceWriter(path, {"rank": 0, "world": 1}) as writer:
        recorder = Recorder(writer, prints=False)
        for step in range(3):
            number = recorder.operator("torch.add", trace_format.FORWARD, None, step, "a.py:1", module=-1)
            recorder.edges(number, trace_format.INPUT, [-1])
    sound = path.read_bytes()
    found: Counter[str] = Counter()
    other = folder / "other"
    other.mkdir()
    (other / "rank0.optrace").write_bytes(sound)
    for number in range(count):
        place = folder / str(number)
        place.mkdir()
        (place / "rank0.optrace").write_bytes(_packed(choose) if number % 3 == 0 else _changed(sound, choose))
        for words in (["trace", "show", str(place), "-v", "3", "--partial"], ["diff", str(place), str(other)]):
            found[_answer(words)] += 1
    return found


def _changed(sound: bytes, choose: random.Random) -> bytes:
    """Some bytes changed, or the numbers in the lines between the blocks."""
    if choose.random() < 0.5:
        numbers = list(re.finditer(rb"(?<=: )\d+(?=[,}])", sound))
        at = choose.choice(numbers)
        return sound[: at.start()] + str(choose.choice((*_NUMBERS, -5))).encode() + sound[at.end() :]
    content = bytearray(sound)
    for _ in range(choose.randrange(1, 8)):
        content[choose.randrange(20, len(content))] = choose.randrange(256)
    return bytes(content[: choose.randrange(20, len(content))] if choose.random() < 0.3 else content)


def _packed(choose: random.Random) -> bytes:
    """A trace with blocks whose checks are all right, and whose contents are not."""
    table = choose.choice(tuple(trace_format.TABLES))
    rows = choose.choice((1, 3, 10**5, 10**9))
    size = sum(8 if "8" in kind else 4 for kind in trace_format.TABLES[table].values())
    body = choose.choice((bytes(min(rows, 10**6) * size), random.Random(rows).randbytes(min(rows, 100) * size)))
    packed = zlib.compress(body, 9)
    head: Any = {"table": table, "rows": rows, "bytes": len(packed)}
    if choose.random() < 0.3:
        packed = zlib.compress(b"[" * 10**5 if choose.random() < 0.5 else b'["' + b"a" * 10**8 + b'"]', 9)
        head = {"texts": 1, "bytes": len(packed)}
    start = trace_format.NAMED + f"{trace_format.VERSION}\n".encode()
    end = b'{"end": {}, "facts": {}, "bytes": 8}\n' + zlib.compress(b"")
    return start + json.dumps(head).encode() + b"\n" + packed + end


def _answer(words: list[str]) -> str:
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        try:
            return "shown" if cli.main(words) in (0, 1) else "refused"
        except SystemExit:
            return "refused"
        except SettingsError:
            return "refused"
        except Exception as error:
            print(f"{words}: {type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
            return "raised"


def _filtered(text: str) -> object:
    return OpFilter(text).matches("torch.add")


def _casts(text: str) -> object:
    return settings.parse_dtype_map(text, "OP_DTYPE_CAST_DICT")


def listed(count: int, choose: random.Random) -> Counter[str]:
    """Lists of operators and of dtypes to compute in, from the environment: taken, or refused with a SettingsError."""
    pieces = [
        *["torch.add", ".*", "(", "[", "a+", "->", "torch.float32", "half", ",", ";", "é", "{1000}"],
        "\x00",
        " ",
        "\\",
    ]
    found: Counter[str] = Counter()
    for _ in range(count):
        text = "".join(choose.choice(pieces) for _ in range(choose.randrange(8)))
        for take in (_filtered, _casts):
            try:
                take(text)
                found["taken"] += 1
            except SettingsError:
                found["refused"] += 1
            except Exception as error:
                print(f"{text!r}: {type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
                found["raised"] += 1
    return found


def planted(count: int, choose: random.Random) -> Counter[str]:
    """Fault strings from the grammar's own pieces, shuffled: parsed, or refused with a ValueError."""
    from ditorch.soft import faults

    pieces = [
        *["add", "mm", ":", ";", ",", "=", "wrong", "slow", "nan", "1e-3", "every", "99999999999", "*", "(", "é"],
        "\x00",
    ]
    found: Counter[str] = Counter()
    for _ in range(count):
        text = "".join(choose.choice(pieces) for _ in range(choose.randrange(12)))
        try:
            faults.parse(text)
            found["parsed"] += 1
        except ValueError:
            found["refused"] += 1
        except Exception:
            found["raised"] += 1
    return found
