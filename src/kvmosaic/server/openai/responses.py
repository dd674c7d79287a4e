"""Route /v1/responses: text in, text out, without stored state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi import Response as HttpResponse

from kvmosaic.engine import AnswerDelta
from kvmosaic.sampling import Logprob, SamplingParams
from kvmosaic.server.admission import RequestThreads
from kvmosaic.server.execution import PromptRunner
from kvmosaic.server.generation.answers import (
    GenerationRequest,
    WholeAnswer,
    deltas,
    pieces_of,
    reply_of,
    whole_answers,
)
from kvmosaic.server.generation.prompts import EncodedPrompt, PromptSources, answering_model, chat_prompt
from kvmosaic.server.generation.sampling_fields import prepared
from kvmosaic.server.generation.usage import UsageTotals
from kvmosaic.server.openai.logprobs import TokenBytes, TokenLogprob, chat_logprobs
from kvmosaic.server.openai.response_schemas import (
    IncompleteDetails,
    OutputMessage,
    OutputText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseRequest,
    ResponseUsage,
    Status,
)
from kvmosaic.server.tenants import Tenant, current_tenant
from kvmosaic.web.errors import as_api_error, error_replies, streamed
from kvmosaic.web.json_body import route_class
from kvmosaic.web.sse import event, open_stream

ROUTE = "/v1/responses"


def router(sources: PromptSources, runner: PromptRunner, threads: RequestThreads) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(route_class=route_class(strict=sources.settings.strict), tags=["answers"])
    token_bytes = TokenBytes(sources.tokenizer)

    @routes.post(
        ROUTE,
        response_model=Response,
        response_model_exclude_unset=True,
        responses={200: streamed("The answer, or its events.", _EXAMPLE), **error_replies()},
    )
    async def create_response(
        request: Request, body: ResponseRequest, tenant: Annotated[Tenant, Depends(current_tenant)]
    ) -> Response | HttpResponse:
        """Answers a text or a conversation from documents, in one reply or in events (`stream`)."""
        model = answering_model(sources, request, body.model)
        runner.admission.check(tenant)
        read = await threads.run(tenant.name, _read, sources, tenant, body)
        asked = GenerationRequest.by(runner, tenant, ROUTE, request, body, read)
        writer = ResponseWriter(asked, body, model, token_bytes)
        if body.stream:
            return await open_stream(request, writer.events())
        answers, tally = await whole_answers(asked, WholeAnswer)
        return await reply_of(lambda: writer.whole(answers[0], tally), answers)

    return routes


def _read(sources: PromptSources, tenant: Tenant, body: ResponseRequest) -> tuple[list[EncodedPrompt], SamplingParams]:
    params = prepared(sources.llm, body.sampling_params(sources.sampling_defaults()))
    return [chat_prompt(sources, tenant, body, body.messages(), body.rendering())], params


class ResponseWriter:
    """Writes the answer of one request in the shape of /v1/responses."""

    def __init__(self, asked: GenerationRequest, body: ResponseRequest, model: str, token_bytes: TokenBytes) -> None:
        self._asked = asked
        self._token_bytes = token_bytes
        self._item_id = f"msg_{asked.request_id}"
        form = body.text.format if body.text and body.text.format else None
        self._head: dict[str, Any] = {
            "id": f"resp_{asked.request_id}",
            "object": "response",
            "created_at": asked.created,
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": asked.params.top_p,
            "truncation": "disabled",
        }

    async def events(self) -> AsyncGenerator[str, None]:
        """Yields the events of one answer, in OpenAI's order, numbered from 0."""
        numbers = count()
        tally, answer, has_begun = self._asked.tally(), WholeAnswer(), False
        try:
            async with aclosing(deltas(self._asked)) as news:
                async for prompt_index, delta in news:
                    tally.add(prompt_index, delta)
                    if not has_begun:
                        has_begun = True
                        for beginning in self._beginnings():
                            yield self._event(beginning, next(numbers))
                    for new in delta.answers:
                        answer.add(new)
                        if piece := await pieces_of(partial(self._piece, new, numbers), new):
                            yield piece
        except Exception as error:
            if not has_begun:
                raise
            yield self._event(self._failed(error), next(numbers))
            return
        for piece in await pieces_of(partial(self._endings, answer, tally, numbers), answer):
            yield piece

    def _event(self, fields: dict[str, Any], number: int) -> str:
        return event(ResponseEvent(**fields, sequence_number=number), fields["type"])

    def _beginnings(self) -> list[dict[str, Any]]:
        item = OutputMessage(id=self._item_id, type="message", role="assistant", status="in_progress", content=[])
        return [
            {"type": "response.created", "response": self._response("in_progress")},
            {"type": "response.in_progress", "response": self._response("in_progress")},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            self._placed("response.content_part.added", part=self._part(WholeAnswer())),
        ]

    def _endings(self, answer: WholeAnswer, tally: UsageTotals, numbers: Iterator[int]) -> list[str]:
        response = self.whole(answer, tally)
        part = response.output[0].content[0]
        endings = [
            self._placed("response.output_text.done", text=part.text, logprobs=part.logprobs),
            self._placed("response.content_part.done", part=part),
            {"type": "response.output_item.done", "output_index": 0, "item": response.output[0]},
            {"type": f"response.{response.status}", "response": response},
        ]
        return [self._event(ending, next(numbers)) for ending in endings]

    def _piece(self, new: AnswerDelta, numbers: Iterator[int]) -> str:
        """Returns the event of a delta; an empty text if it has no text."""
        logprobs = self._logprobs(new.token_ids, new.logprobs or ())
        if not new.text and not logprobs:
            return ""
        text = self._placed("response.output_text.delta", delta=new.text, logprobs=logprobs)
        return self._event(text, next(numbers))

    def _placed(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self._item_id, "output_index": 0, "content_index": 0, **fields}

    def _failed(self, error: Exception) -> dict[str, Any]:
        known = as_api_error(error, self._asked.request_id)
        response = self._response("failed")
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        code: Any = codes.get(known.status, "server_error")
        response.error = ResponseError(code=code, message=known.message)
        return {"type": "response.failed", "response": response}

    def whole(self, answer: WholeAnswer, tally: UsageTotals) -> Response:
        """Returns one reply with the answer."""
        is_cut = answer.finish_reason == "length"
        status: Any = "incomplete" if is_cut else "completed"
        response = self._response(status)
        response.output = [
            OutputMessage(
                id=self._item_id, type="message", role="assistant", status=status, content=[self._part(answer)]
            )
        ]
        response.incomplete_details = IncompleteDetails(reason="max_output_tokens") if is_cut else None
        response.usage = ResponseUsage.of(tally.usage())
        response.kvmosaic = tally.report()
        return response

    def _response(self, status: Status) -> Response:
        return Response(**self._head, status=status, output=[], error=None, incomplete_details=None, usage=None)

    def _part(self, answer: WholeAnswer) -> OutputText:
        logprobs = self._logprobs(answer.token_ids, answer.logprobs)
        return OutputText(type="output_text", text=answer.text, annotations=[], logprobs=logprobs)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]) -> list[TokenLogprob]:
        number = self._asked.params.logprobs
        if number is None:
            return []
        return chat_logprobs(zip(token_ids, logprobs, strict=True), number, self._token_bytes)


_EXAMPLE = (
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","item_id":"msg_1",'
    '"output_index":0,"content_index":0,"delta":" Oak Island","logprobs":[],"sequence_number":4}\n\n'
)
