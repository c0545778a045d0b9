"""Reads captured files in the plain form that `archive.fragment` writes, many times faster than a general reader can.

The form is a small grammar: nothing in it names a function to call, refers to another part or can grow larger than the
file. Whatever is not exactly of this form (`None` is returned) is left to `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor
from .archive import CENTRAL, END, LOCAL, NotPlain, check_sum, storage_kinds
from .limits import MemoryLimit, check_memory

_MAX_PICKLED: Final = 1 << 22  # bytes of everything except tensor data
_MAX_AT_ONCE: Final = 1 << 20  # bytes of a file that is read at once
_FOLDER: Final = b"archive/"
_FLOAT: Final = struct.Struct(">d")

_TENSOR: Final = re.compile(
    rb"ctorch\._utils\n_rebuild_tensor_v2\n\(\(X\x07\0\0\0storagectorch\n(\w+)\nX(.)\0\0\0(\d{1,9})"
    rb"X\x03\0\0\0cpuJ(.{4})tQJ(.{4})\(((?:J.{4})*)t\(((?:J.{4})*)t([\x88\x89])ccollections\nOrderedDict\n\)RtR",
    re.DOTALL,
)


def load(path: Path) -> Any:
    """The value in a file, encoded as it was written; None if the file is not of the plain form, or damaged.

    >>> load(Path("capture/input.pth"))["name"]  # doctest: +SKIP
    'torch.add'
    """
    try:
        with open(path, "rb", buffering=0) as file:
            content = _Content(file.fileno())
            records = _records(content)
            facts = [bytes(content.record(records[name])) for name in (b"byteorder", b"version")]
            if records[b"data.pkl"].nbytes > _MAX_PICKLED or facts != [sys.byteorder.encode(), b"3\n"]:
                return None
            return _Reader(bytes(content.record(records[b"data.pkl"])), content, records).value()
    except MemoryLimit:
        raise
    except (NotPlain, LookupError, ValueError, TypeError, struct.error, RuntimeError, OSError):
        return None


class _Record(NamedTuple):
    first: int  # byte of the file
    nbytes: int
    checksum: int


class _Content:
    """The bytes of a file. A small one is read at once; of a large one, only what is asked for."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.size = descriptor, os.fstat(descriptor).st_size
        self._total = 0  # bytes that were asked for
        self._all = self._read(0, self.size) if self.size <= _MAX_AT_ONCE else None

    def _read(self, first: int, nbytes: int) -> memoryview:
        """Bytes, in memory with the alignment of tensors."""
        content = rest = memoryview(torch.empty(nbytes, dtype=torch.uint8).numpy())  # type: ignore[arg-type]
        while len(rest):
            done = os.preadv(self._descriptor, [rest], first)
            if not done:
                raise NotPlain
            first, rest = first + done, rest[done:]
        return content

    def part(self, first: int, nbytes: int) -> memoryview:
        """So many bytes from a place on, fewer at the end of the file."""
        nbytes = max(0, min(nbytes, self.size - first))
        if first < 0:
            raise NotPlain
        return self._read(first, nbytes) if self._all is None else self._all[first : first + nbytes]

    def record(self, record: _Record) -> memoryview:
        """The bytes of a record, once the memory that it takes is known to be there and its checksum to fit."""
        self._total += record.nbytes
        if self._all is None:
            check_memory(self._total)
        found = self.part(record.first, record.nbytes)
        check_sum("a record", found, record.checksum)
        return found


def _records(content: _Content) -> dict[bytes, _Record]:
    """The records of a file; they must lie one after the other, as the directory says."""
    start = content.size - END.size
    ending = END.unpack(content.part(start, END.size))
    mark, disk, first_disk, here, count, length, directory, comment = ending
    if mark != b"PK\5\6" or disk or first_disk or here != count or comment or directory + length != start:
        raise NotPlain
    listed = bytes(content.part(directory, length))
    found: dict[bytes, _Record] = {}
    place = free = 0
    for _ in range(count):
        entry = CENTRAL.unpack_from(listed, place)
        mark, _, _, flags, method, _, _, checksum, packed, nbytes, of_name, extra, remark, *more, local = entry
        name = listed[place + CENTRAL.size : place + CENTRAL.size + of_name]
        place += CENTRAL.size + of_name
        if mark != b"PK\1\2" or flags or method or packed != nbytes or extra or remark or any(more) or local < free:
            raise NotPlain
        head = bytes(content.part(local, LOCAL.size + of_name))
        mark, *_, of_local_name, padding = LOCAL.unpack_from(head)
        if mark != b"PK\3\4" or of_local_name != of_name or head[LOCAL.size :] != name or not name.startswith(_FOLDER):
            raise NotPlain
        first = local + len(head) + padding
        free = first + nbytes
        if free > directory or name[len(_FOLDER) :] in found:
            raise NotPlain
        found[name[len(_FOLDER) :]] = _Record(first, nbytes, checksum)
    if place != length:
        raise NotPlain
    return found


class _Reader:
    """Reads one value after the other; the inverse of `archive.fragment`."""

    def __init__(self, data: bytes, content: _Content, records: dict[bytes, _Record]) -> None:
        self._data, self._content, self._records = data, content, records
        self._place = 2
        self._storages: dict[bytes, tuple[torch.dtype, int, torch.UntypedStorage]] = {}

    def value(self) -> Any:
        if self._data[:2] != b"\x80\x02":
            raise NotPlain
        value = self._next()
        if self._data[self._place :] != b".":
            raise NotPlain
        return value

    def _next(self) -> Any:
        data, place = self._data, self._place
        kind = data[place]
        if kind == 0x58:  # X: text
            end = place + 5 + int.from_bytes(data[place + 1 : place + 5], "little")
            if end > len(data):
                raise NotPlain
            self._place = end
            return data[place + 5 : end].decode("utf-8", "surrogatepass")
        if kind == 0x4A:  # J: a whole number
            self._place = place + 5
            return _number(data[place + 1 : place + 5])
        if kind == 0x28:  # (: a tuple
            self._place = place + 1
            return tuple(self._members(0x74))
        if kind == 0x63:  # c
            return self._tensor()
        if kind in _CONSTANTS:
            self._place = place + 1
            return _CONSTANTS[kind]
        if data[place + 1] == 0x28 and kind in (0x5D, 0x7D):
            self._place = place + 2
            if kind == 0x5D:  # ](: a list
                return self._members(0x65)
            members = self._members(0x75)
            if len(members) % 2:
                raise NotPlain
            return dict(zip(members[::2], members[1::2]))
        if kind == 0x47:  # G
            self._place = place + 9
            return _FLOAT.unpack_from(data, place + 1)[0]
        if kind == 0x8A:
            self._place = place + 2 + data[place + 1]
            return _number(data[place + 2 : self._place])
        raise NotPlain

    def _members(self, end: int) -> list[Any]:
        found, data = [], self._data
        while data[self._place] != end:
            found.append(self._next())
        self._place += 1
        return found

    def _tensor(self) -> Tensor:
        match = _TENSOR.match(self._data, self._place)
        if match is None:
            raise NotPlain
        self._place = match.end()
        kind, digits, record, count, offset, shape, stride, wants_gradient = match.groups()
        if digits[0] != len(record):
            raise NotPlain
        dtype, length, storage = self._storage(kind, record, _number(count))
        first, sizes, strides = _number(offset), _numbers(shape), _numbers(stride)
        if len(sizes) != len(strides) or min((first, *sizes, *strides)) < 0:
            raise NotPlain
        reach = first + sum([(n - 1) * s for n, s in zip(sizes, strides)]) if 0 not in sizes else -1
        if reach >= length:
            raise NotPlain
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(storage, first, sizes, strides)
        return tensor.requires_grad_() if wants_gradient == b"\x88" else tensor

    def _storage(self, kind: bytes, record: bytes, count: int) -> tuple[torch.dtype, int, torch.UntypedStorage]:
        known = self._storages.get(record)
        dtype = _dtypes()[kind.decode()]
        if known is None:
            found = self._records[b"data/" + record]
            if found.nbytes != count * dtype.itemsize:
                raise NotPlain
            flat = torch.empty(0, dtype=torch.uint8)
            if count:
                flat = torch.frombuffer(self._content.record(found), dtype=torch.uint8)
            known = self._storages[record] = (dtype, count, flat.untyped_storage())
        if known[0] != dtype or known[1] != count:
            raise NotPlain
        return known


_CONSTANTS: Final = {0x4E: None, 0x88: True, 0x89: False}


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


@functools.lru_cache(maxsize=4096)
def _numbers(raw: bytes) -> tuple[int, ...]:
    return tuple([_number(raw[place + 1 : place + 5]) for place in range(0, len(raw), 5)])


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    return {name: dtype for dtype, name in storage_kinds().items()}
