"""Who goes next: fair turns between clients, and threads that work in that order."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.requests import Request

from .config import share

_NICE = 10
T = TypeVar("T")


class Asker(NamedTuple):
    """Whose turn a piece of work takes."""

    client: str = ""  # address
    request: int = 0

    @classmethod
    def of(cls, request: Request) -> Asker:
        return cls(request.client.host if request.client else "", id(request))


class Waiting(Protocol):
    asker: Asker
    turn: float


def next_turn(now: float, asker: Asker, cost: float, waiting: Iterable[Waiting]) -> float:
    """The turn of a new piece of work, by self-clocked fair queueing: the least of all that wait goes next.

    now: the turn of what was begun last. A turn is max(now, that of the request's last piece) + cost x requests of its
    client. So eight requests of one client get as much as the one of another, small work passes large, and none waits
    for ever.
    """
    own = [w for w in waiting if w.asker.client == asker.client]
    requests = {w.asker for w in own} | {asker}
    return max([now, *(w.turn for w in own if w.asker == asker)]) + cost * len(requests)


class Room:
    """Room for so much at once. One client gets its share of it, or `least` if that is more."""

    def __init__(self, most: int, least: int = 0) -> None:
        self.most, self.one = most, max(share(most), least)
        self._taken: Counter[str] = Counter()

    def fits(self, client: str, amount: int) -> bool:
        return self._taken.total() + amount <= self.most and self._taken[client] + amount <= self.one

    @contextmanager
    def held(self, client: str, amount: int) -> Iterator[None]:
        self._taken[client] += amount
        try:
            yield
        finally:
            self._taken[client] -= amount
            self._taken += Counter()  # forgets those that hold nothing


@dataclass(eq=False)
class _Work:
    asker: Asker
    turn: float
    large: bool
    function: Callable[[], Any]
    answer: asyncio.Future[Any]


class Workers:
    """Threads for what would block the event loop. Work that is cancelled before its turn is not begun."""

    def __init__(self, threads: int, large: int) -> None:
        """One of the threads takes nothing that costs more than `large`, so that small work never waits for it.

        What is large runs at a low priority: the model and small work have the processor first.
        """
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="adaptivit-worker")
        self._slow = ThreadPoolExecutor(threads, "adaptivit-large", _last)
        self._threads, self._large, self._now = threads, large, 0.0
        self._waiting: list[_Work] = []  # by turn
        self._begun: list[_Work] = []

    async def run(self, asker: Asker, cost: float, function: Callable[..., T], *given: Any) -> T:
        """The function's result; cost: pixels that it makes or bytes that it reads."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._drop_cancelled()
        turn = next_turn(self._now, asker, cost, self._waiting)
        self._waiting.append(_Work(asker, turn, cost > self._large, functools.partial(function, *given), answer))
        self._begin()
        return await answer

    def _drop_cancelled(self) -> None:
        self._waiting = [work for work in self._waiting if not work.answer.done()]

    def _begin(self) -> None:
        self._drop_cancelled()
        for work in sorted(self._waiting, key=lambda w: w.turn):
            if len(self._begun) == self._threads:
                return
            if work.large and sum(w.large for w in self._begun) >= self._threads - 1:
                continue
            self._waiting.remove(work)
            self._start(work)

    def _start(self, work: _Work) -> None:
        self._begun.append(work)
        self._now = max(self._now, work.turn)
        loop = work.answer.get_loop()
        pool = self._slow if work.large else self._pool
        pool.submit(work.function).add_done_callback(lambda f: loop.call_soon_threadsafe(self._end, work, f))

    def _end(self, work: _Work, done: Future[Any]) -> None:
        self._begun.remove(work)
        if not work.answer.done():
            error = done.exception()
            work.answer.set_result(done.result()) if error is None else work.answer.set_exception(error)
        self._begin()

    def close(self) -> None:
        self._pool.shutdown()
        self._slow.shutdown()


def _last() -> None:
    """Let other threads go before this one, where the system has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
