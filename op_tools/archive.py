"""Captured calls on disk: written whole or not at all, read with `weights_only=True`, nothing in them runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from .opcall import Tensor, children
from .snapshot import Opaque

FORMAT: Final = 1
_TAG: Final = "__op_tools__"
_PARTS: Final = ("input", "output", "grad_inputs", "grad_outputs")


class ArchiveError(ValueError):
    """A captured file cannot be used; the message names the file and the reason."""


def encode(value: Any) -> Any:
    """Arguments as values that `torch.load(weights_only=True)` accepts (`encode((x, slice(1)))`)."""
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str) or isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad) if kind is torch.nn.Parameter else value
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": str(value)}
    if isinstance(value, torch.Size):
        return {_TAG: "size", "value": list(value)}
    if isinstance(value, torch.device):
        return {_TAG: "device", "value": str(value)}
    if isinstance(value, (torch.layout, torch.memory_format)):
        return {_TAG: "constant", "value": str(value)}
    if value is Ellipsis:
        return {_TAG: "ellipsis"}
    if kind is slice:
        return {_TAG: "slice", "value": [encode(v) for v in (value.start, value.stop, value.step)]}
    if kind is range:
        return {_TAG: "range", "value": [value.start, value.stop, value.step]}
    if kind is list:
        return [encode(v) for v in value]
    if kind is tuple:
        return tuple([encode(v) for v in value])
    if isinstance(value, Opaque):
        return {_TAG: "opaque", "type": value.kind, "text": ""}
    if kind is dict and all(isinstance(k, (str, int, bool, float)) for k in value):
        pairs = {k: encode(v) for k, v in value.items()}
        return pairs if _TAG not in pairs else {_TAG: "opaque", "type": "dict", "text": ""}
    return _encode_other(value, kind)


def _encode_other(value: Any, kind: type) -> Any:
    if kind.__module__.split(".")[0] == "torch" and kind.__name__ in ("ReduceOp", "RedOpType"):
        return {_TAG: "opaque", "type": f"{kind.__module__}.{kind.__qualname__}", "text": str(value)}
    if isinstance(value, (bool, int, float, str)):  # subclasses such as enumerations and numpy scalars
        base = next(b for b in (bool, int, float, str) if isinstance(value, b))
        return base(value)
    parts = children(value)
    if parts is not None:
        names, members = parts
        return {
            _TAG: "group",
            "type": f"{kind.__module__}.{kind.__qualname__}",
            "names": None if names is None else list(names),
            "value": [encode(m) for m in members],
        }
    try:
        text = str(value)[:200]
    except Exception:
        text = ""
    return {_TAG: "opaque", "type": f"{kind.__module__}.{kind.__qualname__}", "text": text}


_CONSTANTS: Final[dict[str, Any]] = {
    str(v): v for v in vars(torch).values() if isinstance(v, (torch.dtype, torch.layout, torch.memory_format))
}


class _Unknown(NamedTuple):
    """Stands for an argument whose value was not captured."""

    type: str
    text: str


def decode(value: Any) -> Any:
    """The inverse of `encode`; containers of unknown types become tuples (`decode(encode(x)) == x`)."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if isinstance(value, tuple):
        return tuple([decode(v) for v in value])
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {k: decode(v) for k, v in value.items()}
    if tag in ("dtype", "constant"):
        return _CONSTANTS[value["value"]]
    if tag == "size":
        return torch.Size(value["value"])
    if tag == "device":
        return torch.device(value["value"])
    if tag == "ellipsis":
        return Ellipsis
    if tag == "slice":
        return slice(*(decode(v) for v in value["value"]))
    if tag == "range":
        return range(*value["value"])
    if tag == "group":
        return _decode_group(value)
    if tag == "opaque":
        return _Unknown(str(value.get("type")), str(value.get("text")))
    raise ArchiveError(f"unknown kind of value {tag!r}; it was written by a newer version")


def _decode_group(value: Mapping[str, Any]) -> Any:
    members = [decode(v) for v in value["value"]]
    kind = str(value["type"])
    if kind.startswith("torch.return_types."):
        found = getattr(torch.return_types, kind.rsplit(".", 1)[-1], None)
        if found is not None:
            return found(members)
    if kind.endswith("OrderedDict") or kind.endswith("defaultdict"):
        return dict(zip(value["names"], members))
    return tuple(members)


def unknown_in(value: Any) -> list[str]:
    """Types of arguments whose values were not captured (`unknown_in(args) == []`)."""
    if isinstance(value, _Unknown):
        return [value.type]
    if isinstance(value, Tensor):
        return []
    parts = children(value)
    return [kind for member in (parts[1] if parts else []) for kind in unknown_in(member)]


def save(path: Path, payload: Mapping[str, Any]) -> None:
    """Write one `.pth` file; a reader sees all of it or nothing (`save(folder / "input.pth", {...})`)."""
    partial = path.with_name(f".{path.name}.partial")
    set_crc = getattr(torch.serialization, "set_crc32_options", None)
    crc_was = torch.serialization.get_crc32_options() if set_crc is not None else True
    try:
        if set_crc is not None:
            set_crc(False)  # the checksum of the archive halves the speed of writing
        torch.save({"format": FORMAT, **payload}, partial)
    finally:
        if set_crc is not None:
            set_crc(crc_was)
    os.replace(partial, path)


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the readable twin of a capture (`save_json(folder / "input.json", {...})`)."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1, default=str))
    os.replace(partial, path)


def load(path: Path) -> dict[str, Any]:
    """Read one captured file; nothing in it can run code (`load(folder / "input.pth")["args"]`)."""
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ArchiveError(f"{path}: cannot be read as a capture ({type(error).__name__}: {first})") from None
    if not isinstance(payload, dict) or "format" not in payload:
        raise ArchiveError(f"{path}: is no capture of op_tools (no format field)")
    if payload["format"] != FORMAT:
        raise ArchiveError(f"{path}: was written in format {payload['format']!r}, this version reads {FORMAT}")
    return {key: decode(value) for key, value in payload.items()}


def find(folder: Path) -> list[Path]:
    """All folders under `folder` that hold a capture, in order (`find(Path("op_tools_results"))`)."""
    if folder.is_file():
        return [folder.parent]

    def natural(path: Path) -> list[Any]:
        return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in path.parts]

    return sorted({p.parent for p in folder.rglob("input.pth")}, key=natural)
