"""Ways to copy tensors on a device and to the host, and whether they bring back the same bits.

What a tool says about an operator rests on its own copies. So these are tried on known bits when a device is first
seen, and again on the very bytes of a call before it is called wrong. Where one way fails, another one is taken.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor
from ..call.devices import quiet
from .operands import Copy, Fetcher, Operands, bytes_of, copy_storage, mark_after

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
_SIZES: Final = (9, 1_001, 1 << 15)  # elements
_TRIES: Final = 16  # of small copies, for the first doubts: a fault may strike now and then
_OFTEN: Final = 64
_SMALL: Final = 1 << 18
_MAX_CHECKED: Final = 1 << 28  # bytes of a call whose copies are tried again


def _flat(sample: Tensor, start: int, end: int) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=sample.device)
    return flat.set_(sample.untyped_storage(), start, (end - start,), (1,))


def _by_copy(sample: Tensor, start: int, end: int) -> Tensor:
    size = sample.element_size()
    if start % size or end % size or sample.is_conj() or sample.is_neg():
        flat = _flat(sample, start, end)
    else:
        flat = torch.as_strided(sample.detach(), ((end - start) // size,), (1,), start // size)
    return torch.empty_like(flat).copy_(flat)


def _by_bytes(sample: Tensor, start: int, end: int) -> Tensor:
    return _flat(sample, start, end).clone()


def _by_words(flat: Tensor) -> Tensor:
    whole = flat.numel() & -8
    parts = [flat[:whole].view(torch.int64).cpu().view(torch.uint8)] if whole else []
    return torch.cat([*parts, flat[whole:].cpu()])


def _straight(fetch: Callable[[Tensor], Tensor]) -> Copy:
    """A copy that goes to the host at once: the run waits for it."""
    lock = threading.Lock()  # a fetcher is for one thread at a time

    def copy(sample: Tensor, start: int, end: int) -> Tensor:
        with lock:
            return fetch(_flat(sample, start, end)).clone()  # what it lends is used again

    return copy


def _usual(fetcher: Fetcher) -> Callable[[Tensor], Tensor]:
    # the fetcher has a stream of its own, which must wait for what made the bytes
    return lambda flat: fetcher.borrow([flat], mark_after((flat,)))[0]


class Route(NamedTuple):
    """One way to copy."""

    op: str  # what is wrong if it fails
    copy: Any


ON_DEVICE: Final = (
    Route("torch.Tensor.clone", copy_storage),
    Route("torch.Tensor.copy_", _by_copy),
    Route("torch.Tensor.clone", _by_bytes),
)
TO_HOST: Final = (
    Route("torch.Tensor.copy_", None),  # through pinned memory
    Route("torch.Tensor.cpu", Tensor.cpu),
    Route("torch.Tensor.cpu", _by_words),
)


class Routes:
    """The ways that a tool copies by, and what was found to be wrong with others.

    >>> Routes(print).check(torch.device("cpu"))
    """

    def __init__(
        self,
        report: Callable[[str, str], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._report = report  # gets the operator that is wrong and what it did, once each
        self._changed = changed  # another way was chosen
        self.checked: set[torch.device] = {torch.device("cpu"), torch.device("meta")}
        self._told: set[str] = set()
        self._lock = threading.RLock()
        self._failed: dict[Copy, str] = {}  # ways that were used, and what they did
        self.on_device: Copy = ON_DEVICE[0].copy
        self.to_host: Callable[[Tensor], Tensor] | None = None  # None: through pinned memory, as usual
        self._doubts = 0
        self._spares = False
        self.broken = ""  # why nothing can be compared

    def check(self, device: torch.device) -> None:
        """Try the copies on known bits, unless the device is among those `checked`; it takes a few milliseconds."""
        if device in self.checked or device.type in ("cpu", "meta"):
            return
        with self._lock, quiet(), contextlib.suppress(NotImplementedError):
            self.checked.add(device)
            usual = Fetcher(least=1 << 18)
            for route in TO_HOST:
                copy = _usual(usual) if route.copy is None else route.copy
                for made in (False, True):
                    # bits that came from the host may have changed on their way; then those that the device made tell
                    samples = list(_samples(device, made))
                    failed = _first_difference(_composed(copy), samples)
                    if not failed:
                        self.to_host = route.copy
                        self._choose(samples, copy)
                        return
                self._tell(route.op, f"its copies to the host change bits: {failed}")
            self.broken = "the device's copies to the host are broken"

    def _choose(self, samples: _Samples, fetch: Callable[[Tensor], Tensor]) -> None:
        for route in ON_DEVICE:
            failed = _first_difference(_composed(fetch, route.copy), samples)
            if not failed and route.copy not in self._failed:
                self.on_device = route.copy
                break
            if failed:
                self._failed[route.copy] = f"the device's copies are broken ({route.op}: {failed})"
                self._tell(route.op, f"its copies change bits: {failed}")
        else:
            self.on_device = _straight(fetch)
        if self._spares:
            self.on_device = _straight(fetch)
        self._changed()

    def spare_memory(self) -> None:
        """Take no more memory on the device: copy straight to the host, though the run waits for each copy."""
        with self._lock:
            if not self._spares:
                self._spares = True
                self.on_device = _straight(self.to_host or _usual(Fetcher(least=1 << 18)))
                self._changed()

    def doubt(self, snapshots: Sequence[tuple[Operands, Sequence[Tensor]]]) -> str:
        """Why the bytes by which a call is called wrong cannot be trusted; empty where they can.

        Each snapshot comes with its bytes on the host. Copied once more, they must be the same.
        """
        if self.broken:
            return self.broken
        fetch = self.to_host or _usual(Fetcher(least=1 << 18))
        with self._lock, quiet():
            for operands, flats in snapshots:
                copy = operands.by
                if copy is None or copy in self._failed:
                    failed = next(iter(self._failed.values()), "") if copy is None else self._failed[copy]
                    if failed:
                        return failed
                    continue
                if operands.event is not None:
                    operands.event.synchronize()
                both = zip(operands.storages, flats)
                pairs = [(s, f) for s, f in both if not s.is_cpu and 0 < f.numel() <= _MAX_CHECKED]
                failed = _first_difference(_composed(fetch), pairs)
                if failed:  # all ways are tried again
                    self._tell(TO_HOST[0].op, f"its copies to the host change bits: {failed}")
                    self.checked.discard(pairs[0][0].device)
                    self.check(pairs[0][0].device)
                    return f"the device's copies are broken ({TO_HOST[0].op}: {failed})"
                self._doubts += 1
                often = self._doubts <= _OFTEN and sum([f.numel() for _, f in pairs]) <= _SMALL
                failed = _first_difference(_composed(fetch, copy), pairs * (_TRIES if often else 1))
                if failed:
                    op = next((route.op for route in ON_DEVICE if route.copy is copy), TO_HOST[0].op)
                    self._failed[copy] = f"the device's copies are broken ({op}: {failed})"
                    self._tell(op, f"its copies change bits: {failed}")
                    self._choose(pairs, fetch)
                    return self._failed[copy]
        return ""

    def _tell(self, op: str, what: str) -> None:
        if op not in self._told:
            self._told.add(op)
            self._report(op, what)


_Samples = Sequence[tuple[Tensor, Tensor]]  # tensors on the device, and the bytes of their storages


def _composed(fetch: Callable[[Tensor], Tensor], copy: Copy | None = None) -> Callable[[Tensor], Tensor]:
    """The bytes of a tensor's storage on the host; where `copy` is given, by a copy on the device."""
    if copy is None:
        return lambda tensor: fetch(bytes_of(tensor))
    return lambda tensor: fetch(bytes_of(copy(tensor, 0, tensor.untyped_storage().nbytes())))


def _first_difference(copy: Callable[[Tensor], Tensor], samples: _Samples) -> str:
    """How the first copy that is wrong differs; empty where all are right."""
    for tensor, known in samples:
        found = copy(tensor)
        if found.numel() != known.numel() or not torch.equal(found, known):
            count = int((found != known).sum()) if found.numel() == known.numel() else known.numel()
            look = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            return f"{count} of {known.numel()} bytes of a tensor {look}"
    return ""


def _samples(device: torch.device, made: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors in several dtypes, sizes and layouts: random bits that are sent there, or numbers that are made there."""
    generator = torch.Generator().manual_seed(20)
    for dtype in _DTYPES:
        for size in _SIZES:
            words = max(1, size * dtype.itemsize // 8)
            try:
                if made:
                    known, base = [torch.arange(words, device=d) for d in ("cpu", device)]
                else:
                    known = torch.randint(-(2**63), 2**63 - 1, (words,), generator=generator)
                    base = known.to(device)
                base, known = base.view(dtype), known.view(torch.uint8)
            except (RuntimeError, TypeError):  # a dtype that the device does not have
                continue
            yield base, known
            if size == _SIZES[1]:
                yield base[7:997].view(11, 90).t()[1:, ::2], known  # at an odd offset, with gaps
            if size == _SIZES[2]:
                yield base.view(128, -1).t(), known
