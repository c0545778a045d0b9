"""Engines bring units to slots: here, slots in this machine's processes, over one or several devices."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from ditorch.conformance.cases import Result, Unit
from ditorch.conformance.slot import Settings, Slot, Stopped

GRACE: Final = 15.0
"""Seconds after the end for what still runs: a finding is made small within them."""


class Engine(Protocol):
    """Runs units somewhere and gives back results as they come.

    Example: ``for result in engine.run(units): store.add(result)``
    """

    def list(self, what: list[str]) -> list[Unit]:
        """Every unit there is for the device."""
        ...

    def device_name(self) -> str:
        """What the vendor calls the device; known after `list`."""
        ...

    def run(self, units: Sequence[Unit], ends: float | None = None) -> Iterator[Result]:
        """Run units; closing the iterator ends everything at once.

        Where `ends` says when (on the monotonic clock), no unit begins after that, and what still runs has a little
        longer: a hang must not keep the others waiting.
        """
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class LocalEngine:
    """One thread per slot; each takes the next unit when its worker is free.

    Example: ``LocalEngine([Settings("cuda", "cuda:0"), Settings("cuda", "cuda:1")])``
    """

    def __init__(self, settings: Sequence[Settings]) -> None:
        if not settings:
            raise ValueError("at least one worker is needed")
        self._slots = [Slot(one) for one in settings]

    @property
    def replaced(self) -> int:
        """How many workers were lost and replaced so far."""
        return sum(slot.replaced for slot in self._slots)

    def list(self, what: list[str]) -> list[Unit]:
        """Ask the first slot."""
        return self._slots[0].list(what)

    def device_name(self) -> str:
        """As the first slot found it."""
        return self._slots[0].device_name

    def run(self, units: Sequence[Unit], ends: float | None = None) -> Iterator[Result]:
        """Run units on all slots at once, until `ends`."""
        todo: queue.SimpleQueue[Unit] = queue.SimpleQueue()
        for unit in units:
            todo.put(unit)
        found: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
        slots = self._slots[: max(1, min(len(self._slots), len(units)))]
        threads = [threading.Thread(target=_serve, args=(slot, todo, found, ends), daemon=True) for slot in slots]
        for thread in threads:
            thread.start()
        try:
            busy = len(threads)
            while busy:
                try:
                    item = found.get(timeout=None if ends is None else max(0.0, ends + GRACE - time.monotonic()))
                except queue.Empty:
                    for slot in slots:
                        slot.stop()
                    return
                if item is None:
                    busy -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        except BaseException:
            for slot in slots:
                slot.stop()
            raise
        finally:
            for thread in threads:
                thread.join(20)

    def close(self) -> None:
        """End all workers."""
        for slot in self._slots:
            slot.close()


def _serve(
    slot: Slot,
    todo: queue.SimpleQueue[Unit],
    found: queue.SimpleQueue[Result | BaseException | None],
    ends: float | None,
) -> None:
    try:
        while ends is None or time.monotonic() < ends:
            try:
                unit = todo.get_nowait()
            except queue.Empty:
                break
            slot.do(unit, found.put)
    except Stopped:
        pass
    except BaseException as error:  # for the thread that reads the results
        found.put(error)
    finally:
        found.put(None)
