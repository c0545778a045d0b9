"""Captured calls on disk: written whole or not at all, read with `weights_only=True`, nothing in them runs."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from .opcall import Tensor, children, tensors_in
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
    if kind.endswith(("OrderedDict", "defaultdict")):
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


class _Storage:
    """Stands for a storage in a pickle: a reference to a record of the archive."""

    __slots__ = ("dtype", "identity")

    def __init__(self, index: int, nbytes: int, dtype: torch.dtype) -> None:
        kind, size = _storage_kinds().get(dtype), dtype.itemsize
        self.dtype: torch.dtype | None
        self.identity: tuple[Any, ...]
        if kind is not None and nbytes % size == 0:
            self.dtype = dtype
            self.identity = ("storage", getattr(torch, kind), str(index), "cpu", nbytes // size)
        else:
            self.dtype = None
            self.identity = ("storage", torch.UntypedStorage, str(index), "cpu", nbytes)


@functools.cache
def _storage_kinds() -> dict[torch.dtype, str]:
    return {d: n for d, n in torch.storage._dtype_to_storage_type_map().items() if hasattr(torch, n)}


class _Pickler(pickle.Pickler):
    """Pickles tensors as `torch.load` expects them, without leaving the C pickler for anything else."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.storages: list[torch.UntypedStorage] = []
        self._known: dict[int, _Storage] = {}
        self._names: OrderedDict[str, Any] = OrderedDict()

    def persistent_id(self, value: Any) -> Any:
        return value.identity if type(value) is _Storage else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        storage = value.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._known[storage._cdata] = _Storage(len(self.storages), storage.nbytes(), value.dtype)
            self.storages.append(storage)
        facts: dict[str, bool] = {}
        if value.is_conj():
            facts["conj"] = True
        if value.is_neg():
            facts["neg"] = True
        geometry = (value.storage_offset(), tuple(value.shape), value.stride())
        extra = (facts,) if facts else ()
        if known.dtype == value.dtype:
            return torch._utils._rebuild_tensor_v2, (known, *geometry, value.requires_grad, self._names, *extra)
        # a storage seen through a second dtype, or a dtype without a storage class of its own
        return torch._utils._rebuild_tensor_v3, (known, *geometry, False, self._names, value.dtype, *extra)


def save(path: Path, payload: Mapping[str, Any]) -> None:
    """Write one `.pth` file; a reader sees all of it or nothing (`save(folder / "input.pth", {...})`).

    The file is what `torch.save` would write. `torch.save` spends so long in the interpreter that the
    training would wait for the writer; this spends its time in the pickler and in writing.
    """
    partial = str(path.with_name(f".{path.name}.partial"))
    content = {"format": FORMAT, **payload}
    if any(t.layout != torch.strided or t.is_quantized for t in tensors_in(content)):
        torch.save(content, partial)
    else:
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(content)
        records: list[tuple[str, Any]] = [("data.pkl", stream.getbuffer()), ("byteorder", _BYTE_ORDER)]
        records += [(f"data/{i}", _buffer_of(s)) for i, s in enumerate(pickler.storages)]
        records += [("version", b"3\n")]
        write_archive(partial, records)
    os.replace(partial, path)


def _buffer_of(storage: torch.UntypedStorage) -> Any:
    if storage.nbytes() == 0:
        return b""
    flat: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memoryview(flat)


_BYTE_ORDER: Final = sys.byteorder.encode()
_LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64: Final = struct.Struct("<4sIQI")
_END: Final = struct.Struct("<4sHHHHIIH")
_EXTRA64: Final = struct.Struct("<HHQQQ")
_MASK: Final = 0xFFFFFFFF


def write_archive(path: str, records: Sequence[tuple[str, Any]]) -> None:
    """Write an uncompressed zip archive in one pass, its records aligned to 64 bytes (`write_archive(p, r)`)."""
    directory = bytearray()
    position = 0
    with open(path, "wb", buffering=0) as handle:
        for name, data in records:
            label = f"archive/{name}".encode()
            size = len(data)
            checksum = zlib.crc32(data) if size < 1 << 16 else 0  # `torch.load` does not look at it
            # the size fields hold 32 bits; larger records have theirs in an extra field of the directory
            shown, start = min(size, _MASK), position
            padding = -(start + _LOCAL.size + len(label) + 4) % 64
            extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
            head = _LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, checksum, shown, shown, len(label), len(extra))
            head = head + label + extra
            _write_all(handle, head if size > 1 << 16 else head + bytes(data))
            if size > 1 << 16:
                _write_all(handle, data)
            position += len(head) + size
            wide = _EXTRA64.pack(1, 24, size, size, start) if size >= _MASK or start >= _MASK else b""
            small = (_MASK, _MASK, _MASK) if wide else (size, size, start)
            directory += _CENTRAL.pack(
                b"PK\1\2", 0, 0, 0, 0, 0, 0, checksum, *small[:2], len(label), len(wide), 0, 0, 0, 0, small[2]
            )
            directory += label + wide
        count, length = len(records), len(directory)
        tail = bytes(directory)
        if position + length >= _MASK:
            tail += _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, position)
            tail += _LOCATOR64.pack(b"PK\6\7", 0, position + length, 1)
        tail += _END.pack(b"PK\5\6", 0, 0, count, count, min(length, _MASK), min(position, _MASK), 0)
        _write_all(handle, tail)


def _write_all(handle: Any, data: Any) -> None:
    view = memoryview(data)
    while len(view):
        view = view[handle.write(view) :]


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the readable twin of a capture (`save_json(folder / "input.json", {...})`)."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, default=str))
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
