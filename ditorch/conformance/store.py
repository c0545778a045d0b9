"""Results on disk: one line of JSON per case, appended as it comes, so that no interruption loses more than a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditorch.conformance.cases import Case, Result

FILE = "results.jsonl"
SAME = ("backend", "device", "torch", "samples")
"""What must not change between an interrupted run and its continuation."""


@dataclass
class Stored:
    """A run as it is on disk: what was run where, and the results so far.

    Example: ``load(Path("conformance_results/soft")).results``
    """

    about: dict[str, Any]
    results: dict[Case, Result] = field(default_factory=dict)


class Store:
    """Appends results to a folder; each is on disk, whole, when `add` returns.

    Example::

        with Store.create(folder, {"backend": "soft"}) as store:
            store.add(result)
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @classmethod
    def create(cls, folder: Path, about: Mapping[str, Any], fresh: bool = False) -> Store:
        """Start a run in a folder that has none; `fresh` replaces one that is there."""
        path = folder / FILE
        if path.exists() and not fresh:
            raise ValueError(
                f"{folder} holds results already: --resume goes on with them, --fresh replaces them, "
                "--out chooses another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        store = cls(path)
        store._append({"about": dict(about)})
        return store

    @classmethod
    def resume(cls, folder: Path, about: Mapping[str, Any]) -> tuple[Store, Stored]:
        """Go on with a run; ValueError where it was another device, version or number of samples."""
        path = folder / FILE
        stored = load(folder)
        differing = [
            f"{key} was {stored.about.get(key)}, is {about.get(key)}"
            for key in SAME
            if stored.about.get(key) != about.get(key)
        ]
        if differing:
            raise ValueError(f"--resume: {folder} is another run: {'; '.join(differing)}")
        _drop_half_a_line(path)
        return cls(path), stored

    def add(self, result: Result) -> None:
        """Write one result (`store.add(result)`)."""
        self._append(result.as_dict())

    def close(self) -> None:
        """No more results."""
        os.close(self._file)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _append(self, data: Mapping[str, Any]) -> None:
        os.write(self._file, (json.dumps(data, ensure_ascii=False, default=str) + "\n").encode())


def load(folder: Path) -> Stored:
    """Read a run; a last line that was cut off is ignored, any other damage is a ValueError.

    Example: ``load(Path("conformance_results/soft"))``
    """
    path = folder / FILE
    if not path.exists():
        raise ValueError(f"{folder} holds no results ({FILE} is missing)")
    text = path.read_bytes().decode(errors="replace")
    lines = text.split("\n")
    whole, rest = lines[:-1], lines[-1]
    del rest  # a line that was being written when the run ended
    if not whole:
        raise ValueError(f"{path} is empty: --fresh starts it again")
    stored = Stored(_parsed(path, 1, whole[0]).get("about", {}))
    for number, line in enumerate(whole[1:], 2):
        try:
            result = Result.from_dict(_parsed(path, number, line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        stored.results[result.case] = result
    return stored


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}:{number}: expected an object, found {type(found).__name__}")
    return found


def _drop_half_a_line(path: Path) -> None:
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        with path.open("rb+") as file:
            file.truncate(end)
