"""Deltas: the incremental output of a request since the last read."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmosaic.engine.request import Request
from kvmosaic.sampling import Answer, FinishReason, Logprob, RequestMetrics, ReuseReport


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
    """In the last delta."""
    num_prompt_tokens: int
    time: float = 0.0
    """When the newest of these tokens were generated, in seconds on the engine's clock."""


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
        )
        self._answers, self._request, self._reuse = {}, None, None
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
