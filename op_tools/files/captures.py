"""Finds captures on disk and reads their files, which may be broken, foreign or hostile."""

from __future__ import annotations

import io
import os
import threading
import zipfile
from pathlib import Path
from typing import Any, Final

import torch

from ..call.description import Tensor
from . import archive, plain_archive, stored
from .archive import ArchiveError, Damaged
from .limits import check_memory
from .segments import INDEX

PARTS: Final = ("input", "output", "grad_outputs", "grad_inputs")
_MAX_VALUES: Final = 1_000_000  # in one file; a real call has a few, a foreach call of an optimizer thousands


# Types of arguments that are data, and that PyTorch does not load unless it is told to.
_PLAIN_DATA: Final[list[Any]] = [
    *(slice, range, (Ellipsis, "builtins.Ellipsis")),
    *(kind for kind in vars(torch.return_types).values() if isinstance(kind, type)),
]
_loading: Final = threading.Lock()  # safe_globals changes a list of the whole process and puts the old one back


class CannotReplay(ArchiveError):
    """An intact capture of a call that cannot run alone, such as a collective."""


# --- finding -----------------------------------------------------------------------------------------------


def find(folder: Path) -> list[Path]:
    """All captures under `folder`, whole or not, in order (`find(Path("op_tools_results"))`).

    A capture is a folder, or the path of a call in a store. What OpAutoCompare saves has two sides; `cpu` holds the
    answers to `device`, not a call of its own.
    """
    if folder.is_file() and not stored.is_store(folder.parent):
        return [folder.parent]
    found = set(_in_store(folder))
    for place, _, files in os.walk(folder):
        path = Path(place)
        if INDEX in files:
            found.update(_in_store(path))
        elif any(f"{part}.pth" in files for part in PARTS) and (path == folder or not is_cpu_side(path)):
            found.add(path)
    return sorted(found, key=lambda path: [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in path.parts])


def _in_store(folder: Path) -> list[Path]:
    try:
        return stored.calls_below(folder)
    except ArchiveError:  # whoever reads it says what is wrong
        return [folder]


def exists(path: Path) -> bool:
    """Whether there is such a file or folder, on disk or in a store (`exists(Path("run.store/torch.add"))`)."""
    return path.exists() or bool(_in_store(path)) or has_part(path)


def has_part(path: Path) -> bool:
    """Whether a part of a capture was saved (`has_part(folder / "grad_outputs.pth")`)."""
    if path.exists():
        return True
    call = stored.call_at(path.parent)
    return call is not None and path.suffix == ".pth" and path.stem in call[1].lines


def nbytes_of(folder: Path) -> int:
    """How large a capture is, 0 where that is unknown (`nbytes_of(folder)`)."""
    try:
        call = stored.call_at(folder)
        if call is not None:
            return call[1].nbytes
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".pth"))
    except (OSError, ArchiveError):
        return 0


def is_cpu_side(folder: Path) -> bool:
    """Whether a folder holds the CPU's side of a comparison (`is_cpu_side(folder)`)."""
    return folder.name == "cpu" and (folder.parent / "device").is_dir()


# --- reading ----------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """Read one file of a capture; a file that is damaged or not a capture raises ArchiveError.

    >>> read(Path("capture/input.pth"))["name"]  # doctest: +SKIP
    'torch.add'
    """
    try:
        payload = encoded(path)
        _check_format(payload)
        decoded = {key: archive.decode(value) for key, value in payload.items()}
        return {**decoded, "as_tuples": _kinds_lost(payload)}
    except ArchiveError as error:
        problem = str(error)
    except MemoryError:
        problem = "asks for more memory than there is"
    except Exception as error:
        problem = f"cannot be read as a capture ({one_line(error)})"
    raise ArchiveError(f"{path}: {problem}")


def encoded(path: Path) -> Any:
    """What is in one file of a capture, as it was written (`encoded(Path("capture/input.pth"))["name"]`)."""
    if not path.is_file():  # opening a pipe would block
        call = None if path.exists() else stored.call_at(path.parent)
        if call is None or path.stem not in call[1].lines:
            raise ArchiveError("is not a regular file" if path.exists() else "is missing")
        payload = call[0].payload(call[1], path.stem)
        return _by_torch(payload, len(payload.getbuffer())) if isinstance(payload, io.BytesIO) else payload
    payload = plain_archive.load(path)
    if payload is None:  # the plain form never claims more than its size
        payload = _by_torch(path, path.stat().st_size)
        if _is_of_ditorch(payload):
            payload = _converted(payload, path.stem)
    return payload


def _by_torch(file: Path | io.BytesIO, size: int) -> Any:
    _check_records(file, size)
    if isinstance(file, io.BytesIO):
        file.seek(0)
    with _loading, torch.serialization.safe_globals(_PLAIN_DATA):
        payload = torch.load(file, map_location="cpu", weights_only=True)
    _check_tree(payload, size)
    return payload


def _check_records(path: Path | io.BytesIO, size: int) -> None:
    """Captures are stored, not compressed: a file that unpacks to more than its size is not a capture."""
    try:
        with zipfile.ZipFile(path) as records:
            entries = records.infolist()
            packed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
            if packed or sum(entry.file_size for entry in entries) > size:
                raise ArchiveError("is not an op_tools capture (its records unpack to more than the file holds)")
            check_memory(size)
            for entry in entries:
                _check_record(records, entry)
    except ArchiveError:
        raise
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ArchiveError(f"cannot be read as a capture (broken, cut off, or of another program: {error})") from None


def _check_record(records: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Compare a record with its checksum; 0 is what earlier versions, and PyTorch if told so, write instead of one."""
    if not entry.CRC:
        return
    try:
        with records.open(entry) as content:
            while content.read(1 << 20):
                pass
    except zipfile.BadZipFile as error:
        if "CRC" not in str(error):
            raise
        raise Damaged(f"is damaged: the checksum of {entry.filename} does not fit its content") from None


def _check_format(payload: Any) -> None:
    if not isinstance(payload, dict) or "format" not in payload:
        raise ArchiveError("is not an op_tools capture (no format field)")
    if payload["format"] != archive.FORMAT:
        raise ArchiveError(f"was written in format {payload['format']!r}, this version reads {archive.FORMAT}")


def _is_of_ditorch(payload: Any) -> bool:
    """Whether a file was written by the op_tools of ditorch 2024; in it, each part is the arguments of a call."""
    if not isinstance(payload, dict) or not {"name", "args", "kwargs", "identifier"} <= payload.keys():
        return False
    args, kwargs = payload["args"], payload["kwargs"]
    return "format" not in payload and isinstance(args, tuple) and isinstance(kwargs, (dict, type(None)))


def _converted(payload: dict[str, Any], part: str) -> dict[str, Any]:
    args, kwargs = payload["args"], payload["kwargs"] or {}
    if part == "input" and not kwargs and [type(a) for a in args] == [tuple, dict]:
        args, kwargs = args  # its first version saved a pair
    content = {"args": args, "kwargs": kwargs}
    if part != "input":
        content = {"result": args[0]} if part == "output" and args else {part: args}
    encoded = {key: archive.encode(value) for key, value in content.items()}
    return {"format": archive.FORMAT, "name": payload["name"], "of_ditorch": True, **encoded}


def _check_tree(payload: Any, size: int) -> None:
    """References make small files with endless trees, and with tensors larger than the file."""
    waiting, seen = [payload], 0
    storages: dict[int, int] = {}  # their sizes
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > _MAX_VALUES:
            raise ArchiveError(f"holds more than {_MAX_VALUES:,} values: no operator takes that many")
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    claimed = sum(storages.values())
    if claimed > size:
        raise ArchiveError(f"claims {claimed / 2**30:,.1f} GiB of tensors in a file of {size:,} bytes")


def _kinds_lost(payload: Any) -> list[str]:
    """Types of arguments that come back as plain tuples: to construct them would run their code."""
    if isinstance(payload, (list, tuple)):
        return [kind for member in payload for kind in _kinds_lost(member)]
    if not isinstance(payload, dict):
        return []
    found = [kind for member in payload.values() for kind in _kinds_lost(member)]
    kind = str(payload.get("type", ""))
    if payload.get("__op_tools__") == "group" and not kind.startswith(("torch.return_types.", "collections.")):
        found.append(kind)
    return found


def one_line(error: BaseException) -> str:
    """An error as one line (`one_line(ValueError("x"))`)."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
