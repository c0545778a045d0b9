"""Memory that a call must leave alone: what lies beside the elements of its arguments, and tensors it was not given.

The first is looked at in every call: snapshots hold small storages as a whole, and of larger ones what lies around the
view. The second is a sample: the first call of each kind and some later ones are run with copies of other live tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.arguments import numbers_of
from ..call.description import Tensor
from ..call.devices import quiet, synchronize
from ..call.site import live_state
from ..copies.operands import Fetcher, Layout, Operands, Ref, is_plain, map_leaves, mark_after
from ..judge.verdict import WRONG, Judgement, Row
from ..watch.hooks import Hooks

_MAX_PLANS: Final = 2_000
_MAX_MASK: Final = 1 << 20  # bytes of a mask that is kept for later calls
PART: Final = "memory"  # of rows about memory that is no argument's


# --- beside the elements of arguments ---------------------------------------------------------------------------


class _Gap(NamedTuple):
    """Bytes of a storage that no argument covers: ranges of them, or a mask where arguments have gaps."""

    before: int  # its number in both snapshots
    after: int
    shift: int  # how much earlier its copy begins in the first one
    ranges: tuple[tuple[int, int], ...]  # in the first one
    mask: Tensor | None  # of bytes that are covered, of the one range that there is
    place: int  # of a tensor that lies in it, among those of the arguments
    ref: Ref


class Outside:
    """Finds out whether a call changed memory beside its arguments, from snapshots before and after it."""

    def __init__(self) -> None:
        # by the identity of both trees, which are held so that no other gets it
        self._plans: dict[tuple[int, int], tuple[Any, Any, list[int], list[_Gap]]] = {}
        self.without_gaps: set[tuple[Layout, Layout]] = set()  # of both snapshots: arguments cover all that is copied

    def judge(
        self, op: str, before: Operands, after: Operands, flats: tuple[Sequence[Tensor], ...]
    ) -> Judgement | None:
        """A wrong judgement where memory beside an argument has changed, else None; `flats` are both on the host.

        It need not be asked about snapshots whose layouts are `without_gaps`.
        """
        ours, theirs = flats
        sizes = [f.numel() for f in (*ours, *theirs)]
        key = (id(before.tree), id(after.tree))
        known = self._plans.get(key)
        if known is None or known[2] != sizes:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            known = (before.tree, after.tree, sizes, list(_gaps(before.tree, after.tree, ours, theirs)))
            if before.layout is not None and after.layout is not None:  # otherwise no other call has these trees
                if sum([0 if gap.mask is None else gap.mask.numel() for gap in known[3]]) <= _MAX_MASK:
                    self._plans[key] = known
                if not known[3]:
                    if len(self.without_gaps) >= _MAX_PLANS:
                        self.without_gaps.clear()
                    self.without_gaps.add((before.layout, after.layout))
        for gap in known[3]:
            if before.ids and after.ids and before.ids[gap.before] != after.ids[gap.after]:
                continue  # the argument was given other memory
            changed = _changed(gap, ours[gap.before], theirs[gap.after])
            if changed is not None:
                args, kwargs = before.tensors(ours)
                number = numbers_of(op, args, kwargs).inputs[gap.place]
                return wild(op, number, _told(gap, changed, ours[gap.before], theirs[gap.after]))
        return None


def wild(op: str, index: int | None, reason: str) -> Judgement:
    """The judgement on a call that wrote where it must not (`wild("torch.add", 0, "...")`)."""
    row = Row(
        op, PART, index, False, math.inf, math.inf, 0.0, 0.0, reason, verdict=WRONG, reason=reason, bound=math.inf
    )
    return Judgement(WRONG, f"{row.name}: {reason}", (row,))


def _gaps(before: Any, after: Any, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Iterator[_Gap]:
    given, left = _leaves(before), _leaves((after[0], after[1]))
    if len(given) != len(left):
        return
    by_storage: dict[int, list[tuple[int, Ref, Any]]] = {}
    for place, (old, new) in enumerate(zip(given, left)):
        if isinstance(old, Ref):
            by_storage.setdefault(old.storage, []).append((place, old, new))
    for storage, pairs in by_storage.items():
        place, ref, new = pairs[0]
        if any(not isinstance(n, Ref) or n[1:4] != o[1:4] for _, o, n in pairs):  # resized, or not comparable
            continue
        shift = (ref.offset - new.offset) * ref.dtype.itemsize
        if any(n.storage != new.storage or (o.offset - n.offset) * o.dtype.itemsize != shift for _, o, n in pairs):
            continue
        low, high = max(0, shift), min(ours[storage].numel(), theirs[new.storage].numel() + shift)
        blocks = sorted({_block(o) for _, o, _ in pairs})
        if all(_is_dense(o) for _, o, _ in pairs):
            ranges, mask = tuple(_between(blocks, low, high)), None
        else:
            mask = torch.zeros(ours[storage].numel(), dtype=torch.bool)
            for _, old, _ in pairs:
                size = old.dtype.itemsize
                steps = (*[step * size for step in old.stride], 1)
                mask.as_strided((*old.shape, size), steps, old.offset * size).fill_(True)
            mask = mask[low:high]
            ranges = ((low, high),) if not bool(mask.all()) else ()
        if ranges:
            yield _Gap(storage, new.storage, shift, ranges, mask, place, ref)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(tree, found.append)
    return found


def _block(ref: Ref) -> tuple[int, int]:
    """First and last (exclusive) byte that a tensor touches."""
    size, empty = ref.dtype.itemsize, 0 in ref.shape
    extent = 0 if empty else 1 + sum([(n - 1) * step for n, step in zip(ref.shape, ref.stride)])
    return ref.offset * size, (ref.offset + extent) * size


def _is_dense(ref: Ref) -> bool:
    """Whether a tensor fills one block of memory."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(ref.shape, ref.stride) if size != 1):
        if step != expected and size:
            return False
        expected *= size
    return True


def _between(blocks: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    """What the blocks leave of the bytes from `low` to `high`."""
    for start, end in blocks:
        if start > low:
            yield low, min(start, high)
        low = max(low, end)
    if low < high:
        yield low, high


def _changed(gap: _Gap, before: Tensor, after: Tensor) -> Tensor | None:
    """The changed bytes of a gap, by their places in the first snapshot; None where there are none."""
    for low, high in gap.ranges:
        old, new = before[low:high], after[low - gap.shift : high - gap.shift]
        if _equal(old, new):
            continue
        differs = old != new
        if gap.mask is not None:
            differs &= ~gap.mask
        places = differs.nonzero().flatten()
        if places.numel():
            return places + low
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether bytes are the same; eight at a time are compared many times faster than one."""
    whole = a.numel() & -8
    if whole and a.data_ptr() % 8 == b.data_ptr() % 8 == 0:
        same = torch.equal(a[:whole].view(torch.int64), b[:whole].view(torch.int64))
        return same and torch.equal(a[whole:], b[whole:])
    return torch.equal(a, b)


def _told(gap: _Gap, places: Tensor, before: Tensor, after: Tensor) -> str:
    ref, size = gap.ref, gap.ref.dtype.itemsize
    elements = places.div(size, rounding_mode="floor").unique()
    first, (start, end) = int(elements[0]), _block(ref)
    distance = f"{start // size - first} before its first" if first * size < start else "between its elements"
    if first * size >= end:
        distance = f"{first - end // size + 1} past its last"
    count = f"{elements.numel()} element{'s' * (elements.numel() > 1)}"
    old, new = [
        flat[at : at + size].clone().view(ref.dtype)[0].item() if at + size <= flat.numel() else "?"
        for flat, at in ((before, first * size), (after, first * size - gap.shift))
    ]
    changed = f"{count} of its storage changed, the first one {distance} ({old} became {new})"
    return f"it writes outside of this argument: {changed}"


# --- tensors that are no arguments ------------------------------------------------------------------------------

_EVERY: Final = 64  # calls of a kind that was guarded already
_MAX_KINDS: Final = 20_000
_MAX_WHOLE: Final = 1 << 24  # bytes around a view that are copied now and then
_AT_ONCE: Final = 32  # tensors
_MAX_NODES: Final = 4  # of a backward
_OF_FORWARD: Final = "a tensor of its forward"
_WINDOW: Final = 1 << 12  # bytes of each
_REFRESH: Final = 64  # guarded calls after which the list of live tensors is made anew
_MAX_RECENT: Final = 64
_TIGHT: Final = 1_000  # calls that are all guarded, after something was found
_OWN: Final = (512, 512, 4096)  # bytes of the tool's own tensors among them


@dataclasses.dataclass(eq=False)
class Guarded:
    """Copies of tensors that a call is not given, before it and after it: bytes of each, one after the other.

    Unless there are other processes, nothing else runs on the device meanwhile: what changes, the call has changed.
    """

    names: list[str]
    addresses: list[int]
    tensors: list[Tensor]
    windows: list[Tensor]  # their bytes
    versions: list[int]
    alone: bool
    before: Tensor
    after: Tensor | None = None
    event: Any = None  # after the last copy
    sizes: tuple[int, ...] = ()

    def end(self, results: Sequence[Tensor]) -> bool:
        """Copy them again, on the run's thread, and let go of them; False where they may have changed."""
        made = {_address(t) for t in results}
        tensors, windows = self.tensors, self.windows
        self.tensors, self.windows, self.sizes = [], [], tuple([w.numel() for w in windows])
        if not made.isdisjoint(self.addresses):
            return False
        if self.versions != _versions(tensors) and threading.active_count() > _own_threads() + 1:
            return False  # another thread may have written to them
        with quiet():
            self.after = torch.cat(windows)
            self.event = mark_after((self.after,))
        return True


class Neighbours:
    """Guards tensors that calls are not given: parameters and buffers, tensors seen of late, and some of its own.

    >>> guarded = neighbours.begin(call)  # doctest: +SKIP
    >>> guarded.end(call.results) and neighbours.judge(call.op, guarded, fetcher)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.seen: set[Hashable] = set()  # kinds of calls that were guarded: (op, number of its arguments)
        self.calls = 0
        self.due = 0  # once there were so many calls, `begin` must be asked about each, of whatever kind
        self._guarded = self._next = self._tight = 0
        self._state: list[tuple[str, weakref.ref[Tensor]]] = []
        self._recent: OrderedDict[int, weakref.ref[Tensor]] = OrderedDict()
        self._own: list[Tensor] = []
        self._found: Counter[str] = Counter()
        self._suspects: dict[str, tuple[int, str]] = {}  # by operator: how often, and what was seen first
        self._usable = True
        self._lock = threading.Lock()
        self._views: Counter[Hashable] = Counter()

    def affords(self, call: Any, left_out: int) -> bool:
        """Whether all of the storages behind the views among a call's arguments are copied, so many bytes more."""
        kind = (call.op, call.inputs.number)
        if left_out > _MAX_WHOLE or (kind not in self._views and len(self._views) >= _MAX_KINDS):
            return False
        self._views[kind] += 1
        return self._views[kind] % _EVERY == 1

    def begin(self, call: Any) -> Guarded | None:
        """Copies of some tensors before a call, where it is one to be guarded; on the run's thread."""
        self.calls += 1
        if not (self._tight or self._suspects):
            self.due = (self.calls // _EVERY + 1) * _EVERY - 1
        kind = (call.op, call.inputs.number)
        if kind in self.seen and self.calls % _EVERY and not self._tight and call.op not in self._suspects:
            return None
        if not self._usable or call.traits.view or call.device.type == "cpu" or not self._lock.acquire(blocking=False):
            return None
        try:
            with quiet():
                return self._begin(call, kind)
        except RuntimeError:  # no memory, most likely
            self._usable = False
            return None
        finally:
            self._lock.release()

    def _begin(self, call: Any, kind: Hashable) -> Guarded:
        if len(self.seen) < _MAX_KINDS:
            self.seen.add(kind)
        self._tight = max(0, self._tight - 1)
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        return self._copied(call.device, self._choose(call, alone), alone)

    def begin_node(self, call: Any, tensors: Sequence[Tensor]) -> Guarded | None:
        """Copies of the tensors of a call, and of some others, before a node of its backward runs."""
        if not self._usable or not self._lock.acquire(blocking=False):
            return None
        try:
            with quiet():
                alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
                device = call.device
                own = {_address(t): (_OF_FORWARD, t) for t in tensors if t.device == device and t.numel()}
                others = {_address(t): (name, t) for name, t in self._choose(call, alone)}
                return self._copied(device, list({**others, **own}.values()), alone)
        except RuntimeError:  # no memory, most likely
            self._usable = False
            return None
        finally:
            self._lock.release()

    def _copied(self, device: torch.device, found: list[tuple[str, Tensor]], alone: bool) -> Guarded:
        windows = [self._window(tensor) for _, tensor in found]
        names, tensors = [name for name, _ in found], [tensor for _, tensor in found]
        if alone:
            synchronize(device.type)  # other streams may still be writing to them
        addresses = [_address(tensor) for tensor in tensors]
        return Guarded(names, addresses, tensors, windows, _versions(tensors), alone, torch.cat(windows))

    def _choose(self, call: Any, alone: bool) -> list[tuple[str, Tensor]]:
        device = call.device
        if self._guarded % _REFRESH == 0 or self._guarded in (1, 2, 4, 8, 16, 32):  # a model is called after some calls
            self._state = [(name, weakref.ref(t)) for name, t in live_state() if is_plain(t)]
            self._own = [torch.full((size,), 0xA5, dtype=torch.uint8, device=device) for size in _OWN]
        self._guarded += 1
        found = [("memory of the tool's own", t) for t in self._own]
        everything = [*self._state, *[("a tensor of an earlier call", ref) for ref in self._recent.values()]]
        given = {_address(t) for t in call.tensors}
        for step in range(len(everything)):
            name, ref = everything[(self._next + step) % len(everything)]
            tensor = ref()
            if tensor is None or not is_plain(tensor) or tensor.device != device or not tensor.numel():
                continue
            address = _address(tensor)
            if address not in given:
                given.add(address)
                found.append((name, tensor))
                if len(found) >= _AT_ONCE:
                    self._next += step + 1
                    break
        if alone:  # else another process may be writing to it
            for tensor in call.tensors:
                self._recent[id(tensor)] = weakref.ref(tensor)
            while len(self._recent) > _MAX_RECENT:
                self._recent.popitem(last=False)
        return found

    def _window(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        flat, total = torch.empty(0, dtype=torch.uint8, device=tensor.device), storage.nbytes()
        start = 0 if total <= _WINDOW else self._guarded * _WINDOW % total
        return flat.set_(storage, start, (min(_WINDOW, total - start),), (1,))

    def judge(self, op: str, guarded: Guarded, fetcher: Fetcher) -> Judgement | None:
        """A wrong judgement where a call changed a tensor that it was not given; on a worker thread."""
        assert guarded.after is not None
        copies = (guarded.before, guarded.after)
        before, after = _on_host(copies, guarded.event, fetcher)
        if _equal(before, after):
            return None
        again = tuple([torch.cat(copy.split(list(guarded.sizes))) for copy in (*copies, *copies, *copies)])
        if not all(map(_equal, _on_host(again, mark_after(again), fetcher), [before, after] * 3)):
            self._usable = False  # the device's copies are what is wrong
            return None
        self._tight, self.due = _TIGHT, 0
        if guarded.alone:
            self._found[op] += 1
        place = int((before != after).nonzero()[0])
        ends = list(itertools.accumulate(guarded.sizes))
        which = next(number for number, end in enumerate(ends) if place < end)
        count = int((before != after).sum())
        known = {_address(tensor): name for name, tensor in live_state()}
        name = known.get(guarded.addresses[which], guarded.names[which])
        what = "must leave alone" if guarded.names[which] == _OF_FORWARD else "was not given"
        reason = f"it writes to {name}, which it {what}: {count} bytes changed during the call"
        if not guarded.alone:
            self.suspect(op, reason)
            return None
        return wild(op, None, reason)

    def suspect(self, op: str, reason: str) -> None:
        """Memory changed during a call, perhaps by something else: later calls of the operator are guarded."""
        count, first = self._suspects.get(op, (0, reason))
        self._suspects[op] = (count + 1, first)
        self.due = 0

    def summary(self) -> list[str]:
        """What was suspected and not confirmed."""
        open_questions = [(op, *seen) for op, seen in self._suspects.items() if not self._found[op]]
        why = "a collective or another stream may have done it"
        return [f"suspected, {op}: {reason} ({count} times; {why})" for op, count, reason in open_questions]


class NodeGuard(Hooks):
    """Guards memory while the backward nodes of one call run: the tensors of its forward, and others."""

    name = "Memory"
    wants_backward = wants_backward_start = True
    wants_gradients = False

    def __init__(self, neighbours: Neighbours, call: Any) -> None:
        self._neighbours = neighbours
        self._tensors = [weakref.ref(t) for t in (*call.tensors, *call.results) if is_plain(t)]
        self.guarded: list[Guarded] = []

    def before_node(self, call: Any, node: int) -> Guarded | None:
        if len(self.guarded) >= _MAX_NODES:
            return None
        return self._neighbours.begin_node(call, [t for t in [ref() for ref in self._tensors] if t is not None])

    def after_node(self, call: Any, started: Guarded) -> None:
        # a hook of the user may have written to them, which their versions show
        if started.versions == _versions(started.tensors) and started.end(()):
            self.guarded.append(started)

    def judge(self, op: str, fetcher: Fetcher) -> Judgement | None:
        """A wrong judgement where a node changed one of them, else None; on a worker thread."""
        found = [self._neighbours.judge(op, guarded, fetcher) for guarded in self.guarded]
        return next((judgement for judgement in found if judgement is not None), None)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors]


def _own_threads() -> int:
    return sum([getattr(thread, "op_tools_internal", False) for thread in threading.enumerate()])


def _on_host(copies: tuple[Tensor, ...], event: Any, fetcher: Fetcher) -> list[Tensor]:
    return fetcher.fetch(Operands((), copies, event, sum([c.numel() for c in copies])))


def _address(tensor: Tensor) -> int:
    """That of the memory under a tensor; 0 where it has none."""
    return tensor.untyped_storage().data_ptr() if is_plain(tensor) else 0
