"""Many runs of the zoo in a bounded time: the order, the file of results, what did not end."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import zoo_jobs
from benchmarks.zoo import Outcome
from benchmarks.zoo_jobs import Book, Crew, Options, Task

LOWS = ["float32", "bfloat16", "float16"]


def outcome(right: int = 3, error: str = "") -> Outcome:
    return Outcome(Counter(right=right), Counter(), (), Counter(), Counter(), "", error)


def test_every_program_comes_once_before_any_comes_again() -> None:
    turns = zoo_jobs.rounds(["hf_bert", "vgg", "maml"], LOWS, images=["vgg"])
    assert [len(tasks) for tasks in turns] == [3, 3, 3, 1, 1]
    assert [task.name for task in turns[0]] == ["hf_bert", "maml", "vgg"], "the longest first"
    assert len({task.low for task in turns[0]}) == 3, "precisions are dealt out"
    tasks = [task for tasks in turns for task in tasks]
    assert len({(task.name, task.low, task.channels_last) for task in tasks}) == 11
    assert {task.threads for task in tasks} == {1, 2}
    assert {task.low for task in tasks if task.channels_last} == {"float32", "bfloat16"}


class Fake:
    """A process that is a thread: programs called "slow" never end, those called "dies" take it with them."""

    started = 0

    def __init__(self, options: Options) -> None:
        self.pipe, self._theirs = multiprocessing.Pipe()
        self.task: Task | None = None
        self.fresh, self.until = True, time.monotonic() + 60
        Fake.started += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        self._theirs.send(None)
        while True:
            try:
                name = self._theirs.recv().name
            except (EOFError, OSError):
                return
            if name == "slow":
                return
            if name == "dies":
                self._theirs.close()
                return
            self._theirs.send((outcome(error="boom" if name == "breaks" else ""), 0.01))

    def begins(self, task: Task | None, seconds: float) -> None:
        self.task, self.until = task, time.monotonic() + seconds
        self.pipe.send(task)

    def end(self) -> None:
        self.pipe.close()


def work(monkeypatch: pytest.MonkeyPatch, names: list[str], path: Path) -> Book:
    monkeypatch.setattr(zoo_jobs, "_Worker", Fake)
    monkeypatch.setattr(Fake, "started", 0)
    options, book = Options(each=0.3, first=0.0), Book(str(path))
    fakes: list[Any] = [Fake(options), Fake(options)]
    Crew(zoo_jobs.rounds(names, ["float32"]), options, book).run(fakes, time.monotonic() + 20)
    return book


def test_what_does_not_end_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "zoo.jsonl"
    book = work(monkeypatch, ["slow", "dies", "breaks", *"abcdef"], path)
    assert {task.name for task in Book(str(path)).done} == {"breaks", *"abcdef"}
    lost = {row["name"]: row["lost"] for row in zoo_jobs.read(str(path)) if "lost" in row}
    assert lost == {"slow": "more than 0 s", "dies": "the process died"}
    lines, fine = zoo_jobs.summary(book.rows, [Task("never", "float32")])
    assert not fine, "a program had an error"
    assert any("boom" in line for line in lines)
    assert any("slow float32: not ended" in line for line in lines)
    assert any("without any result: never" in line for line in lines)
    assert "7 of 1 runs of 7 programs ended, 2 did not: {'right': 21" in lines[-1]


def test_a_second_call_goes_on_where_the_file_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "zoo.jsonl"
    work(monkeypatch, ["a", "b"], path)
    path.write_text(path.read_text() + '{"name": "c", "lo')  # cut off
    assert len(zoo_jobs.read(str(path))) == 2
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")
    book = work(monkeypatch, ["a", "b", "c"], path)
    assert [row["name"] for row in book.rows[2:]] == ["c"]
    assert zoo_jobs.summary(book.rows)[1]


def test_towards_the_end_only_what_fits_is_begun(tmp_path: Path) -> None:
    book = Book("")
    for name, seconds in (("long", 50.0), ("short", 2.0)):
        book.add(Task(name, "float16"), outcome(), seconds, first=False)
    crew = Crew(zoo_jobs.rounds(["long", "short"], ["float32"]), Options(), book)
    assert crew._next(20.0) == Task("short", "float32", threads=2)
    assert crew._next(20.0) is None
    assert crew._next(80.0) == Task("long", "float32")
