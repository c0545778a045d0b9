"""Trainings under each tool, ended at random moments: is every file readable, and how much is lost?

The process that calls these functions has imported PyTorch; each run is a fork of it, so a run costs no second start of
Python. It must have no threads and must not have used the device. What is killed is a real process with its threads.

python -m tests.chaos.kills --count 100 --tools OpCapture,OpAutoCompare --signals SIGKILL     # these alone
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import dataclasses
import errno
import faulthandler
import json
import os
import random
import resource
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch

import op_tools
from op_tools import lifecycle
from op_tools.files import captures
from op_tools.files.archive import ArchiveError
from op_tools.settings import SettingsError
from op_tools.trace import format as trace_format
from op_tools.watch.hooks import Hooks
from op_tools.watch.intercept import ids

TOOLS: Final = (
    *("OpObserve", "OpTimeMeasure", "OpCapture", "OpOverflowCheck", "OpAutoCompare", "OpTrace", "OpFallback"),
    "OpDtypeCast",
)
SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MAX_LOST: Final = 1.0  # seconds of records
_PATIENCE: Final = 60.0  # seconds until a process that was told to end is killed
_STEP: Final = 0.03  # seconds between two steps
_MIN_STEPS: Final = 40  # of a run in trouble
Trouble = Callable[[Path], None]
LOST: Final[dict[str, list[float]]] = {}  # seconds by the clock, by tool, of the runs that were checked


def train(
    tool: str, folder: Path, seconds: float, ranks: tuple[int, int] = (0, 1), trouble: Trouble | None = None
) -> None:
    """In a child: train under a tool until somebody ends it; note the next call's number and the times of each step."""
    os.environ.update(OP_TOOLS_RESULTS_DIR=str(folder), OP_TOOLS_CONSOLE="off")
    os.environ["OP_DTYPE_CAST_DICT"] = "torch.float32->torch.float64"  # so that it has something to do
    rank, world = ranks
    device = "cuda"
    if world > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=world
        )
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.ones(4, 8, device=device)
    notes = os.open(f"{folder}.steps{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    results = os.open(f"{folder}.losses{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    losses = []
    with getattr(op_tools, tool)():
        if trouble is not None:  # a folder that cannot be written from the start is told by `start()`
            trouble(folder)
        end = time.monotonic() + seconds
        while time.monotonic() < end or (trouble is not None and len(losses) < _MIN_STEPS):
            loss = net(x).square().mean()
            loss.backward()
            if world > 1:
                for parameter in net.parameters():
                    torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            with contextlib.suppress(OSError):
                os.write(notes, f"{next(ids)} {time.monotonic()} {time.process_time()}\n".encode())
            time.sleep(_STEP)
    os.write(results, json.dumps(losses).encode())


def warm_up() -> None:
    """Import now what a first step imports, so that the runs need not (half of what a process costs otherwise)."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)  # a backward pass would start threads of the autograd engine, which no fork survives
    torch.optim.SGD([weight], lr=0.1).step()


def start(work: Callable[[], None], log: str) -> int:
    """Fork a child that does the work and ends as a process of its own would; its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
        faulthandler.register(signal.SIGUSR1, file=2)  # where it is, if it does not end
        work()
        code = 0
    except (KeyboardInterrupt, lifecycle.Terminated):
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            lifecycle._exit()  # what a process of its own does at its end
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@dataclasses.dataclass
class Run:
    """One training, with the processes of its ranks, and the moment at which a signal ends it."""

    tool: str
    number: int  # of the signal; 0 for a run that ends by itself
    folder: Path
    world: int
    moment: float  # seconds after the first step
    seconds: float = 60.0
    trouble: Callable[[Path], None] | None = None
    children: list[int] = dataclasses.field(default_factory=list)
    codes: list[int] = dataclasses.field(default_factory=list)
    began: float = 0.0
    due: float = 0.0
    killed: float = 0.0
    processor: float = 0.0  # seconds of all its threads, and of all ranks
    stubborn: int = 0  # processes that did not end when they were told to

    def begin(self) -> None:
        """Start its processes."""
        self.folder.mkdir(parents=True)
        self.began = time.monotonic()
        for rank in range(self.world):
            ranks = (rank, self.world)
            work = lambda ranks=ranks: train(self.tool, self.folder, self.seconds, ranks, self.trouble)  # noqa: E731
            self.children.append(start(work, f"{self.folder}.log{rank}"))

    def is_over(self) -> bool:
        """Send what is due; whether all of its processes have ended."""
        now = time.monotonic()
        if self.number and not self.due:
            notes = Path(f"{self.folder}.steps0")
            if notes.exists() and notes.stat().st_size:
                self.due = now + self.moment
        if self.due and now >= self.due and not self.killed:
            self.killed = time.monotonic()
            for position, child in enumerate(self.children):
                # as torchrun: after a rank has died, the others are told to end
                self._send(child, self.number if position == 0 or self.number != signal.SIGKILL else signal.SIGTERM)
        for child in list(self.children):
            done, status, used = os.wait4(child, os.WNOHANG)
            if done:
                self.processor += used.ru_utime + used.ru_stime
                self.codes.append(os.waitstatus_to_exitcode(status))
                self.children.remove(child)
        over = (self.killed and now > self.killed + _PATIENCE) or now > self.began + self.seconds + 2 * _PATIENCE
        if over and self.children:
            self.stubborn = len(self.children)
            for number in (signal.SIGUSR1, signal.SIGKILL):
                for child in self.children:
                    self._send(child, number)
                time.sleep(0.5)
        return not self.children

    @staticmethod
    def _send(child: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def all_of(runs: Iterable[Run], at_once: int = 6) -> dict[str, Counter[str]]:
    """Make all runs, some at a time; what came of them, by tool and signal."""
    found: dict[str, Counter[str]] = {}
    active: list[Run] = []
    waiting = iter(runs)
    more = True
    while active or more:
        while more and len(active) < at_once:
            run = next(waiting, None)
            more = run is not None
            if run is not None:
                run.begin()
                active.append(run)
        time.sleep(0.01)
        for run in [run for run in active if run.is_over()]:
            active.remove(run)
            ended_by = signal.Signals(run.number).name if run.number else "no signal"
            name = f"{run.tool}, {ended_by}, {run.world} rank{'s' * (run.world > 1)}"
            found.setdefault(name, Counter()).update(checked(run))
    return found


def some(
    tools: Iterable[str], numbers: Iterable[int], count: int, folder: Path, choose: random.Random, world: int = 1
) -> Iterable[Run]:
    """So many runs for each tool and signal, each ended at a random moment of its first two seconds."""
    for number in numbers:
        for repetition in range(count):
            for tool in tools:
                moment = choose.uniform(0.0, 2.0)
                yield Run(tool, number, folder / f"{tool}-{number}-{world}-{repetition}", world, moment)


def checked(run: Run) -> Counter[str]:
    """Count files, those that cannot be read, those that are partial, and runs that lost more than a second."""
    folder = run.folder
    found: Counter[str] = Counter(runs=1)
    found["not ended by the signal"] += run.stubborn
    found["ended before the signal"] += bool(run.number) and not run.killed
    if run.number == signal.SIGTERM:
        found["other exit code"] += sum(code != -signal.SIGTERM for code in run.codes)
    elif run.number == 0:
        found["failed"] += sum(code != 0 for code in run.codes)
    last = -1  # number of the last call that is on disk
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        found["files"] += 1
        found["partial"] += ".partial" in path.name
        if path.suffix == ".sqlite":
            number = _last_recorded(path)
            found["unreadable"] += number is None
            last = max(last, number or -1)
        elif path.suffix == trace_format.SUFFIX:
            try:
                steps = trace_format.read(path, partial=run.number == signal.SIGKILL or run.trouble is not None)[
                    "operators"
                ]["step"]
                last = max(last, _first_call_after(folder, int(steps.max())) if len(steps) else -1)
            except SettingsError:
                found["unreadable"] += 1
        elif path.suffix == ".csv":
            found["CSV files"] += 1
    for capture in captures.find(folder):
        for part in captures.PARTS:
            if captures.has_part(capture / f"{part}.pth"):
                found["captures"] += 1
                try:
                    content = captures.read(capture / f"{part}.pth")
                except ArchiveError:
                    found["unreadable"] += 1
                else:
                    if run.tool == "OpCapture" and isinstance(content.get("id"), int):
                        last = max(last, content["id"])
    if run.killed and run.tool in _RECORDING:
        lost, alone = _lost(folder, last, run.killed, run.processor)
        found["lost more than a second"] += lost > MAX_LOST
        found["lost more than a second of free cores"] += alone > MAX_LOST
        found["milliseconds lost"] += round(lost * 1e3)
        LOST.setdefault(run.tool, []).append(lost)
        found["milliseconds of free cores lost"] += round(alone * 1e3)
        if lost > MAX_LOST:
            print(f"{folder.name}: {lost:.2f} s lost ({alone:.2f} s of free cores)", file=sys.stderr, flush=True)
        if run.tool == "OpTimeMeasure" and run.number != signal.SIGKILL:
            found["without a CSV file"] += not found["CSV files"]
    bad = [key for key in BAD if found[key]]
    if bad:
        print(f"{folder.name}: {bad} {run.codes} {_end_of(Path(f'{folder}.log0'))}", file=sys.stderr, flush=True)
    return found


BAD: Final = (
    *("unreadable", "partial", "lost more than a second", "not ended by the signal", "other exit code"),
    *("failed", "without a CSV file", "ended before the signal", "other losses"),
)
_RECORDING: Final = ("OpObserve", "OpTimeMeasure", "OpCapture", "OpTrace", "OpFallback", "OpDtypeCast", "OpAutoCompare")


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " / ".join(lines[-2 if "Thread" not in str(lines) else -60 :])[-3000:]


def _last_recorded(path: Path) -> int | None:
    """The highest number of a call in a records file; None if the file is damaged."""
    last = -1
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            if connection.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
                return None
            for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                names = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
                if "call_id" in names:
                    row: Any = connection.execute(f"SELECT max(call_id) FROM {table}").fetchone()
                    last = max(last, -1 if row[0] is None else int(row[0]))
    except sqlite3.Error:
        return None
    return last


def _steps(folder: Path) -> list[tuple[int, float, float]]:
    notes = Path(f"{folder}.steps0")
    lines = notes.read_text().splitlines() if notes.exists() else []
    pairs = [line.split() for line in lines]
    return [(int(pair[0]), float(pair[1]), float(pair[2])) for pair in pairs if len(pair) == 3]


def _first_call_after(folder: Path, step: int) -> int:
    steps = _steps(folder)
    return steps[min(step, len(steps) - 1)][0] if steps else -1


def _lost(folder: Path, last: int, killed: float, processor: float) -> tuple[float, float]:
    """Seconds before the kill whose steps are not on disk, from the end of the first that is missing.

    The second number is what they would have been on free cores: processor time of all threads, and the pauses between
    steps. On a machine with other work a process waits for the processor most of the time.
    """
    before, steps = 0, _steps(folder)
    for position, (number, at, used) in enumerate(steps):
        if at < killed and last < before:
            return killed - at, max(0.0, processor - used) + _STEP * (len(steps) - position)
        before = number
    return 0.0, 0.0


# --- what can go wrong around a run that ends by itself --------------------------------------------------------


def full_disk(folder: Path) -> None:
    """As a quota, or a full disk: no file grows beyond 64 KiB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def no_permission(folder: Path) -> None:
    """From the first step on nothing can be made in the folder: it is another user's."""
    folder.chmod(0o700)
    os.seteuid(65534)


def read_only(folder: Path) -> None:
    """Opening a file to write is the error of a file system that is mounted read-only."""
    opened, opened_file = os.open, builtins.open

    def check(path: Any, writes: bool) -> None:
        if writes and str(path).startswith((str(folder), "/proc/self/fd")):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def refused(path: Any, flags: int, *more: Any, **options: Any) -> int:
        check(path, bool(flags & (os.O_WRONLY | os.O_RDWR)))
        return opened(path, flags, *more, **options)

    def refused_file(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        check(path, bool(set(mode) & set("wax+")))
        return opened_file(path, mode, *more, **options)

    os.open, builtins.open = refused, refused_file  # type: ignore[assignment]


def slow_disk(folder: Path) -> None:
    """Making a file takes 50 ms."""
    opened = os.open

    def slow(*given: Any, **options: Any) -> int:
        time.sleep(0.05)
        return opened(*given, **options)

    os.open = slow


def jumping_clock(folder: Path) -> None:
    """The time of day goes forth and back by days."""
    real = time.time
    time.time = lambda: real() + random.choice((-86400.0, 0.0, 86400.0))


def few_files(folder: Path) -> None:
    """Hardly any file can be opened any more."""
    limit = len(os.listdir("/proc/self/fd")) + 4
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def little_memory(folder: Path) -> None:
    """The host has 300 MB more, and no more."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (300 << 20),) * 2)


def little_device_memory(folder: Path) -> None:
    """The device has 16 KiB more, which is what the training needs."""
    torch.cuda.synchronize()
    torch.get_device_module("soft").set_memory_limit(torch.cuda.memory_allocated() + (16 << 10))


def failing_hooks(folder: Path) -> None:
    """Everything that a tool does around a call raises an error."""

    def fail(*given: Any, **options: Any) -> Any:
        raise ValueError("this hook always fails")

    for tool in (getattr(op_tools, name) for name in TOOLS):
        for owner in tool.__mro__[: tool.__mro__.index(Hooks)]:
            for hook in vars(owner).keys() & vars(Hooks).keys() - {"failed", "name", "transform"}:
                if callable(vars(owner)[hook]):
                    setattr(owner, hook, fail)


_FILES: Final = (full_disk, no_permission, read_only, slow_disk, few_files)
TROUBLES: Final = (*_FILES, jumping_clock, little_memory, little_device_memory, failing_hooks)


def troubled(tools: Iterable[str], folder: Path) -> dict[str, Counter[str]]:
    """Runs of a second under each tool in each trouble: they end by themselves, and compute what they would have."""
    found: dict[str, Counter[str]] = {}
    for trouble in TROUBLES:
        runs = [Run(tool, 0, folder / f"{tool}-{trouble.__name__}", 1, 0.0, 1.0, trouble) for tool in tools]
        for name, counts in all_of(iter(runs)).items():
            found.setdefault(f"{trouble.__name__.replace('_', ' ')}, {name.partition(',')[0]}", Counter()).update(
                counts
            )
        losses = [_losses(run.folder) for run in runs if run.tool != "OpDtypeCast"]
        for run, mine in zip((run for run in runs if run.tool != "OpDtypeCast"), losses):
            longest = max(losses, key=len)
            found[f"{trouble.__name__.replace('_', ' ')}, {run.tool}"]["other losses"] += mine != longest[: len(mine)]
    return found


def _losses(folder: Path) -> list[float]:
    file = Path(f"{folder}.losses0")
    return list(json.loads(file.read_text() or "[]")) if file.exists() else []


def main() -> int:
    """Kill some runs and print what was lost; 1 if anything broke or more than a second was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=10, help="runs for each tool and signal")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--signals", default=",".join(number.name for number in SIGNALS))
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side: more than there are cores wait")
    parser.add_argument("--world", type=int, default=1, help="ranks of a run")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    import ditorch  # noqa: F401  # the device, before the processes are forked
    from op_tools.native import front

    front.LIBRARY.wait()
    warm_up()
    numbers = [signal.Signals[name] for name in given.signals.split(",")]
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        runs = some(given.tools.split(","), numbers, given.count, Path(scratch), random.Random(given.seed), given.world)
        found = all_of(runs, given.at_once)
    print(f"seed {given.seed}, load {os.getloadavg()[0]:.0f}")
    for name, counts in found.items():
        print(name + ": " + ", ".join(f"{count:,} {key}" for key, count in counts.items() if count or key in BAD))
    for tool, lost in LOST.items():
        shown = sorted(round(1e3 * seconds) for seconds in lost)
        middle, tenth = shown[len(shown) // 2], shown[len(shown) * 9 // 10]
        print(f"{tool}: lost {middle} ms in the middle, {tenth} at nine of ten, {shown[-1]} at most")
    return int(any(counts[key] for counts in found.values() for key in BAD))


if __name__ == "__main__":
    sys.exit(main())
