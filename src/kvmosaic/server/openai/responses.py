"""Route /v1/responses: conversations over documents as items, without stored state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi import Response as HttpResponse

from kvmosaic.engine import AnswerDelta
from kvmosaic.sampling import Logprob
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
from kvmosaic.server.generation.prompts import PromptSources, answering_model
from kvmosaic.server.generation.tool_answers import BlockAnswer, BlockStep, ToolAnswers
from kvmosaic.server.generation.usage import UsageTotals
from kvmosaic.server.openai.chat import read_conversation
from kvmosaic.server.openai.logprobs import TokenBytes, TokenLogprob, chat_logprobs
from kvmosaic.server.openai.response_items import (
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningContent,
)
from kvmosaic.server.openai.response_schemas import (
    IncompleteDetails,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseRequest,
    ResponseUsage,
    Status,
)
from kvmosaic.server.tenants import Tenant, current_tenant
from kvmosaic.tools import CallEvent, CallStart, ContentText, ReasoningText
from kvmosaic.web.errors import as_api_error, error_replies, streamed
from kvmosaic.web.json_body import route_class, warn
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
        responses={200: streamed("The answer, or its events."), **error_replies()},
    )
    async def create_response(
        request: Request, body: ResponseRequest, tenant: Annotated[Tenant, Depends(current_tenant)]
    ) -> Response | HttpResponse:
        """Answers a text or a conversation from documents, in one reply or in events (`stream`)."""
        model = answering_model(sources, request, body.model)
        runner.admission.check(tenant)
        if warning := body.warning():
            warn(request, warning)
        prompts, params, tools = await threads.run(tenant.name, read_conversation, sources, tenant, body)
        asked = GenerationRequest.by(runner, tenant, ROUTE, request, body, (prompts, params))
        writer = ResponseWriter(asked, body, model, token_bytes, tools)
        if body.stream:
            return await open_stream(request, writer.events())
        answers, tally = await whole_answers(asked, partial(ItemAnswer.new, tools))
        return await reply_of(lambda: writer.whole(answers[0], tally), answers)

    return routes


_KINDS: dict[type[CallEvent], tuple[str, str]] = {
    ContentText: ("msg", "output_text"),
    ReasoningText: ("rs", "reasoning_text"),
    CallStart: ("fc", "function_call_arguments"),
}
"""How ids of items begin, and events of their texts, by what began a block."""


@dataclass(slots=True, kw_only=True)
class ItemAnswer(BlockAnswer):
    """One answer as items; there is always one."""

    def status(self, index: int) -> ItemStatus:
        """Whether an item that has ended is complete."""
        is_last = index == len(self.blocks) - 1
        is_cut_call = isinstance(self.blocks[index].event, CallStart) and not self.is_called
        return "incomplete" if is_last and (self.finish_reason == "length" or is_cut_call) else "completed"

    def _read(self, delta: AnswerDelta) -> Sequence[CallEvent]:
        is_empty = delta.finish_reason is not None and not self.blocks
        return BlockAnswer._read(self, delta) or ([ContentText("")] if is_empty else [])


class ResponseWriter:
    """Writes the answer of one request in the shape of /v1/responses."""

    def __init__(
        self,
        asked: GenerationRequest,
        body: ResponseRequest,
        model: str,
        token_bytes: TokenBytes,
        tools: ToolAnswers | None,
    ) -> None:
        self._asked = asked
        self._tools = tools
        self._token_bytes = token_bytes
        choice = body.tool_choice or "auto"
        form = body.text.format if body.text and body.text.format else None
        self._head: dict[str, Any] = {
            "id": f"resp_{asked.request_id}",
            "object": "response",
            "created_at": asked.created,
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": asked.params.top_p,
            "truncation": "disabled",
        }

    async def events(self) -> AsyncGenerator[str, None]:
        """Yields the events of one answer, in OpenAI's order, numbered from 0."""
        numbers = count()
        tally, answer, has_begun = self._asked.tally(), ItemAnswer.new(self._tools), False
        try:
            async with aclosing(deltas(self._asked)) as news:
                async for prompt_index, delta in news:
                    tally.add(prompt_index, delta)
                    if not has_begun:
                        has_begun = True
                        for kind in ("response.created", "response.in_progress"):
                            yield self._event({"type": kind, "response": self._response("in_progress")}, next(numbers))
                    for new in delta.answers:
                        write = partial(self._pieces, answer, new, numbers)
                        for piece in await pieces_of(write, new if new.finish_reason is None else answer):
                            yield piece
        except Exception as error:
            if not has_begun:
                raise
            yield self._event(self._failed(error), next(numbers))
            return
        yield await pieces_of(partial(self._ending, answer, tally, next(numbers)), answer)

    def _event(self, fields: dict[str, Any], number: int) -> str:
        return event(ResponseEvent(**fields, sequence_number=number), fields["type"])

    def _ending(self, answer: ItemAnswer, tally: UsageTotals, number: int) -> str:
        response = self.whole(answer, tally)
        return self._event({"type": f"response.{response.status}", "response": response}, number)

    def _pieces(self, answer: ItemAnswer, new: AnswerDelta, numbers: Iterator[int]) -> list[str]:
        """Returns the events of a delta."""
        told = (fields for step in answer.steps(new) for fields in self._told(answer, step, new))
        return [self._event(fields, next(numbers)) for fields in told]

    def _told(self, answer: ItemAnswer, step: BlockStep, new: AnswerDelta) -> list[dict[str, Any]]:
        began, index = step.block.event, step.index
        kind = f"response.{_KINDS[type(began)][1]}"
        placed: dict[str, Any] = {"item_id": self._item_id(began, index), "output_index": index}
        if not isinstance(began, CallStart):
            placed["content_index"] = 0
        if step.kind == "more":
            logprobs = self._logprobs(new.token_ids, new.logprobs or ())
            more = {"logprobs": logprobs} if isinstance(began, ContentText) else {}
            return [{"type": f"{kind}.delta", **placed, "delta": step.text, **more}]
        if step.kind == "begin":
            item = self._item(answer, index, "in_progress")
            added = {"type": "response.output_item.added", "output_index": index, "item": item}
            if isinstance(item, OutputCall):
                return [added]
            part = self._text("", WholeAnswer()) if isinstance(item, OutputMessage) else _reasoning("")
            return [added, {"type": "response.content_part.added", **placed, "part": part}]
        item = self._item(answer, index, answer.status(index))
        done = {"type": "response.output_item.done", "output_index": index, "item": item}
        if isinstance(item, OutputCall):
            return [{"type": f"{kind}.done", **placed, "name": item.name, "arguments": item.arguments}, done]
        said: dict[str, Any] = {"text": item.content[0].text}
        if isinstance(item, OutputMessage):
            said["logprobs"] = item.content[0].logprobs
        return [
            {"type": f"{kind}.done", **placed, **said},
            {"type": "response.content_part.done", **placed, "part": item.content[0]},
            done,
        ]

    def _item_id(self, began: CallEvent, index: int) -> str:
        return f"{_KINDS[type(began)][0]}_{self._asked.request_id}_{index}"

    def _item(self, answer: ItemAnswer, index: int, status: ItemStatus) -> OutputItem:
        """Returns a block as an item, as far as it is there."""
        block = answer.blocks[index]
        began, has_part = block.event, bool(block.parts)
        head: dict[str, Any] = {"id": self._item_id(began, index), "status": status}
        if isinstance(began, CallStart):
            return OutputCall(**head, type="function_call", call_id=began.id, name=began.name, arguments=block.text)
        if isinstance(began, ReasoningText):
            thoughts = [_reasoning(block.text)] if has_part else []
            return OutputReasoning(**head, type="reasoning", summary=[], content=thoughts)
        texts = [self._text(block.text, answer)] if has_part else []
        return OutputMessage(**head, type="message", role="assistant", content=texts)

    def _failed(self, error: Exception) -> dict[str, Any]:
        known = as_api_error(error, self._asked.request_id)
        response = self._response("failed")
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        code: Any = codes.get(known.status, "server_error")
        response.error = ResponseError(code=code, message=known.message)
        return {"type": "response.failed", "response": response}

    def whole(self, answer: ItemAnswer, tally: UsageTotals) -> Response:
        """Returns one reply with the answer."""
        is_cut = answer.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        response.output = [self._item(answer, index, answer.status(index)) for index in range(len(answer.blocks))]
        response.incomplete_details = IncompleteDetails(reason="max_output_tokens") if is_cut else None
        response.usage = ResponseUsage.of(tally.usage())
        response.kvmosaic = tally.report()
        return response

    def _response(self, status: Status) -> Response:
        return Response(**self._head, status=status, output=[], error=None, incomplete_details=None, usage=None)

    def _text(self, text: str, answer: WholeAnswer) -> OutputText:
        logprobs = self._logprobs(answer.token_ids, answer.logprobs)
        return OutputText(type="output_text", text=text, annotations=[], logprobs=logprobs)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]) -> list[TokenLogprob]:
        number = self._asked.params.logprobs
        if number is None:
            return []
        return chat_logprobs(zip(token_ids, logprobs, strict=True), number, self._token_bytes)


def _reasoning(text: str) -> ReasoningContent:
    return ReasoningContent(type="reasoning_text", text=text)
