"""Streams: the output of a request since the last read, delivered from the engine's thread to an asyncio task."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvmosaic.engine.request import Request
from kvmosaic.sampling import Answer, FinishReason, Logprob, RequestMetrics, ReuseReport, SampledToken


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The incremental output of one answer; all of its deltas concatenated are the answer."""

    index: int
    """Index of the answer, below `n`."""
    text: str
    """Final text: never half a character or the start of a stop text."""
    token_ids: tuple[int, ...]
    """May run ahead of the text, which is held back until it is final."""
    logprobs: tuple[dict[int, Logprob], ...] | None
    """One per token; None unless `logprobs` were requested."""
    finish_reason: FinishReason | None
    """stop, length or abort, in the last delta of the answer; None before."""
    stop_reason: int | str | None
    """The stop text or stop id that ended it."""


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """The incremental output of one request. Steps that were not read in between are merged into one delta."""

    request_id: str
    answers: tuple[AnswerDelta, ...]
    """Answers with new output, by index."""
    reuse: ReuseReport | None
    """In the first delta with tokens; None in all others."""
    finished: bool
    """Whether this is the last delta."""
    metrics: RequestMetrics | None
    """In the first delta with tokens, and in the last one."""
    num_prompt_tokens: int
    time: float = 0.0
    """When the newest of these tokens were generated, in seconds on the engine's clock."""
    scored: tuple[SampledToken, ...] = ()
    """Of a given continuation, in the last delta."""


@dataclass(slots=True)
class _UnreadAnswer:
    """Unread output of one answer, in parts."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Unread:
    """Unread output of one request, accumulated until it is taken.

        answer     [ taken before | unread | still to come ]

    A note costs O(new tokens), however long the answer is, and uses no more memory than the answer. Not thread-safe.
    """

    def __init__(self) -> None:
        self._answers: dict[int, _UnreadAnswer] = {}
        self._num_noted: dict[int, int] = {}
        self._ended: set[int] = set()
        self._request: Request | None = None
        self._reuse: ReuseReport | None = None
        self._has_reuse = False
        self._is_finished = False
        self._metrics: RequestMetrics | None = None
        self._time = 0.0

    def __bool__(self) -> bool:
        return self._request is not None

    def note(self, request: Request, time: float) -> None:
        """Adds the output of a request since the last note, if there is any."""
        noted = [self._note_answer(answer) for answer in request.answers if answer.index not in self._ended]
        if not any(noted) and not request.is_finished:
            return
        self._request, self._time = request, time
        if request.is_finished:
            self._is_finished, self._metrics = True, request.metrics
        if not self._has_reuse and request.first_token_time is not None:
            self._reuse, self._has_reuse = request.reuse, True
            self._metrics = request.metrics

    def take(self) -> RequestDelta:
        """Returns the unread output and marks it as read."""
        request = self._request
        assert request is not None, "nothing is unread"
        delta = RequestDelta(
            request_id=request.request_id,
            answers=tuple(_delta(index, self._answers[index]) for index in sorted(self._answers)),
            reuse=self._reuse,
            finished=self._is_finished,
            metrics=self._metrics,
            num_prompt_tokens=len(request.token_ids),
            time=self._time,
            scored=() if request.scoring is None else tuple(request.scoring.tokens),
        )
        self._answers, self._request, self._reuse, self._metrics = {}, None, None, None
        return delta

    def _note_answer(self, answer: Answer) -> bool:
        index, first = answer.index, self._num_noted.get(answer.index, 0)
        if answer.num_tokens == first and answer.finish is None:
            return False
        unread = self._answers.setdefault(index, _UnreadAnswer())
        self._num_noted[index] = answer.num_tokens
        unread.token_ids += answer.token_ids[first:]
        if text := answer.take_text():
            unread.texts.append(text)
        if (logprobs := answer.logprobs_from(first)) is not None:
            unread.logprobs = unread.logprobs or []
            unread.logprobs += logprobs
        if answer.finish is not None:
            self._ended.add(index)
            unread.finish_reason, unread.stop_reason = answer.finish.reason, answer.finish.stop_reason
        return True


def _delta(index: int, unread: _UnreadAnswer) -> AnswerDelta:
    return AnswerDelta(
        index=index,
        text="".join(unread.texts),
        token_ids=tuple(unread.token_ids),
        logprobs=None if unread.logprobs is None else tuple(unread.logprobs),
        finish_reason=unread.finish_reason,
        stop_reason=unread.stop_reason,
    )


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
