"""Streams: delivery of output from the engine's thread to the asyncio task that waits for it."""

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
    """Output that accumulates until it is taken."""

    def note(self, request: Request, time: float) -> None:
        """Adds new output of a request."""

    def take(self) -> T_co:
        """Returns unread output; there must be some."""

    def __bool__(self) -> bool:
        """Whether anything is unread."""


class EndedWarmUps:
    """An inbox of finished warm-ups, including failed ones."""

    def __init__(self) -> None:
        self._ended: deque[Request] = deque()

    def __bool__(self) -> bool:
        return bool(self._ended)

    def note(self, request: Request, time: float) -> None:
        """Adds a finished request."""
        if request.is_finished:
            self._ended.append(request)

    def take(self) -> Request:
        """Returns the one that finished first."""
        return self._ended.popleft()


class Stream(Generic[T]):
    """Output queue of one asyncio task.

        engine's thread     put, fail ──▶ inbox ──▶ (wake the loop, once until something is taken)
        task on the loop                            take

    A slow task is woken once for all that is unread, so nothing piles up in its loop.
    """

    def __init__(self, inbox: Inbox[T]) -> None:
        """Creates a stream for a task of the running event loop."""
        self.loop = asyncio.get_running_loop()
        self.is_closed = False
        """Whether the reader is gone: its requests are to be aborted."""
        self.requests: set[Request] = set()
        """Unfinished requests of this stream; accessed by the engine's thread only."""
        self._inbox = inbox
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._event = asyncio.Event()
        self._is_told = False

    def put(self, request: Request, time: float) -> bool:
        """Adds new output of a request; returns whether `wake` is to be called on the loop."""
        with self._lock:
            self._inbox.note(request, time)
            return bool(self._inbox) and self._tell()

    def fail(self, error: BaseException) -> bool:
        """Ends the stream with an error; returns whether `wake` is to be called on the loop."""
        with self._lock:
            self._error = self._error or error
            return self._tell()

    def wake(self) -> None:
        """Wakes the waiting task; called on the loop."""
        self._event.set()

    async def take(self) -> T:
        """Waits for output and takes it.

        Raises:
            BaseException: the error that ended the stream, once everything else is taken.
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
