"""Generation: runs the prompts of one HTTP request together, as one stream of deltas or as whole answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import anyio
from fastapi import Request, Response
from pydantic import BaseModel

from kvmosaic.engine import AnswerDelta, RequestDelta
from kvmosaic.layout import ChunkContext, context_with
from kvmosaic.sampling import Logprob, SamplingParams
from kvmosaic.server.execution import PromptRunner
from kvmosaic.server.generation.prompts import EncodedPrompt
from kvmosaic.server.generation.sampling_fields import GenerationFields
from kvmosaic.server.generation.usage import UsageTotals
from kvmosaic.server.tenants import Tenant
from kvmosaic.web.errors import request_id_of
from kvmosaic.web.json_body import warn, warnings_of

if TYPE_CHECKING:
    from kvmosaic.server.tracing import RequestTrace

T = TypeVar("T")
R = TypeVar("R", bound=BaseModel)
Ending = Literal["stop", "length"]
MAX_WRITTEN_AT_ONCE = 1_000
"""Maximum number of log probabilities written on the event loop, which each block for 10 µs."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What one HTTP request asks the engine to generate."""

    runner: PromptRunner
    tenant: Tenant
    route: str
    request_id: str
    created: int
    """Unix seconds."""
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    priority: int = 0
    position_strategy: str | None = None
    chunk_context: ChunkContext | None = None
    trace: RequestTrace | None = None
    """Its trace, if it is sampled."""
    warnings: tuple[str, ...] = ()
    """About its body."""

    @classmethod
    def by(
        cls,
        runner: PromptRunner,
        tenant: Tenant,
        route: str,
        request: Request,
        body: GenerationFields,
        read: tuple[Sequence[EncodedPrompt], SamplingParams],
    ) -> GenerationRequest:
        """Builds the request from its prompts and sampling parameters."""
        prompts, params = read
        warn(request, *(warning for each in prompts for warning in each.warnings))
        trace: RequestTrace | None = getattr(request.state, "trace", None)
        if trace is not None:
            trace.describe(route, body.model, params, stream=bool(body.stream))
        return cls(
            runner=runner,
            tenant=tenant,
            route=route,
            request_id=request_id_of(request),
            created=int(time.time()),
            prompts=prompts,
            params=params,
            priority=body.priority or 0,
            position_strategy=body.position_strategy,
            chunk_context=context_with(body.companions, body.chunk_context),
            trace=trace,
            warnings=warnings_of(request),
        )

    def tally(self) -> UsageTotals:
        """Returns an empty usage count."""
        ids = frozenset().union(*(composed.document_ids for composed in self.prompts))
        return UsageTotals([composed.prompt.num_tokens for composed in self.prompts], ids, self.warnings)

    def index_of(self, prompt_index: int, answer: AnswerDelta) -> int:
        """Returns the index of a choice among all choices of the reply."""
        return prompt_index * self.params.n + answer.index


@dataclass(slots=True)
class WholeAnswer:
    """One complete answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: Ending = "stop"
    stop_reason: int | str | None = None

    def add(self, delta: AnswerDelta) -> None:
        """Appends a delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if (ending := ending_of(delta)) is not None:
            self.finish_reason, self.stop_reason = ending, delta.stop_reason


A = TypeVar("A", bound=WholeAnswer)


def ending_of(answer: AnswerDelta) -> Ending | None:
    """Returns the finish reason, if the answer has ended; never called for aborted ones."""
    return "length" if answer.finish_reason == "length" else "stop" if answer.finish_reason else None


async def deltas(asked: GenerationRequest) -> AsyncGenerator[tuple[int, RequestDelta], None]:
    """Yields the deltas of all prompts as they arrive, each with the number of its prompt.

    Raises:
        ApiError: refused, or the server shuts down in the middle of an answer.
        KVMosaicError: the engine refuses the request or fails; the other prompts are aborted.
    """
    sources = [
        asked.runner.run(
            asked.tenant,
            composed.prompt,
            asked.params,
            route=asked.route,
            request_id=asked.request_id,
            priority=asked.priority,
            position_strategy=asked.position_strategy,
            chunk_context=asked.chunk_context,
            note=composed.note,
            continuation=composed.continuation,
            on_record=None if asked.trace is None else partial(asked.trace.add, index),
        )
        for index, composed in enumerate(asked.prompts)
    ]
    admission = asked.runner.admission
    async with aclosing(_merged(sources)) as merged:
        async for index, delta in merged:
            if any(answer.finish_reason == "abort" for answer in delta.answers):
                raise admission.unavailable("the server ended this request before its answer was complete")
            yield index, delta


async def whole_answers(asked: GenerationRequest, new_answer: Callable[[], A]) -> tuple[list[A], UsageTotals]:
    """Returns all answers, by the index of their choice, and their usage."""
    answers = [new_answer() for _ in range(len(asked.prompts) * asked.params.n)]
    tally = asked.tally()
    async with aclosing(deltas(asked)) as news:
        async for prompt_index, delta in news:
            for answer in delta.answers:
                answers[asked.index_of(prompt_index, answer)].add(answer)
            tally.add(prompt_index, delta)
    return answers, tally


async def reply_of(write: Callable[[], R], answers: Iterable[WholeAnswer]) -> R | Response:
    """Returns a whole reply; one with many log probabilities has megabytes, and is written beside the event loop."""
    if sum(_num_candidates(answer.logprobs) for answer in answers) <= MAX_WRITTEN_AT_ONCE:
        return write()
    body = await asyncio.to_thread(lambda: write().model_dump_json(exclude_unset=True, by_alias=True))
    return Response(body, media_type="application/json")


async def pieces_of(write: Callable[[], T], answer: AnswerDelta | WholeAnswer) -> T:
    """Returns the stream events of a delta; a long one for a slow reader is written beside the event loop."""
    if _num_candidates(answer.logprobs or ()) <= MAX_WRITTEN_AT_ONCE:
        return write()
    return await asyncio.to_thread(write)


def _num_candidates(logprobs: Sequence[dict[int, Logprob]]) -> int:
    return len(logprobs) * len(logprobs[0]) if logprobs else 0


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Merges several sources in order of arrival; closing it closes them all."""
    pending = {asyncio.ensure_future(anext(source)): index for index, source in enumerate(sources)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield index, item
                pending[asyncio.ensure_future(anext(sources[index]))] = index
    finally:
        with anyio.CancelScope(shield=True):
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for source in sources:
                await source.aclose()
