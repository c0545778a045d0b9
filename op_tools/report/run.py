"""What a run left behind: the records of its processes, traces, captures and losses, found in a folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import losscmp
from ..settings import SettingsError
from ..trace import format as trace_format
from ..trace.graph import Graph
from .columns import Array, Words
from .records import Records, read_json

_LABEL: Final = re.compile(r"_(\d{4}(?:-\d\d){5})_")
_TOGETHER: Final = 180.0  # seconds between the starts of ranks of one run
_MAX_FILES: Final = 4_096  # records files that are looked at
_MAX_FOLDERS: Final = 20_000


class ReportError(SettingsError):
    """A run that cannot be shown, told in one line."""


class NoRunYet(ReportError):
    """There is no run: the folder is missing, or has neither records nor a trace."""


class Run:
    """A run, read on where it has grown: `Run(Path("op_tools_results")).refresh()`.

    `folder` is what a tool wrote to, the records file of one process, or a trace. Of several runs in one folder the
    newest is shown; `earlier` says how many others there are. `only` is the number of one run of one tool.
    """

    def __init__(self, folder: Path, losses: Sequence[Path] = (), only: int | None = None) -> None:
        if not folder.exists():
            raise NoRunYet(f"{folder}: no such file or folder")
        self.folder = folder
        self.words: dict[str, Words] = {}
        self.processes: list[Records] = []
        self.problems: list[str] = []
        self.earlier = 0
        self.version = 0
        self._known: dict[Path, Records] = {}
        self._only = only
        self._traces: tuple[Any, list[Graph]] = ((), [])
        self._given_losses = list(losses)
        self._losses: tuple[Any, list[losscmp.Curve]] = ((), [])
        self.refresh()
        if not self.processes and not self.graphs and not self.problems:
            raise NoRunYet(f"{folder}: no run in it: neither records (*.sqlite) nor a trace (*{trace_format.SUFFIX})")
        if not self.processes and not self.graphs:
            raise ReportError(self.problems[0])

    # -- reading --------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Read what is new; whether there was anything."""
        changed = self._refresh_records()
        changed = self._refresh_traces() or changed
        changed = self._refresh_losses() or changed
        self.version += changed
        return changed

    def _refresh_records(self) -> bool:
        files = self._record_files()
        changed = False
        for file in files:
            if file not in self._known:
                self._known[file] = Records(file, self.words, self._only)
                changed = True
        for file in files:
            changed = self._known[file].refresh() or changed
        if not changed:
            return False
        sound = [self._known[file] for file in files if not self._known[file].problem]
        self.problems = [self._known[file].problem for file in files if self._known[file].problem]
        self.processes = _newest_run(sound)
        return True

    def _record_files(self) -> list[Path]:
        """The newest file of a folder, and those that its other ranks may have written."""
        if self.folder.is_file():
            return [self.folder] if self.folder.suffix == ".sqlite" else []
        found = {file: _stamp(file) for file in _below(self.folder, ".sqlite")}
        self.earlier = 0
        if not found:
            return []
        newest = max(found, key=lambda file: (found[file], _changed(file)))
        chosen = [newest]
        if "_rank" in newest.name:
            chosen = [f for f, began in found.items() if "_rank" in f.name and found[newest] - began <= _TOGETHER]
        self.earlier = len(found) - len(chosen)
        return sorted(chosen, key=lambda file: (found[file], file.name))[-_MAX_FILES:]

    def _refresh_traces(self) -> bool:
        files = self._trace_files()
        state = tuple((file, _changed(file), _size(file)) for file in files)
        if state == self._traces[0]:
            return False
        graphs = []
        for file in files:
            try:
                graphs.append(Graph(trace_format.read(file, partial=True)))
            except (trace_format.TraceError, OSError) as error:
                self.problems.append(str(error))
        self._traces = (state, graphs)
        return True

    def _trace_files(self) -> list[Path]:
        suffix = trace_format.SUFFIX
        if self.folder.is_file():
            return [self.folder] if self.folder.suffix == suffix else []
        found = list(_below(self.folder, suffix))
        if not found:
            return []
        newest = max(found, key=_changed).parent
        return sorted(file for file in found if file.parent == newest)

    def _refresh_losses(self) -> bool:
        files = self._given_losses
        if not files and self.folder.is_dir() and (self.folder / "metrics.json").is_file():
            files = [self.folder / "metrics.json"]
        state = tuple((file, _changed(file), _size(file)) for file in files)
        if state == self._losses[0]:
            return False
        try:
            curves = [losscmp.read_run(file) for file in files]
            if any(not curve.every_step for curve in curves):
                curves = [losscmp.read_run(file, printed=True) for file in files]
        except (losscmp.LosscmpError, OSError, ValueError, TypeError, KeyError) as error:
            if self._given_losses and not self.version:
                raise ReportError(str(error)) from None
            curves = []
        self._losses = (state, curves)
        return True

    # -- what there is --------------------------------------------------------------------------------

    @property
    def graphs(self) -> list[Graph]:
        """The traces of the run, one per rank."""
        return self._traces[1]

    @property
    def curves(self) -> list[losscmp.Curve]:
        """Losses: of the run, then of those to compare with."""
        return self._losses[1]

    @property
    def ranks(self) -> list[int]:
        """The ranks that left records, or traces."""
        return sorted({p.rank for p in self.processes} or {g.trace.rank for g in self.graphs})

    def small(self, table: str) -> list[dict[str, Any]]:
        """The rows of a small table of all processes, each with its `rank`."""
        return [{**row, "rank": p.rank} for p in self.processes for row in p.small[table]]

    def joined(self, table: str, *columns: str) -> dict[str, Array]:
        """Columns of a growing table of all processes, with `rank`, and `op` and `location` of the site."""
        parts: dict[str, list[Array]] = {name: [] for name in (*columns, "rank", "op", "location")}
        for process in self.processes:
            rows = process.measured if table == "measured" else process.growing[table]
            for name in columns:
                parts[name].append(rows[name])
            parts["rank"].append(np.full(len(rows), process.rank, np.int32))
            for name in ("op", "location"):
                parts[name].append(process.of_site(rows["site"], name))
        return {name: np.concatenate(some) if some else np.empty(0, np.int32) for name, some in parts.items()}

    def count(self, table: str) -> int:
        """How many rows of a growing table there are."""
        return sum(len(process.growing[table]) for process in self.processes)

    def facts(self) -> dict[str, Any]:
        """Command, folder, versions and settings of the first process."""
        found = [read_json(row.get("facts")) for row in self.small("runs")]
        if found:
            return found[0]
        return dict(self.graphs[0].trace.facts) if self.graphs else {}

    def command(self) -> str:
        """The script and its arguments, as far as they are known."""
        command = str(self.facts().get("command") or "")
        return command if command and not command.startswith("-c") else "train.py"

    @property
    def state(self) -> str:
        """`ended`, `running`, `stopped` (its process is gone, and it did not end) or `unknown`."""
        started = {(row["rank"], row.get("run")): row for row in self.small("runs")}
        ended = {(row["rank"], row.get("run")) for row in self.small("ends")}
        if not started:
            return "unknown"
        still = [row for key, row in started.items() if key not in ended]
        if not still:
            return "ended"
        return "running" if any(_is_alive(row.get("pid"), row.get("started")) for row in still) else "stopped"


def _newest_run(found: Sequence[Records]) -> list[Records]:
    """The processes of the run that began last: one for each rank, which began at about the same time."""
    if not found:
        return []
    began = {id(records): _began(records) for records in found}
    last = max(found, key=lambda records: began[id(records)])
    if _world(last) <= 1:
        return [last]
    chosen: dict[int, Records] = {}
    for records in sorted(found, key=lambda r: began[id(r)]):
        if _world(records) == _world(last) and began[id(last)] - began[id(records)] <= _TOGETHER:
            chosen[records.rank] = records
    return [chosen[rank] for rank in sorted(chosen)]


def _began(records: Records) -> float:
    started = [row.get("started") for row in records.small["runs"]]
    known = [float(t) for t in started if isinstance(t, (int, float))]
    return min(known) if known else _changed(records.path)


def _world(records: Records) -> int:
    worlds = [row.get("world") for row in records.small["runs"]]
    known = [w for w in worlds if isinstance(w, int)]
    return max(known) if known else 1 + ("_rank" in records.path.name)


def _stamp(file: Path) -> float:
    """When the process of a records file began, in seconds: as its name says, or when the file was changed."""
    found = _LABEL.search(file.name)
    try:
        return time.mktime(time.strptime(found[1], "%Y-%m-%d-%H-%M-%S")) if found else _changed(file)
    except (ValueError, OverflowError):
        return _changed(file)


def _below(folder: Path, suffix: str) -> list[Path]:
    """Files under a folder, without following links to folders; captures are not looked through."""
    found: list[Path] = []
    for seen, (place, folders, files) in enumerate(os.walk(folder)):
        if seen > _MAX_FOLDERS:
            break
        folders[:] = [name for name in folders if name != "op_capture_results" and not name.startswith(".")]
        found += [Path(place) / name for name in files if name.endswith(suffix)]
    return found


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _is_alive(pid: Any, started: Any) -> bool:
    """Whether a process of this machine has this number and began before the run did."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        born = os.stat(f"/proc/{pid}").st_ctime
        return not isinstance(started, (int, float)) or born <= started + 5.0
    except OSError:
        pass
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return not isinstance(started, (int, float)) or time.time() - started < 30 * 86_400
