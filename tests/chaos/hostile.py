"""Captures, records, stores and fault strings that are damaged, or made to do damage."""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from op_tools import cli
from op_tools.files import archive, captures
from op_tools.files.archive import ArchiveError
from op_tools.replay import pool
from op_tools.replay.outcome import ERROR, Options, Outcome
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
    folders = [
        mutated(folder / str(n), choose, sound) if n % 2 else made(folder / str(n), choose, operators)
        for n in range(count)
    ]
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


def planted(count: int, choose: random.Random) -> Counter[str]:
    """Fault strings from the grammar's own pieces, shuffled: parsed, or refused with a ValueError."""
    from ditorch.soft import faults

    pieces = [
        "add",
        "mm",
        ":",
        ";",
        ",",
        "=",
        "wrong",
        "slow",
        "nan",
        "1e-3",
        "every",
        "99999999999",
        "\0",
        "*",
        "(",
        "é",
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
