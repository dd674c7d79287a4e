"""Route /v1/completions: texts and token ids, with or without documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Discriminator, Field, Tag

from kvmosaic.api.fields import INTEGRAL, MAX_ANSWER_TOKENS, Only, Text, TokenIds, example
from kvmosaic.engine import AnswerDelta
from kvmosaic.sampling import Logprob, SampledToken, SamplingParams, decode_all, decoded_logprobs
from kvmosaic.server.admission import RequestThreads
from kvmosaic.server.execution import PromptRunner
from kvmosaic.server.generation.answers import (
    GenerationRequest,
    WholeAnswer,
    deltas,
    ending_of,
    pieces_of,
    reply_of,
    whole_answers,
)
from kvmosaic.server.generation.prompts import EncodedPrompt, PromptSources, answering_model, text_prompt
from kvmosaic.server.generation.sampling_fields import Defaults, prepared
from kvmosaic.server.generation.usage import UsageTotals
from kvmosaic.server.openai.logprobs import TextLogprobs, text_logprobs, with_first
from kvmosaic.server.openai.replies import Completion, TextChoice
from kvmosaic.server.openai.request_fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    ChoiceFields,
    StreamOptions,
    check_stream_options,
)
from kvmosaic.server.tenants import Tenant, current_tenant
from kvmosaic.web.errors import ApiError, error_replies, streamed
from kvmosaic.web.json_body import route_class
from kvmosaic.web.sse import DONE, event, open_stream

ROUTE = "/v1/completions"
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_ALL_CHOICES = 512


def _shape(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "texts" if isinstance(first, str) else "ids" if isinstance(first, int | float) else "lists of ids"


_PromptIds = Annotated[TokenIds, Field(min_length=1)]
PromptField = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[_PromptIds, Tag("ids")]
    | Annotated[list[_PromptIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("lists of ids")],
    Discriminator(_shape),
]


class CompletionRequest(ChoiceFields):
    """A body of /v1/completions."""

    model_config = example(prompt="The ferry goes to", max_tokens=16)

    prompt: PromptField
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES, description="Must equal n."), INTEGRAL] = None
    max_tokens: Annotated[
        int | None,
        Field(ge=-1, le=MAX_ANSWER_TOKENS, description="-1: no limit; 0: only the log probabilities of the echo."),
        INTEGRAL,
    ] = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] = None
    echo: Annotated[
        bool | None, Field(description="The prompt before its answer; with logprobs also those of its tokens.")
    ] = False
    suffix: Annotated[Any, Only((None,), "the answer cannot be made to fit a suffix")] = None

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Returns the sampling parameters.

        Raises:
            InvalidSampling: values that do not go together.
        """
        most = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling(defaults, n=self.n or 1, max_tokens=most or 1, logprobs=self.logprobs)

    @property
    def is_scored(self) -> bool:
        """Whether the log probabilities of the prompt's tokens are asked for."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """All prompts, in order."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    def check(self, max_at_once: int) -> None:
        """Refuses contradictory fields, and more prompts than the server ever admits.

        Raises:
            ApiError: 400.
        """
        check_stream_options(self.stream, self.stream_options)
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise ApiError(
                400, f"best_of is {self.best_of} and n is {n}; only equal ones are supported", param="best_of"
            )
        if len(self.prompts) * n > MAX_ALL_CHOICES:
            raise ApiError(400, f"{len(self.prompts)} prompts with n={n}; at most {MAX_ALL_CHOICES} answers", param="n")
        if len(self.prompts) * n > max_at_once:
            many = f"{len(self.prompts)} prompts" + (f" with n={n}" if n > 1 else "")
            message = f"{many}; this server lets {max_at_once} answers in at once: send fewer prompts"
            raise ApiError(400, message, param="prompt")
        if self.is_scored and self.stream:
            raise ApiError(400, "the log probabilities of an echo come in one reply; leave stream out", param="echo")
        if self.max_tokens == 0 and not self.is_scored:
            raise ApiError(400, "max_tokens is 0; it is at least 1 without echo and logprobs", param="max_tokens")


def router(sources: PromptSources, runner: PromptRunner, threads: RequestThreads) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(route_class=route_class(strict=sources.settings.strict), tags=["answers"])

    @routes.post(
        ROUTE,
        response_model=Completion,
        response_model_exclude_unset=True,
        responses={200: streamed("The answers, or their chunks."), **error_replies()},
    )
    async def create_completion(
        request: Request, body: CompletionRequest, tenant: Annotated[Tenant, Depends(current_tenant)]
    ) -> Completion | Response:
        """Continues texts or token ids, in one reply or in chunks (`stream`)."""
        model = answering_model(sources, request, body.model)
        body.check(runner.admission.max_at_once)
        runner.admission.check(tenant)
        read = await threads.run(tenant.name, _read, sources, tenant, body)
        asked = GenerationRequest.by(runner, tenant, ROUTE, request, body, read)
        echoes = await _echoes(asked, body, sources.tokenizer) if body.echo else []
        writer = CompletionWriter(asked, model, echoes)
        if body.stream:
            return await open_stream(request, writer.chunks(body.stream_options or StreamOptions()))
        if body.max_tokens == 0:
            tally, answers = asked.tally(), [WholeAnswer(finish_reason="length")] * (len(echoes) * asked.params.n)
        else:
            answers, tally = await whole_answers(asked, WholeAnswer)
        return await reply_of(lambda: writer.whole(answers, tally), answers)

    return routes


def _read(
    sources: PromptSources, tenant: Tenant, body: CompletionRequest
) -> tuple[list[EncodedPrompt], SamplingParams]:
    params = body.sampling_params(sources.sampling_defaults())
    prompts = [text_prompt(sources, tenant, body, prompt) for prompt in body.prompts]
    if body.is_scored and any(len(composed.prompt.segments) > 1 for composed in prompts):
        raise ApiError(400, "echo with logprobs is for prompts without documents; leave either out", param="echo")
    num_scored = sum(composed.prompt.num_tokens for composed in prompts) if body.is_scored else 0
    return prompts, prepared(sources.llm, params, len(prompts), num_scored)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt before its answer, with the log probabilities of its tokens if they are asked for."""

    text: str
    first: str | None = None
    """The text of the first token, which has none."""
    token_ids: Sequence[int] = ()
    """The other tokens."""
    logprobs: Sequence[dict[int, Logprob]] = ()


async def _echoes(asked: GenerationRequest, body: CompletionRequest, tokenizer: Any) -> list[Echo]:
    decode = partial(decode_all, tokenizer, skip_special_tokens=False)
    texts = [text if isinstance(text, str) else decode(text) for text in body.prompts]
    if not body.is_scored:
        return [Echo(text) for text in texts]
    ids = [composed.prompt.segments[0].token_ids or () for composed in asked.prompts]
    scored: list[Sequence[SampledToken]] = [()] * len(ids)
    long = [index for index, prompt_ids in enumerate(ids) if len(prompt_ids) > 1]
    prompts = [_after_first(asked.prompts[index]) for index in long]
    params = replace(asked.params, n=1)
    async with aclosing(deltas(replace(asked, prompts=prompts, params=params))) as news:
        async for number, delta in news:
            scored[long[number]] = delta.scored

    def echo(text: str, prompt_ids: Sequence[int], tokens: Sequence[SampledToken]) -> Echo:
        logprobs = [decoded_logprobs(tokenizer, token) for token in tokens]
        return Echo(text, decode(prompt_ids[:1]), prompt_ids[1:], logprobs)

    return await asyncio.to_thread(lambda: list(map(echo, texts, ids, scored)))


def _after_first(composed: EncodedPrompt) -> EncodedPrompt:
    """A prompt of the first token, and the others as its continuation."""
    (segment,) = composed.prompt.segments
    first, *others = segment.token_ids or ()
    return replace(
        composed,
        prompt=replace(composed.prompt, segments=(replace(segment, token_ids=(first,)),)),
        continuation=others,
    )


class CompletionWriter:
    """Writes the answers of one request in the shape of /v1/completions."""

    def __init__(self, asked: GenerationRequest, model: str, echoes: Sequence[Echo]) -> None:
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
                text=self._echo(index).text + answer.text,
                logprobs=self._with_echo(index, answer),
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
        text = (self._echo(index).text if is_first else "") + answer.text
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

    def _echo(self, index: int) -> Echo:
        return self._echoes[index // self._asked.params.n] if self._echoes else Echo("")

    def _with_echo(self, index: int, answer: WholeAnswer) -> TextLogprobs | None:
        echo, number = self._echo(index), self._asked.params.logprobs
        if number is None or echo.first is None:
            return self._logprobs(answer.token_ids, answer.logprobs)
        entries = zip((*echo.token_ids, *answer.token_ids), (*echo.logprobs, *answer.logprobs), strict=True)
        place = len(echo.first) if echo.text.startswith(echo.first) else 0  # a token that begins texts has no place
        return with_first(text_logprobs(entries, number, place), echo.first)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], offset: int = 0
    ) -> TextLogprobs | None:
        number = self._asked.params.logprobs
        if number is None or not logprobs:
            return None
        return text_logprobs(zip(token_ids, logprobs, strict=True), number, offset)
