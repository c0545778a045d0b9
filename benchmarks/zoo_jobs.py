"""Runs the zoo in many processes at once, the longest programs first, and ends by itself.

Each process takes the next program when it is done with one. One that takes too long is stopped and named. When the
time is over the rest is counted as not run. What is said is short: alarms, errors, what was too slow, and the sums.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

Task = tuple[str, str]  # a program, and a precision

# About how long programs take, in those that take 1: measured on soft, float32. A prefix ends in "*".
_WEIGHTS = {
    **dict.fromkeys(("timm_*", "hf_*"), 8.0),
    **dict.fromkeys(("distributions", "compiled_*", "selective_scan", "char_*", "dtw_soft", "crf", "maml"), 6.0),
    **dict.fromkeys(("linalg_more", "shapes", "special", "reductions", "speech_ctc", "wave_net", "translation"), 4.0),
    **dict.fromkeys(("full_transformer", "packed_lstm", "lstm_proj_packed", "seq2seq_attention", "kalman"), 3.0),
    **dict.fromkeys(("fully_sharded*", "sequence_parallel", "unet", "densenet", "vit", "nano_gpt", "min_gpt"), 3.0),
}


class Options(NamedTuple):
    """How the programs are run."""

    steps: int
    channels_last: bool
    tf32: bool


def weight(name: str) -> float:
    """About how long a program takes (`weight("hf_bert") > weight("mnist_mlp")`)."""
    for pattern, value in _WEIGHTS.items():
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return value
    return 1.0


def _work(tasks: Any, results: Any, options: Options) -> None:
    """Train programs one after the other, until none is left."""
    os.environ.update(OP_TOOLS_CONSOLE="off", OP_AUTOCOMPARE_PROCESSES="0")
    os.environ["OP_TOOLS_RESULTS_DIR"] = tempfile.mkdtemp(prefix="zoo-")
    import torch

    from benchmarks import zoo

    torch.set_num_threads(1)
    zoo.prepare(options.tf32)
    what = "begins first"
    while True:
        try:
            name, low = tasks.get_nowait()
        except queue.Empty:
            break
        results.put((os.getpid(), what, (name, low), None))
        what, started = "begins", time.perf_counter()
        found = zoo.watch(name, zoo.Job("cuda", zoo.LOWS[low], options.channels_last), options.steps)
        results.put((os.getpid(), "done", (name, low), (found, time.perf_counter() - started)))
    results.put((os.getpid(), "ends", None, None))


class Crew:
    """Processes that share a list of tasks."""

    def __init__(self, tasks: Sequence[Task], jobs: int, options: Options) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._tasks, self._results = self._context.Queue(), self._context.Queue()
        for task in sorted(tasks, key=lambda t: -weight(t[0])):
            self._tasks.put(task)
        self._options = options
        self._busy: dict[int, tuple[Task, float]] = {}
        self._workers: dict[int, Any] = {}
        for _ in range(min(jobs, len(tasks))):
            self._start()

    def _start(self) -> None:
        worker = self._context.Process(target=_work, args=(self._tasks, self._results, self._options))
        worker.start()
        assert worker.pid is not None
        self._workers[worker.pid] = worker

    def _stop(self, pid: int) -> None:
        worker = self._workers.pop(pid)
        worker.kill()
        worker.join(5)
        self._busy.pop(pid, None)

    def run(self, seconds: float, each: float) -> tuple[dict[Task, Any], dict[Task, str]]:
        """What the programs gave, and what became of those that did not end."""
        until, done, lost = time.monotonic() + seconds, {}, {}
        while self._workers and time.monotonic() < until:
            try:
                pid, what, task, found = self._results.get(timeout=0.5)
            except queue.Empty:
                pid, what, task, found = 0, "", None, None
            if what.startswith("begins"):
                late = 2 * each if "first" in what else 0.0  # it waits for what is imported and built
                self._busy[pid] = task, time.monotonic() + late
            elif what == "done":
                self._busy.pop(pid, None)
                done[task] = found
            elif what == "ends" and pid in self._workers:
                self._workers.pop(pid).join(5)
            for pid, (task, began) in list(self._busy.items()):
                died = pid in self._workers and not self._workers[pid].is_alive()
                if pid in self._workers and (died or time.monotonic() - began > each):
                    lost[task] = "the process died" if died else f"more than {each:.0f} s"
                    self._stop(pid)
                    self._start()
            if not what and all(not worker.is_alive() for worker in self._workers.values()):
                break
        lost.update({task: "the time was over" for task, _ in self._busy.values()})
        for pid in list(self._workers):
            self._stop(pid)
        self._tasks.cancel_join_thread()
        return done, lost


def run(names: Sequence[str], lows: Sequence[str], jobs: int, seconds: float, each: float, options: Options) -> int:
    """Run programs in all precisions, `jobs` at once, and print what is worth reading; 1 where something is wrong."""
    tasks = [(name, low) for name in names for low in lows]
    os.environ.update(OMP_NUM_THREADS="1")  # of the processes
    started = time.monotonic()
    done, lost = Crew(tasks, jobs, options).run(seconds, each)
    total: Counter[str] = Counter()
    by_low: dict[str, Counter[str]] = {low: Counter() for low in lows}
    for (name, low), (found, _) in sorted(done.items()):
        total.update(found.verdicts)
        by_low[low].update(found.verdicts)
        by_low[low]["runs"] += 1
        total["alarms"] += bool(found.wrong)
        total["errors"] += bool(found.error) + len(found.failed)
        if found.wrong or found.error or found.failed:
            wrong = "; ".join(f"{op} {phase} {count}x" for (op, phase, _), count in found.wrong.most_common(4))
            failed = "; ".join(found.failed)
            print(f"{name} {low}: {found.error or wrong or failed}"[:300])
            if found.first:
                print(f"    {found.first}"[:260])
    for task, why in lost.items():
        print(f"{' '.join(task)}: not ended, {why}")
    slowest = sorted(done.items(), key=lambda item: -item[1][1])[:8]
    print("slowest: " + ", ".join(f"{n} {low} {found[1]:.0f} s" for (n, low), found in slowest))
    for low, counts in by_low.items():
        print(f"{low}: {dict(counts)}")
    took = time.monotonic() - started
    missing = len(tasks) - len(done)
    print(f"{len(done)} of {len(tasks)} runs in {took:.0f} s, {missing} not ended or not begun: {dict(total)}")
    return 1 if total["wrong"] or total["errors"] else 0
