"""Runs the zoo in many processes at once and ends by itself; what is known so far is in a file at any time.

Every program comes once before any comes again: precisions (and channels_last, for images) are dealt out over the
programs in rounds, the longest programs first. Each process imports PyTorch once, and takes the next run when it is
done with one. A run that takes too long is ended and named. Towards the end only runs that still fit are begun.

    python -m benchmarks.zoo --jobs 8 --minutes 8 --results zoo.jsonl     # again: goes on where the file ends
    python -m benchmarks.zoo --summary zoo.jsonl
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

# About how long programs take, in those that take 1: measured on soft, float32. A prefix ends in "*".
_WEIGHTS = {
    **dict.fromkeys(("char_*", "seq2seq_attention"), 24.0),
    **dict.fromkeys(("hf_mamba", "timm_*"), 18.0),
    **dict.fromkeys(("hf_gpt2", "hf_t5", "hf_deberta", "translation", "compiled_*"), 12.0),
    **dict.fromkeys(("hf_*", "depthwise", "simclr"), 8.0),
    **dict.fromkeys(("fully_sharded*", "checkpointed*", "dpo", "packed_lstm", "vit", "bert_mlm", "resnet"), 7.0),
    **dict.fromkeys(("neural_ode", "kalman", "selective_scan", "moco_queue", "densenet", "byol", "barlow_twins"), 6.0),
    **dict.fromkeys(("distributions", "dtw_soft", "crf", "maml", "min_gpt", "nano_gpt", "shared_layers"), 5.0),
    **dict.fromkeys(("linalg_more", "shapes", "special", "reductions", "speech_ctc", "wave_net", "llama"), 4.0),
    **dict.fromkeys(("full_transformer", "lstm_proj_packed", "sequence_parallel", "unet", "convnext"), 3.0),
}


class Options(NamedTuple):
    """How all runs are made."""

    steps: int = 2
    tf32: bool = False
    each: float = 60.0  # seconds for one run
    first: float = 90.0  # seconds more for the first run of a process: it loads libraries, and may build one


class Task(NamedTuple):
    """One run: a program, and how it is run."""

    name: str
    low: str
    channels_last: bool = False
    threads: int = 1

    def __str__(self) -> str:
        more = ["channels_last"] * self.channels_last + [f"{self.threads} threads"] * (self.threads > 1)
        return " ".join((self.name, self.low, *more))


def weight(name: str) -> float:
    """About how long a program takes (`weight("hf_bert") > weight("mnist_mlp")`)."""
    for pattern, value in _WEIGHTS.items():
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return value
    return 1.0


def rounds(names: Sequence[str], lows: Sequence[str], images: Iterable[str] = ()) -> list[list[Task]]:
    """Every program once in each round, the longest first; in the end in all precisions, images in channels_last too.

    >>> [[str(task) for task in tasks] for tasks in rounds(["a", "b"], ["float32", "bfloat16"])]
    [['a float32', 'b bfloat16 2 threads'], ['a bfloat16 2 threads', 'b float32']]
    """
    with_images, dealt = set(images), []
    for place, name in enumerate(sorted(names, key=lambda n: -weight(n))):
        ways = [(low, False) for low in lows]
        if name in with_images:
            ways += [(low, True) for low in lows if low != "float16" or len(lows) == 1]
        shift = place % len(ways)
        ways = ways[shift:] + ways[:shift]
        dealt.append([Task(name, low, last, 1 + (place + turn) % 2) for turn, (low, last) in enumerate(ways)])
    return [[way[turn] for way in dealt if turn < len(way)] for turn in range(max(map(len, dealt), default=0))]


def _work(pipe: Any, options: Options) -> None:
    """Train the programs that come through the pipe."""
    os.environ.update(OP_TOOLS_CONSOLE="off", OP_AUTOCOMPARE_PROCESSES="0")
    results = os.environ["OP_TOOLS_RESULTS_DIR"] = tempfile.mkdtemp(prefix="zoo-")
    import torch
    import torch._dynamo  # what the first optimizer imports: seconds that are no program's

    import op_tools  # noqa: F401
    from benchmarks import zoo
    from benchmarks.programs import Job

    zoo.prepare(options.tf32)
    pipe.send(None)  # ready
    while True:
        task = pipe.recv()
        if task is None:
            return
        torch.set_num_threads(task.threads)
        started = time.perf_counter()
        job = Job("cuda", zoo.LOWS[task.low], task.channels_last)
        found = zoo.watch(task.name, job, options.steps)
        pipe.send((found, time.perf_counter() - started))
        shutil.rmtree(results, ignore_errors=True)


class _Worker:
    """One process, and what it is doing."""

    def __init__(self, options: Options) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, options), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.fresh = True  # its first run loads libraries as well
        self.begins(None, options.each + options.first)  # it imports

    def begins(self, task: Task | None, seconds: float) -> None:
        self.task, self.until = task, time.monotonic() + seconds
        if task is not None:
            self.pipe.send(task)

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


class Crew:
    """Processes that share rounds of tasks. Each has a pipe of its own: ending one leaves no lock behind."""

    def __init__(self, turns: Sequence[Sequence[Task]], options: Options, book: Book) -> None:
        self._turns = [[task for task in tasks if task not in book.done] for tasks in turns]
        self._options, self._book = options, book
        self._too_long: set[str] = set()  # programs of which a run was ended: their others come last
        self._took: dict[str, float] = {}  # seconds of each program, as far as they are known
        for row in book.rows:
            if row.get("seconds") and not row["first"]:
                self._took[row["name"]] = max(row["seconds"], self._took.get(row["name"], 0.0))

    def _next(self, left: float) -> Task | None:
        """The longest task of the earliest round that can be expected to end in time."""
        for tasks in self._turns:
            fits = [task for task in tasks if 1.3 * self._took.get(task.name, 0.0) < left]
            if fits:
                task = max(fits, key=self._order)
                tasks.remove(task)
                return task
        return None

    def _order(self, task: Task) -> tuple[bool, float]:
        return task.name not in self._too_long, self._took.get(task.name, 1000.0 + weight(task.name))

    def run(self, workers: list[_Worker], until: float) -> None:
        """Work until everything is done or the time is over."""
        while workers and time.monotonic() < until:
            ready = connection.wait([worker.pipe for worker in workers], timeout=0.5)
            for worker in list(workers):
                if worker.pipe in ready:
                    self._answer(worker, workers, until)
                elif time.monotonic() > worker.until:
                    self._lose(worker, workers, f"more than {self._options.each:.0f} s")
        for worker in workers:
            if worker.task is not None:
                self._book.lost(worker.task, "the time was over")
            worker.end()

    def _answer(self, worker: _Worker, workers: list[_Worker], until: float) -> None:
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError):
            self._lose(worker, workers, "the process died")
            return
        extra = 0.0
        if answer is None:
            extra = self._options.first
        else:
            found, took = answer
            assert worker.task is not None
            self._book.add(worker.task, found, took, worker.fresh)
            if not worker.fresh:
                self._took[worker.task.name] = max(took, self._took.get(worker.task.name, 0.0))
            worker.fresh = False
            if found.error:  # it may have left a device or a group of processes in a state that others suffer from
                self._replace(worker, workers)
                return
        task = self._next(until - time.monotonic())
        if task is None:
            workers.remove(worker)
            worker.end()
        else:
            worker.begins(task, self._options.each + extra)

    def _lose(self, worker: _Worker, workers: list[_Worker], why: str) -> None:
        if worker.task is None:  # trying again would end the same way
            self._book.say(f"a process did not begin: {why}")
            workers.remove(worker)
            worker.end()
            return
        self._book.lost(worker.task, why)
        self._too_long.add(worker.task.name)
        self._replace(worker, workers)

    def _replace(self, worker: _Worker, workers: list[_Worker]) -> None:
        workers.remove(worker)
        worker.end()
        if any(self._turns):
            workers.append(_Worker(self._options))


class Book:
    """The results, one line of JSON each, on disk as soon as they are known."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.rows = read(path) if path else []
        self.done = {_task(row) for row in self.rows if "lost" not in row}

    def _write(self, task: Task, row: dict[str, Any]) -> None:
        row = {**task._asdict(), **row}
        self.rows.append(row)
        if self._path:
            with open(self._path, "a") as file:
                file.write(json.dumps(row) + "\n")

    def add(self, task: Task, found: Any, seconds: float, first: bool) -> None:
        row: dict[str, Any] = {"seconds": round(seconds, 1), "first": first}
        row |= {"verdicts": dict(found.verdicts), "coverage": found.coverage}
        row |= {"wrong": [[*where, count] for where, count in found.wrong.most_common(8)]}
        row |= {"reasons": list(found.reasons), "error": found.error}
        row |= {"skipped": dict(found.skipped.most_common(8)), "failed": dict(found.failed.most_common(8))}
        self._write(task, row)
        if found.wrong or found.error or found.failed:
            self.say("\n".join(describe(self.rows[-1])))

    def lost(self, task: Task, why: str) -> None:
        self._write(task, {"lost": why})

    @staticmethod
    def say(text: str) -> None:
        print(text, flush=True)


def _task(row: dict[str, Any]) -> Task:
    return Task(*(row[field] for field in Task._fields))


def read(path: str) -> list[dict[str, Any]]:
    """The rows of a file of results; a line that was cut off is left out."""
    rows = []
    for line in Path(path).read_text().splitlines() if Path(path).exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def describe(row: dict[str, Any]) -> list[str]:
    """What one run found, in lines."""
    wrong = "; ".join(f"{op} {phase} in {module or '-'} {count}x" for op, phase, module, count in row["wrong"][:4])
    lines = [f"{_task(row)}: {row['error'] or wrong or '; '.join(row['failed'])}"[:300]]
    return lines + [f"    {reason}"[:260] for reason in row["reasons"][:3]]


def summary(rows: Sequence[dict[str, Any]], asked: Sequence[Task] = ()) -> tuple[list[str], bool]:
    """What the runs found, in lines, and whether all is well."""
    ended = {_task(row): row for row in rows if "lost" not in row}
    lost = {_task(row): row["lost"] for row in rows if "lost" in row}
    lost = {task: why for task, why in lost.items() if task not in ended}
    lines, total, ways = [], Counter[str](), dict[str, Counter[str]]()
    for task, row in sorted(ended.items()):
        total.update(row["verdicts"])
        way = ways.setdefault(task.low + " channels_last" * task.channels_last, Counter())
        way.update(row["verdicts"])
        way["runs"] += 1
        total["runs with an alarm"] += bool(row["wrong"])
        total["errors"] += bool(row["error"]) + len(row["failed"])
        if row["wrong"] or row["error"] or row["failed"]:
            lines += describe(row)
    lines += [f"{task}: not ended, {why}" for task, why in sorted(lost.items())]
    slowest = [item for item in ended.items() if not item[1]["first"]]
    slowest = sorted(slowest, key=lambda item: -item[1]["seconds"])[:8]
    lines.append("slowest: " + ", ".join(f"{task.name} {row['seconds']:.0f} s" for task, row in slowest))
    lines += [f"{way}: {dict(counts)}" for way, counts in sorted(ways.items())]
    programs = {task.name for task in ended}
    missing = sorted({task.name for task in asked} - programs)
    if missing:
        lines.append(f"programs without any result: {', '.join(missing)}")
    of = f" of {len(asked)}" if asked else ""
    lines.append(f"{len(ended)}{of} runs of {len(programs)} programs ended, {len(lost)} did not: {dict(total)}")
    return lines, not (total["wrong"] or total["errors"])


class Zoo:
    """Programs in many processes. These start at once, and import PyTorch while the caller does.

    >>> zoo = Zoo(jobs=8, minutes=8.0, options=Options())  # doctest: +SKIP
    >>> zoo.run(["vgg", "resnet"], ["float32"], "zoo.jsonl")  # doctest: +SKIP
    """

    def __init__(self, jobs: int, minutes: float, options: Options) -> None:
        self._options = options
        self._started = time.monotonic()
        self._until = self._started + 60.0 * minutes
        os.environ.update(OMP_NUM_THREADS="1")  # of the processes
        self._workers = [_Worker(options) for _ in range(jobs)]

    def run(self, names: Sequence[str], lows: Sequence[str], path: str) -> int:
        """Run programs in all precisions and print what is worth reading; 1 where something is wrong."""
        from benchmarks import zoo

        turns = rounds(names, lows, [name for name in names if zoo.has_images(name)])
        book, jobs = Book(path), len(self._workers)
        Crew(turns, self._options, book).run(self._workers, self._until)
        lines, fine = summary(book.rows, [task for tasks in turns for task in tasks])
        print("\n".join(lines))
        print(f"{time.monotonic() - self._started:.0f} s with {jobs} processes")
        return 0 if fine else 1
