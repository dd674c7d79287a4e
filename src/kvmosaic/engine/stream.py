"""Streams: how news get from the engine's thread to the asyncio task that waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from kvmosaic.engine.request import Request

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Inbox(Protocol[T_co]):
    """News that pile up until they are taken."""

    def note(self, request: Request, time: float) -> None:
        """Notes what is new of a request."""

    def take(self) -> T_co:
        """Something unread; there must be something."""

    def __bool__(self) -> bool:
        """Whether anything is unread."""


class EndedWarmUps:
    """An inbox of warm-ups that have ended, those that failed too."""

    def __init__(self) -> None:
        self._ended: deque[Request] = deque()

    def __bool__(self) -> bool:
        return bool(self._ended)

    def note(self, request: Request, time: float) -> None:
        """Keeps a request that has ended."""
        if request.is_finished:
            self._ended.append(request)

    def take(self) -> Request:
        """The one that ended first."""
        return self._ended.popleft()


class Stream(Generic[T]):
    """What one asyncio task waits for.

        engine's thread     put, fail ──▶ inbox ──▶ (wake the loop, once until something is taken)
        task on the loop                            take

    A slow task is woken once for all that is unread, so nothing piles up in its loop.
    """

    def __init__(self, inbox: Inbox[T]) -> None:
        """Makes a stream for a task of the running loop."""
        self.loop = asyncio.get_running_loop()
        self.is_closed = False
        """Whether nobody reads any more: what belongs to it is to be aborted."""
        self.requests: set[Request] = set()
        """Those under way; of the engine's thread."""
        self._inbox = inbox
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._event = asyncio.Event()
        self._is_told = False

    def put(self, request: Request, time: float) -> bool:
        """Notes what is new of a request; returns whether `wake` is to be called on the loop."""
        with self._lock:
            self._inbox.note(request, time)
            return bool(self._inbox) and self._tell()

    def fail(self, error: BaseException) -> bool:
        """Ends the stream with an error; returns whether `wake` is to be called on the loop."""
        with self._lock:
            self._error = self._error or error
            return self._tell()

    def wake(self) -> None:
        """Lets the waiting task go on; called on the loop."""
        self._event.set()

    async def take(self) -> T:
        """Waits for something and takes it.

        Raises:
            BaseException: what the stream ended with, once everything else is taken.
        """
        while True:
            with self._lock:
                self._event.clear()
                self._is_told = False
                if self._inbox:
                    return self._inbox.take()
                if self._error is not None:
                    raise self._error
            await self._event.wait()

    def _tell(self) -> bool:
        was_told, self._is_told = self._is_told, True
        return not was_told


def wake_all(streams: Iterable[Stream[object]]) -> None:
    """Wakes streams of one loop; called on it."""
    for stream in streams:
        stream.wake()
