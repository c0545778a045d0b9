"""Captured calls on disk: written whole or not at all, read with `weights_only=True`, nothing in them runs."""

from __future__ import annotations

import functools
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ditorch_common.private import complete

from ..call.description import Tensor, children, map_tensors
from ..compat import storage_class_names
from ..copies.operands import Opaque, Ref
from ..native.checksum import FASTER_FROM, crc32

FORMAT: Final = 1
_TAG: Final = "__op_tools__"


class ArchiveError(ValueError):
    """A captured file cannot be used; the message names the file and the reason."""


class Damaged(ArchiveError):
    """Bytes of a file are not those that were written."""


def check_sum(what: str, content: Any, expected: int) -> None:
    """Raise Damaged unless bytes have the checksum that was written with them (`check_sum("data/0", b"", 0)`)."""
    if (expected or len(content) < _MAX_UNCHECKED) and crc32(content) != expected:
        raise Damaged(f"is damaged: the checksum of {what} does not fit its {len(content):,} bytes")


def encode(value: Any) -> Any:
    """Arguments as values that `torch.load(weights_only=True)` accepts (`encode((x, slice(1)))`)."""
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str) or isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad) if kind is torch.nn.Parameter else value
    if kind is Ref:
        return value
    if kind in _TEXT_TAGS:
        return {_TAG: _TEXT_TAGS[kind], "value": str(value)}
    if isinstance(value, torch.Size):
        return {_TAG: "size", "value": list(value)}
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
    name = f"{kind.__module__}.{kind.__qualname__}"
    for base in (int, float, str):  # subclasses such as enumerations and numpy scalars
        if isinstance(value, base):
            return base(value)
    parts = children(value)
    if parts is not None:
        names, members = parts
        listed = None if names is None else list(names)
        return {_TAG: "group", "type": name, "names": listed, "value": [encode(m) for m in members]}
    try:
        text = str(value)[:200]
    except Exception:
        text = ""
    return {_TAG: "opaque", "type": name, "text": text}


_TEXT_TAGS: Final[dict[type, str]] = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "constant",
    torch.memory_format: "constant",
}
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
    if tag not in _DECODERS:
        raise ArchiveError(f"unknown kind of value {tag!r}; it was written by a newer version")
    return _DECODERS[tag](value)


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


_DECODERS: Final[dict[str, Callable[[Mapping[str, Any]], Any]]] = {
    "dtype": lambda v: _CONSTANTS[v["value"]],
    "constant": lambda v: _CONSTANTS[v["value"]],
    "size": lambda v: torch.Size(v["value"]),
    "device": lambda v: torch.device(v["value"]),
    "ellipsis": lambda v: Ellipsis,
    "slice": lambda v: slice(*decode(v["value"])),
    "range": lambda v: range(*v["value"]),
    "group": _decode_group,
    "opaque": lambda v: _Unknown(str(v.get("type")), str(v.get("text"))),
}


def unknown_in(value: Any) -> list[str]:
    """Types of arguments whose values were not captured (`unknown_in(args) == []`)."""
    if isinstance(value, _Unknown):
        return [value.type]
    if isinstance(value, Tensor):
        return []
    parts = children(value)
    return [kind for member in (parts[1] if parts else []) for kind in unknown_in(member)]


@functools.cache
def storage_kinds() -> dict[torch.dtype, str]:
    """The storage class that a file names for each dtype (`storage_kinds()[torch.float32] == "FloatStorage"`)."""
    return {d: n for d, n in storage_class_names().items() if hasattr(torch, n)}


class NotPlain(Exception):
    """Not of the plain form: `torch.save` writes it; `torch.load` reads it, or says what is wrong with it."""


def fragment(value: Any, sizes: Sequence[int] = ()) -> bytes:
    """The pickle of encoded values without its frame; staged tensors refer to storages of these sizes.

    Nothing in it refers to an earlier part of the pickle, so fragments can be kept and put together.

    >>> fragment([1, None])
    b'](J\\x01\\x00\\x00\\x00Ne'
    """
    out: list[bytes] = []
    _put(value, sizes, {}, out.append)
    return b"".join(out)


def _put(value: Any, sizes: Sequence[int], dtypes: dict[int, torch.dtype], out: Callable[[bytes], None]) -> None:
    kind = type(value)
    if kind is str:
        text = value.encode("utf-8", "surrogatepass")
        out(b"X" + len(text).to_bytes(4, "little") + text)
    elif value is None:
        out(b"N")
    elif kind is bool:
        out(b"\x88" if value else b"\x89")
    elif kind is int:
        if -(1 << 31) <= value < 1 << 31:
            out(b"J" + value.to_bytes(4, "little", signed=True))
        else:
            number = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(number) > 255:
                raise NotPlain
            out(b"\x8a" + bytes([len(number)]) + number)
    elif kind is float:
        out(b"G" + struct.pack(">d", value))
    elif kind is complex:
        real, imaginary = struct.pack(">d", value.real), struct.pack(">d", value.imag)
        out(b"c__builtin__\ncomplex\nG" + real + b"G" + imaginary + b"\x86R")
    elif kind is tuple or kind is list:
        out(b"(" if kind is tuple else b"](")
        for member in value:
            _put(member, sizes, dtypes, out)
        out(b"t" if kind is tuple else b"e")
    elif kind is dict:
        out(b"}(")
        for key, member in value.items():
            _put(key, sizes, dtypes, out)
            _put(member, sizes, dtypes, out)
        out(b"u")
    elif kind is Ref:
        _put_tensor(value, sizes, dtypes, out)
    else:
        raise NotPlain


def _put_tensor(ref: Ref, sizes: Sequence[int], dtypes: dict[int, torch.dtype], out: Callable[[bytes], None]) -> None:
    nbytes, dtype = sizes[ref.storage], ref.dtype
    kind, size = storage_kinds().get(dtypes.setdefault(ref.storage, dtype)), dtypes[ref.storage].itemsize
    typed = kind is not None and nbytes % size == 0
    name, count = (f"torch\n{kind}", nbytes // size) if typed else ("torch.storage\nUntypedStorage", nbytes)
    # a storage seen through a second dtype, or a dtype without a storage class of its own, needs the third form
    plain = typed and dtypes[ref.storage] == dtype
    out(b"ctorch._utils\n_rebuild_tensor_v%d\n((X\x07\0\0\0storagec%s\n" % (2 if plain else 3, name.encode()))
    for part in (str(ref.storage), "cpu", count):
        _put(part, (), dtypes, out)
    out(b"tQ")
    for fact in (ref.offset, ref.shape, ref.stride, ref.requires_grad and plain):
        _put(fact, (), dtypes, out)
    out(b"ccollections\nOrderedDict\n)R")
    if not plain:
        out(b"ctorch\n%s\n" % str(dtype).removeprefix("torch.").encode())
    if ref.conjugated or ref.negated:
        flags = {"conj": ref.conjugated, "neg": ref.negated}
        _put({name: flag for name, flag in flags.items() if flag}, (), dtypes, out)
    out(b"tR")


def save_fragments(path: str, fragments: Iterable[bytes], storages: Iterable[Any]) -> None:
    """Write a `.pth` file of one dict: fragments are keys and values, storages are buffers or return one.

    >>> save_fragments("one.pth", [fragment("x"), fragment(1)], [])  # doctest: +SKIP
    """
    with complete(path) as partial:
        _write_records(partial, b"".join([_FRAME, *fragments, b"u."]), storages)


def _write_records(path: str, pickled: bytes, storages: Iterable[Any]) -> None:
    records: list[tuple[str, Any]] = [("data.pkl", pickled), ("byteorder", _BYTE_ORDER)]
    records += [(f"data/{i}", storage) for i, storage in enumerate(storages)]
    write_archive(path, [*records, ("version", b"3\n")])


def save(path: Path, payload: Mapping[str, Any]) -> None:
    """Write one `.pth` file; a reader sees all of it or nothing (`save(folder / "input.pth", {...})`).

    The file is what `torch.save` would write. `torch.save` holds the GIL so long that it slows the
    training down; this spends its time in system calls.
    """
    content = {"format": FORMAT, **payload}
    storages: dict[int, torch.UntypedStorage] = {}
    numbers: dict[int, int] = {}

    def refer(tensor: Tensor) -> Ref:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise NotPlain
        storage = tensor.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(numbers))
        storages[number] = storage
        return Ref.of(tensor, number)

    with complete(str(path)) as partial:
        try:
            referring = map_tensors(content, refer)
            pickled = fragment(referring, [s.nbytes() for s in storages.values()])
            _write_records(partial, b"\x80\x02" + pickled + b".", [_buffer_of(s) for s in storages.values()])
        except (NotPlain, RecursionError):
            with open(partial, "wb") as file:  # given a name, it would put that into the file
                torch.save(content, file)


def _buffer_of(storage: torch.UntypedStorage) -> Any:
    if storage.nbytes() == 0:
        return b""
    flat: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memoryview(flat)


_FRAME: Final = b"\x80\x02}(" + fragment("format") + fragment(FORMAT)
_BYTE_ORDER: Final = sys.byteorder.encode()
_MAX_UNCHECKED: Final = 1 << 16  # bytes from which earlier versions wrote 0 instead of a checksum
LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
CENTRAL: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64: Final = struct.Struct("<4sIQI")
END: Final = struct.Struct("<4sHHHHIIH")
_EXTRA64: Final = struct.Struct("<HHQQQ")
_MASK: Final = 0xFFFFFFFF


def write_archive(path: str, records: Sequence[tuple[str, Any]]) -> None:
    """Write an uncompressed zip archive in one pass, its records aligned to 64 bytes (`write_archive(p, r)`)."""
    directory: list[bytes] = []
    waiting: list[Any] = []
    position = 0
    with open(path, "wb", buffering=0) as file:
        for name, data in records:
            if callable(data):  # read late: too large to hold together with others
                _write_all(file.fileno(), waiting)
                waiting = []
                data = data()
            label = f"archive/{name}".encode()
            size = len(data)
            checksum = zlib.crc32(data) if size < FASTER_FROM else crc32(data)
            # the size fields hold 32 bits; larger records have theirs in an extra field of the directory
            shown, start = min(size, _MASK), position
            padding = -(start + LOCAL.size + len(label) + 4) % 64
            head = LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, checksum, shown, shown, len(label), padding + 4)
            head += label + _PADDING[padding]
            waiting += (head, data)
            position += len(head) + size
            wide = _EXTRA64.pack(1, 24, size, size, start) if size >= _MASK or start >= _MASK else b""
            if wide:
                shown = start = _MASK
            lengths = (shown, shown, len(label), len(wide))
            directory += (CENTRAL.pack(b"PK\1\2", *[0] * 6, checksum, *lengths, *[0] * 4, start), label, wide)
        tail = b"".join(directory)
        count, length = len(records), len(tail)
        if position + length >= _MASK:
            tail += _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, position)
            tail += _LOCATOR64.pack(b"PK\6\7", 0, position + length, 1)
        tail += END.pack(b"PK\5\6", 0, 0, count, count, min(length, _MASK), min(position, _MASK), 0)
        _write_all(file.fileno(), [*waiting, tail])


_PADDING: Final = tuple(struct.pack("<HH", 0x4246, n) + b"Z" * n for n in range(64))


def _write_all(descriptor: int, buffers: list[Any]) -> None:
    """Write all buffers with few system calls, without copying them and without the GIL."""
    views = [memoryview(b) for b in buffers if len(b)]
    while views:
        written = os.writev(descriptor, views[:512])
        while views and written >= len(views[0]):
            written -= len(views[0])
            del views[0]
        if written:
            views[0] = views[0][written:]


def save_text(path: str, text: str) -> None:
    """Write a small file, whole or not at all (`save_text("input.json", "{}")`)."""
    save_bytes(path, text.encode("utf-8", "surrogatepass"))


def save_bytes(path: str, content: bytes) -> None:
    """The same with bytes (`save_bytes("output.pth", read)`)."""
    with complete(path) as partial, open(partial, "wb", buffering=0) as file:
        _write_all(file.fileno(), [content])
