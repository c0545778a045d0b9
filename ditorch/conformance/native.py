"""PyTorch's own device-generic test files, run through ditorch in shards that may die, and counted."""

from __future__ import annotations

import csv
import fnmatch
import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditorch.conformance.native_names import DIARY, SELECTION
from ditorch.conformance.slot import PACKAGE_PARENT

MARK = "instantiate_device_type_tests("
SMALLEST_SHARD = 50
COLLECT_SECONDS = 900.0
PASSED, FAILED, SKIPPED, NEVER_RUN = "passed", "failed", "skipped", "never run"


@dataclass(frozen=True)
class TestResult:
    """What became of one test of PyTorch.

    >>> TestResult("test_ops.py", "TestCommonCUDA::test_out_add_cuda_float32", PASSED).outcome
    'passed'
    """

    __test__ = False  # pytest looks for classes called Test…
    file: str
    name: str
    outcome: str
    seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class FileSummary:
    """One test file, counted.

    Example: ``FileSummary.of("test_ops.py", results).passed``
    """

    file: str
    discovered: int
    passed: int
    failed: int
    skipped: int
    never_run: int

    @classmethod
    def of(cls, file: str, results: Sequence[TestResult]) -> FileSummary:
        """Count the tests of a file."""
        counts = [sum(r.outcome == o for r in results) for o in (PASSED, FAILED, SKIPPED, NEVER_RUN)]
        return cls(file, len(results), *counts)


def find_files(source: Path, pattern: str | None = None) -> list[Path]:
    """The device-generic test files of a PyTorch checkout; ValueError where it is none.

    Example: ``find_files(Path("~/pytorch").expanduser(), "test_ops.py,test_torch.py")``
    """
    folder = source / "test"
    if not folder.is_dir():
        raise ValueError(f"--pytorch-src {source}: there is no folder {folder}; expected a checkout of PyTorch")
    found = [f for f in sorted(folder.glob("**/test_*.py")) if MARK in f.read_text(encoding="utf-8", errors="replace")]
    if pattern:
        wanted = [part.strip() for part in pattern.split(",") if part.strip()]
        found = [f for f in found if any(fnmatch.fnmatch(str(f.relative_to(folder)), part) for part in wanted)]
    if not found:
        which = f" that {pattern} matches" if pattern else ""
        raise ValueError(f"--pytorch-src {source}: no device-generic test file{which} in {folder}")
    return found


class NativeRun:
    """Runs test files, each in shards; a test that takes its process down costs that test.

    Example: ``NativeRun(Path("pytorch"), "soft", Path("out"), jobs=4).run(files)``
    """

    def __init__(self, source: Path, backend: str, folder: Path, jobs: int = 1, timeout: float = 300.0) -> None:
        for package in ("pytest", "expecttest"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"PyTorch's test files need {package}: pip install 'ditorch[test]'")
        self.source, self.backend, self.folder = source.resolve(), backend, folder.resolve() / "native"
        self.jobs, self.timeout = jobs, timeout
        self.device_name = ""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    def discover(self, file: Path) -> list[str]:
        """Names of all tests in a file (`run.discover(path)[0] == "TestOpsCUDA::test_add"`)."""
        shard = _Shard(self, file, "collect", None)
        shard.start("--collect-only")
        shard.wait(COLLECT_SECONDS)
        diary = list(shard.diary())
        names = [entry["found"] for entry in diary if "found" in entry]
        self.device_name = next((entry["device_name"] for entry in diary if "device_name" in entry), self.device_name)
        if not names and shard.process.returncode != 5:  # 5: there is no test in it
            raise RuntimeError(f"{file} could not be collected:\n{shard.written()}")
        return names

    def run(self, file: Path, seen: Callable[[TestResult], None] = lambda result: None) -> list[TestResult]:
        """Every test of a file; those without a result are `never run`."""
        label = str(file.relative_to(self.source / "test"))
        names = self.discover(file)
        size = max(SMALLEST_SHARD, math.ceil(len(names) / self.jobs))
        todo: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        for start in range(0, len(names), size):
            todo.put(names[start : start + size])
        results: dict[str, TestResult] = {}
        lock = threading.Lock()

        def keep(result: TestResult) -> None:
            with lock:
                results[result.name] = result
                seen(result)

        def serve(number: int) -> None:
            turn = 0
            while not self._stopped.is_set():
                try:
                    left = todo.get_nowait()
                except queue.Empty:
                    return
                while left and not self._stopped.is_set():
                    turn += 1
                    left = self._shard(file, label, f"{file.stem}-{number}-{turn}", left, keep)

        threads = [threading.Thread(target=serve, args=(n,), daemon=True) for n in range(self.jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except BaseException:
            self.stop()
            raise
        return [results.get(name, TestResult(label, name, NEVER_RUN)) for name in names]

    def stop(self) -> None:
        """End all processes."""
        self._stopped.set()
        for process in list(self._running):
            _kill(process)

    def _shard(
        self, file: Path, label: str, tag: str, names: list[str], keep: Callable[[TestResult], None]
    ) -> list[str]:
        """Run some tests in one process; what is left to do after it was lost."""
        shard = _Shard(self, file, tag, names)
        shard.start()
        hung = shard.watch(self.timeout)
        finished = shard.results(label)
        for result in finished.values():
            keep(result)
        left = [name for name in names if name not in finished]
        current = shard.current()
        if current is None or current in finished:
            return []  # the process ended by itself: what it left out it does not run
        why = f"took longer than {self.timeout:g} s" if hung else f"the process ended: {shard.how_it_ended()}"
        if not self._stopped.is_set():
            keep(TestResult(label, current, FAILED, message=f"{why}\n{shard.written()}"))
        return [name for name in left if name != current]


class _Shard:
    """One pytest process, its diary and its XML."""

    def __init__(self, run: NativeRun, file: Path, tag: str, names: list[str] | None) -> None:
        self.run, self.file = run, file
        base = run.folder / (tag if names is not None else f"{file.stem}-{tag}")
        self.xml, self._diary, self.log = base.with_suffix(".xml"), base.with_suffix(".diary"), base.with_suffix(".log")
        for path in (self.xml, self._diary):
            path.unlink(missing_ok=True)
        self._diary.touch()
        self.environment = {
            **os.environ,
            "DITORCH_DEVICE": run.backend,
            "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cuda",  # which ditorch makes this machine's device
            "OMP_NUM_THREADS": "1",
            DIARY: str(self._diary),
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), PACKAGE_PARENT]),
        }
        if names is not None:
            selection = base.with_suffix(".txt")
            selection.write_text("\n".join(names) + "\n")
            self.environment[SELECTION] = str(selection)

    def start(self, *options: str) -> None:
        command = [sys.executable, "-m", "pytest", "-p", "ditorch.conformance.native_plugin", "-p", "no:cacheprovider"]
        command += ["-q", f"--junitxml={self.xml}", "-o", "junit_family=xunit2", "-p", "no:timeout", *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.file)],
                cwd=self.run.source / "test",
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.run._running.add(self.process)

    def wait(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill(self.process)
        finally:
            self.run._running.discard(self.process)

    def watch(self, seconds: float) -> bool:
        """Wait for the end; True where one test took too long and the process was ended for it."""
        size, since = -1, time.monotonic()
        try:
            while self.process.poll() is None:
                now = self._diary.stat().st_size
                if now != size:
                    size, since = now, time.monotonic()
                limit = seconds if size > 0 else COLLECT_SECONDS
                if time.monotonic() - since > limit:
                    _kill(self.process)
                    return True
                time.sleep(0.05)
            return False
        finally:
            self.run._running.discard(self.process)

    def diary(self) -> Iterator[dict[str, Any]]:
        for line in self._diary.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # cut off by the end of the process
                return

    def results(self, label: str) -> dict[str, TestResult]:
        """From the XML, which pytest writes at the end; from the diary where there was no end."""
        if self.xml.exists():
            try:
                return {result.name: result for result in read_xml(self.xml, label)}
            except ElementTree.ParseError:
                pass
        found: dict[str, TestResult] = {}
        for entry in self.diary():
            if "ended" in entry and found.get(entry["ended"], TestResult("", "", PASSED)).outcome != FAILED:
                name = entry["ended"]
                found[name] = TestResult(label, name, entry["outcome"], entry["seconds"], entry["message"])
        return found

    def current(self) -> str | None:
        """The test that was started last."""
        started = [entry["started"] for entry in self.diary() if "started" in entry]
        return started[-1] if started else None

    def how_it_ended(self) -> str:
        code = self.process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"

    def written(self) -> str:
        text = self.log.read_bytes()[-6000:].decode(errors="replace")
        return "\n".join(text.strip().splitlines()[-25:])


def read_xml(path: Path, label: str) -> list[TestResult]:
    """Test cases of a JUnit XML file, as pytest writes it.

    Example: ``read_xml(Path("test_ops-0-1.xml"), "test_ops.py")``
    """
    found = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome, message = PASSED, ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, message = FAILED, (child.get("message") or "") + "\n" + (child.text or "")[-1500:]
                break
            if child.tag == "skipped":
                outcome, message = SKIPPED, child.get("message") or ""
        owner = (case.get("classname") or "").rpartition(".")[2]
        name = case.get("name") or ""
        stem = Path(label).stem
        full = name if owner in ("", stem) else f"{owner}::{name}"
        found.append(TestResult(label, full, outcome, float(case.get("time") or 0), message.strip()))
    return found


def write_csv(folder: Path, results: Sequence[TestResult]) -> list[FileSummary]:
    """native_files.csv and native_cases.csv (`write_csv(folder, results)`)."""
    by_file: dict[str, list[TestResult]] = {}
    for result in results:
        by_file.setdefault(result.file, []).append(result)
    summaries = [FileSummary.of(file, found) for file, found in sorted(by_file.items())]
    with (folder / "native_files.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["file", "discovered", "passed", "failed", "skipped", "never run"])
        writer.writerows([s.file, s.discovered, s.passed, s.failed, s.skipped, s.never_run] for s in summaries)
    with (folder / "native_cases.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["file", "case", "outcome", "seconds", "message"])
        for r in results:
            writer.writerow([r.file, r.name, r.outcome, f"{r.seconds:.3f}", " ".join(r.message.split())[:500]])
    return summaries


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()
