"""Route /v1/completions: texts and token ids, with or without documents."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from kvmosaic.engine import AnswerDelta
from kvmosaic.sampling import Logprob, SamplingParams
from kvmosaic.server.admission import RequestThreads
from kvmosaic.server.execution import PromptRunner
from kvmosaic.server.json_body import ParsedRoute
from kvmosaic.server.openai.completion_request import CompletionRequest
from kvmosaic.server.openai.generation import (
    GenerationRequest,
    WholeAnswer,
    deltas,
    ending_of,
    pieces_of,
    reply_of,
    whole_answers,
)
from kvmosaic.server.openai.logprobs import TextLogprobs, text_logprobs
from kvmosaic.server.openai.models import served_model
from kvmosaic.server.openai.prompts import EncodedPrompt, PromptSources, text_prompt
from kvmosaic.server.openai.replies import Completion, TextChoice, error_replies, streamed
from kvmosaic.server.openai.sampling_fields import (
    StreamOptions,
    prepared,
)
from kvmosaic.server.openai.sse import DONE, event, open_stream
from kvmosaic.server.openai.usage import UsageTotals
from kvmosaic.server.tenants import Tenant, current_tenant

ROUTE = "/v1/completions"


def router(sources: PromptSources, runner: PromptRunner, threads: RequestThreads) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(route_class=ParsedRoute, tags=["answers"])

    @routes.post(
        ROUTE,
        response_model=Completion,
        response_model_exclude_unset=True,
        responses={200: streamed("The answers, or their chunks.", _EXAMPLE), **error_replies()},
    )
    async def create_completion(
        request: Request, body: CompletionRequest, tenant: Annotated[Tenant, Depends(current_tenant)]
    ) -> Completion | Response:
        """Continues texts or token ids, in one reply or in chunks (`stream`)."""
        model = served_model(sources, body.model)
        body.check(runner.admission.max_at_once)
        runner.admission.check(tenant)
        read = await threads.run(tenant.name, _read, sources, tenant, body)
        asked = GenerationRequest.by(runner, tenant, ROUTE, request, body, read)
        writer = CompletionWriter(asked, model, [str(text) for text in body.prompts] if body.echo else [])
        if body.stream:
            return await open_stream(request, writer.chunks(body.stream_options or StreamOptions()))
        answers, tally = await whole_answers(asked)
        return await reply_of(lambda: writer.whole(answers, tally), answers)

    return routes


def _read(
    sources: PromptSources, tenant: Tenant, body: CompletionRequest
) -> tuple[list[EncodedPrompt], SamplingParams]:
    params = prepared(sources.llm, body.sampling_params(sources.sampling_defaults()), len(body.prompts))
    return [text_prompt(sources, tenant, body, prompt) for prompt in body.prompts], params


class CompletionWriter:
    """Writes the answers of one request in the shape of /v1/completions."""

    def __init__(self, asked: GenerationRequest, model: str, echoes: Sequence[str]) -> None:
        """Creates a writer for a request, with the served name and the prompts to echo before their answers, if any."""
        self._asked = asked
        self._echoes = echoes
        self._head: dict[str, Any] = {
            "id": f"cmpl-{asked.request_id}",
            "object": "text_completion",
            "created": asked.created,
            "model": model,
        }

    def whole(self, answers: Sequence[WholeAnswer], tally: UsageTotals) -> Completion:
        """Returns one reply with all answers."""
        choices = [
            TextChoice(
                index=index,
                text=self._echo(index) + answer.text,
                logprobs=self._logprobs(answer.token_ids, answer.logprobs),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
            )
            for index, answer in enumerate(answers)
        ]
        return Completion(**self._head, choices=choices, usage=tally.usage(), kvmosaic=tally.report())

    async def chunks(self, options: StreamOptions) -> AsyncGenerator[str, None]:
        """Yields events: the text of each answer as it arrives, with its finish reason in its last one; usage last."""
        tally = self._asked.tally()
        offsets: dict[int, int] = {}
        num_left = len(self._asked.prompts) * self._asked.params.n
        async with aclosing(deltas(self._asked)) as news:
            async for prompt_index, delta in news:
                tally.add(prompt_index, delta)
                for answer in delta.answers:
                    num_left -= answer.finish_reason is not None
                    index, is_last = self._asked.index_of(prompt_index, answer), not num_left
                    choice = await pieces_of(partial(self._news, index, answer, offsets), answer)
                    if choice is None:
                        continue
                    write = partial(self._piece, choice, tally, options, is_last=is_last)
                    yield await pieces_of(write, answer)
        if options.include_usage:
            yield event(Completion(**self._head, choices=[], usage=tally.usage(), kvmosaic=tally.report()))
        yield DONE

    def _piece(self, choice: TextChoice, tally: UsageTotals, options: StreamOptions, *, is_last: bool) -> str:
        """Returns the event of one delta."""
        chunk = Completion(**self._head, choices=[choice])
        if is_last and choice.finish_reason and not options.include_usage:
            chunk.kvmosaic = tally.report()
        if options.continuous_usage_stats:
            chunk.usage = tally.usage()
        elif options.include_usage:
            chunk.usage = None  # sent as null, as OpenAI does
        return event(chunk)

    def _news(self, index: int, answer: AnswerDelta, offsets: dict[int, int]) -> TextChoice | None:
        is_first = index not in offsets
        text = (self._echo(index) if is_first else "") + answer.text
        logprobs = self._logprobs(answer.token_ids, answer.logprobs or (), offsets.get(index, 0))
        offsets[index] = offsets.get(index, 0) + sum(map(len, logprobs.tokens if logprobs else ()))
        if not text and logprobs is None and answer.finish_reason is None:
            return None
        return TextChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=ending_of(answer),
            stop_reason=answer.stop_reason,
        )

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._asked.params.n] if self._echoes else ""

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], offset: int = 0
    ) -> TextLogprobs | None:
        number = self._asked.params.logprobs
        if number is None or not logprobs:
            return None
        return text_logprobs(zip(token_ids, logprobs, strict=True), number, offset)


_EXAMPLE = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"reader","choices":[{"index":0,'
    '"text":" Oak Island","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\ndata: [DONE]\n\n'
)
