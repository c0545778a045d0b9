"""A side channel between ranks, through the store of the default process group. The training never waits for it.

A thread of its own writes and reads. It asks whether a key is there and never blocks on one, over a connection of its
own where the store has connections, so that neither the training nor another rank is ever held up. What a rank has not
published in time is missing.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch

from .. import lifecycle

_PREFIX: Final = "op_tools"
_MAX_ASKED: Final = 64  # of what is awaited: asked for in one round
_SHORT: Final = 1.0  # seconds to wait for a rank that has been silent before
_PAUSES: Final = (0.0005, 0.02)  # seconds between rounds: the shortest and the longest
_FILE_BYTES: Final = 2048  # of one message in a file, which only grows
_ALL: Final[weakref.WeakSet[Exchange]] = weakref.WeakSet()


class Question(NamedTuple):
    """What some ranks published under a key, and who wants to know it: `answer(found, missing)`."""

    key: str
    ranks: Sequence[int]  # those asked
    senders: Sequence[int]  # those that publish, with this one
    readers: int  # how many ranks ask: the last one deletes what was published
    answer: Callable[[dict[int, bytes], Sequence[int]], None]


class Exchange:
    """Publishes messages of this rank and answers questions about those of others (`Exchange(store, 30.0)`)."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._change = threading.Condition()
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._asked: list[tuple[float, Question]] = []
        self._published: deque[tuple[float, str]] = deque()
        self._silent: set[int] = set()
        self._thread: threading.Thread | None = None
        self._closing = self._busy = False
        self.failure = ""  # why nothing can be exchanged any more
        self.message_bytes = _FILE_BYTES if isinstance(_innermost(store), _class("FileStore")) else 1 << 16
        _ALL.add(self)

    def publish(self, key: str, rank: int, message: bytes) -> None:
        """Let other ranks read a message under this key and rank."""
        with self._change:
            self._outgoing.append((f"{key}/{rank}", message))
            self._begin()

    def ask(self, question: Question) -> None:
        """Have a question answered when all is there, or when the time is over."""
        with self._change:
            patience = _SHORT if self._silent.intersection(question.ranks) else self._seconds
            self._asked.append((time.monotonic() + min(patience, self._seconds), question))
            self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="op_tools-exchange", daemon=True)
            self._thread.op_tools_internal = True  # type: ignore[attr-defined]
            self._thread.start()
        self._change.notify_all()

    def drain(self) -> bool:
        """Wait until all questions are answered, which takes a bounded time; whether there were any."""
        until = time.monotonic() + 2 * self._seconds + 5
        with self._change:
            had = bool(self._asked or self._outgoing or self._busy)
            while (self._asked or self._outgoing or self._busy) and time.monotonic() < until:
                self._change.wait(0.5)
        return had

    def close(self) -> None:
        """End the thread; what was published and not read stays in the store for others."""
        with self._change:
            self._closing = True
            thread, self._thread = self._thread, None
            self._change.notify_all()
        if thread is not None:
            thread.join(timeout=5)

    # -- the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        shortest, longest = _PAUSES
        pause, store = shortest, None
        while True:
            with self._change:
                if not self._outgoing and not self._closing:
                    self._change.wait(pause if self._asked else None)
                if self._closing:
                    return
                outgoing, asked = list(self._outgoing), self._asked[:_MAX_ASKED]
                self._outgoing.clear()
                self._busy = True
            try:
                if store is None and not self.failure:
                    store = _connected(self._store, self._seconds)
                done = self._round(store, outgoing, asked)
            except Exception as error:  # the store is gone: another rank has ended, or the network fails
                self.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                done = self._round(None, [], asked)
            with self._change:
                self._asked = [item for item in self._asked if item[1] not in done]
                self._busy = False
                self._change.notify_all()
            pause = shortest if done or outgoing else min(2 * pause, longest)

    def _round(self, store: Any, outgoing: Sequence[tuple[str, bytes]], asked: Any) -> list[Question]:
        """Publish, and answer what can be answered."""
        now, done = time.monotonic(), []
        for key, message in outgoing if store is not None and not self.failure else ():
            store.set(key, message)
            self._published.append((now, key))
        for deadline, question in asked:
            keys = {rank: f"{question.key}/{rank}" for rank in question.ranks}
            found: dict[int, bytes] = {}
            if store is not None and not self.failure:
                late = now > deadline
                there = [rank for rank, key in keys.items() if store.check([key])] if late else list(keys)
                if not late and keys and not store.check(list(keys.values())):
                    continue
                found = {rank: bytes(store.get(keys[rank])) for rank in there}
            missing = [rank for rank in keys if rank not in found]
            with self._change:
                self._silent.difference_update(found)
                self._silent.update(missing)
            done.append(question)
            question.answer(found, missing)
            if store is not None and not self.failure and question.readers:
                self._has_read(store, question, bool(missing))
        if store is not None and not self.failure:
            while self._published and now - self._published[0][0] > 4 * self._seconds:  # nobody reads it any more
                store.delete_key(self._published.popleft()[1])
        return done

    def _has_read(self, store: Any, question: Question, in_vain: bool) -> None:
        """Delete what nobody will read: the last reader all of it; where a rank is silent, each rank its own."""
        counter = f"{question.key}/read"
        if in_vain:
            useless = [rank for rank in question.senders if rank not in question.ranks]
        elif store.add(counter, 1) >= question.readers:
            useless = list(question.senders)
        else:
            return
        for rank in useless:
            store.delete_key(f"{question.key}/{rank}")
        store.delete_key(counter)


def _class(name: str) -> Any:
    return getattr(torch.distributed, name, ())


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _connected(store: Any, seconds: float) -> Any:
    """The store over a connection of this thread's own: a client does one thing at a time, and the training needs it.

    Its keys begin with a word that all ranks of this very run agree on: the server may outlive it.
    """
    server = _innermost(store)
    if not isinstance(server, _class("TCPStore")):
        return _class("PrefixStore")(_PREFIX, store)
    word = bytes(store.compare_set(f"{_PREFIX}/run", "", uuid.uuid4().hex)).decode()
    limit = timedelta(seconds=max(1.0, seconds))
    own = _class("TCPStore")(server.host, server.port, None, False, limit, wait_for_workers=False)
    return _class("PrefixStore")(f"{_PREFIX}/{word}", own)


def _close_all() -> None:
    for exchange in list(_ALL):
        with contextlib.suppress(Exception):
            exchange.close()


lifecycle.at_exit(lifecycle.Exit.WRITERS, _close_all)
