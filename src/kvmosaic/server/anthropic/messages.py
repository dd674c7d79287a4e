"""Routes /v1/messages and /v1/messages/count_tokens: conversations over documents, in Anthropic's shape."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field
from pydantic_core import from_json

from kvmosaic.api.errors import MESSAGES_ROUTE, ApiError, MessagesError, messages_error
from kvmosaic.api.fields import Reply
from kvmosaic.prompt.document import left_out
from kvmosaic.sampling import SamplingParams
from kvmosaic.server.admission import RequestThreads
from kvmosaic.server.anthropic.request import CountRequest, MessagesRequest, read_conversation
from kvmosaic.server.execution import PromptRunner
from kvmosaic.server.generation.answers import GenerationRequest, deltas, whole_answers
from kvmosaic.server.generation.prompts import (
    BlockDocuments,
    EncodedPrompt,
    PromptSources,
    Rendering,
    answering_model,
    chat_prompt,
)
from kvmosaic.server.generation.sampling_fields import prepared
from kvmosaic.server.generation.tool_answers import Block, BlockAnswer, BlockStep, ToolAnswers, tool_answers
from kvmosaic.server.generation.usage import ReplyReport, UsageTotals
from kvmosaic.server.tenants import Tenant, current_tenant
from kvmosaic.tools import CallStart, ContentText, ReasoningText
from kvmosaic.web.errors import error_replies, streamed
from kvmosaic.web.json_body import route_class, warn
from kvmosaic.web.sse import StreamForm, event, open_stream

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_SHARED = ("system", "chunk")
"""Segment kinds that other requests reuse, whatever follows them."""


class MessagesUsage(Reply):
    """Tokens of a request; the three numbers of input tokens add up to those of the prompt."""

    input_tokens: Annotated[int, Field(description="Computed for this request: messages, and text around documents.")]
    cache_creation_input_tokens: Annotated[
        int, Field(description="Computed now, of the system text and of documents, and kept for other requests.")
    ]
    cache_read_input_tokens: Annotated[int, Field(description="Reused.")]
    output_tokens: int


class TextReply(Reply):
    """A text of the answer."""

    type: Literal["text"]
    text: str
    citations: None = None


class ToolUseReply(Reply):
    """A call of a tool in the answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingReply(Reply):
    """What the model thought, for models with a channel for it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


BlockReply = Annotated[TextReply | ToolUseReply | ThinkingReply, Field(discriminator="type")]


class MessageReply(Reply):
    """A whole reply of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    kvmosaic: ReplyReport | None = None


class BlockDelta(Reply):
    """What is new of a block."""

    type: Literal["text_delta", "input_json_delta", "thinking_delta"]
    text: str | None = None
    partial_json: str | None = None
    thinking: str | None = None


class Ending(Reply):
    """How an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageEvent(Reply):
    """One event of a streamed reply of /v1/messages."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessageReply | None = None
    index: int | None = None
    content_block: BlockReply | None = None
    delta: BlockDelta | Ending | None = None
    usage: MessagesUsage | None = None
    kvmosaic: ReplyReport | None = None


class TokenCount(Reply):
    """A reply of /v1/messages/count_tokens."""

    input_tokens: int


def usage_of(tally: UsageTotals) -> MessagesUsage:
    """Returns the tokens of a request, of which all count as computed until the reuse is known."""
    num_prompt = tally.usage().prompt_tokens
    segments = tally.report().segments
    reused = sum(segment.reused_tokens for segment in segments)
    kept = sum(segment.tokens - segment.reused_tokens for segment in segments if segment.kind in _SHARED)
    return MessagesUsage(
        input_tokens=num_prompt - reused - kept,
        cache_creation_input_tokens=kept,
        cache_read_input_tokens=reused,
        output_tokens=tally.num_answer_tokens,
    )


def messages_error_replies() -> dict[int | str, dict[str, Any]]:
    """The declared errors of these routes."""
    return {status: {**each, "model": MessagesError} for status, each in error_replies().items()}


COUNT_ROUTE = f"{MESSAGES_ROUTE}/count_tokens"
_PING = 'event: ping\ndata: {"type": "ping"}\n\n'


def _error_event(error: ApiError, request_id: str) -> str:
    return f"event: error\ndata: {json.dumps(messages_error(error, request_id))}\n\n"


FORM = StreamForm(waiting=_PING, error=_error_event)


def router(sources: PromptSources, runner: PromptRunner, threads: RequestThreads) -> APIRouter:
    """Returns the routes."""
    routes = APIRouter(route_class=route_class(strict=sources.settings.strict), tags=["answers"])

    @routes.post(
        MESSAGES_ROUTE,
        response_model=MessageReply,
        response_model_exclude_unset=True,
        responses={200: streamed("The answer, or its events."), **messages_error_replies()},
    )
    async def create_message(
        request: Request, body: MessagesRequest, tenant: Annotated[Tenant, Depends(current_tenant)]
    ) -> MessageReply | Response:
        """Answers a conversation over its documents, in one reply or in events (`stream`)."""
        model = answering_model(sources, request, body.model)
        runner.admission.check(tenant)
        if warning := body.warning(sources.chat_template):
            warn(request, warning)
        prompts, params, tools = await threads.run(tenant.name, _read, sources, tenant, body)
        asked = GenerationRequest.by(runner, tenant, MESSAGES_ROUTE, request, body, (prompts, params))
        writer = MessageWriter(asked, model, tools)
        if body.stream:
            return await open_stream(request, writer.events(), FORM)
        (answer,), tally = await whole_answers(asked, partial(BlockAnswer.new, tools))
        return writer.whole(answer, tally)

    @routes.post(COUNT_ROUTE, response_model=TokenCount, responses=messages_error_replies())
    async def count_message_tokens(
        request: Request, body: CountRequest, tenant: Annotated[Tenant, Depends(current_tenant)]
    ) -> TokenCount:
        """Counts the tokens of a prompt, without answering it."""
        answering_model(sources, request, body.model)
        composed = await threads.run(tenant.name, _prompt, sources, tenant, body)
        warn(request, *composed.warnings)
        return TokenCount(input_tokens=composed.prompt.num_tokens)

    return routes


def _prompt(sources: PromptSources, tenant: Tenant, body: CountRequest) -> EncodedPrompt:
    conversation, tools = read_conversation(body, sources.chat_template), body.tool_request()
    rendering = Rendering(
        continue_final_message=conversation.is_continued,
        template_options=body.template_options(sources.chat_template),
        tools=() if tools is None else tuple(tools.for_template()),
    )
    blocks = BlockDocuments(conversation.documents, conversation.placed)
    composed = chat_prompt(sources, tenant, body, conversation.messages, rendering, blocks)
    if not conversation.blank:
        return composed
    if sources.settings.strict:
        where = conversation.blank[0]
        raise ApiError(400, f"{where}: a document's text is blank; leave the document out", param=where)
    return replace(composed, warnings=(*composed.warnings, left_out(conversation.blank)))


def _read(
    sources: PromptSources, tenant: Tenant, body: MessagesRequest
) -> tuple[list[EncodedPrompt], SamplingParams, ToolAnswers | None]:
    request = body.tool_request()
    params = body.sampling_params(sources.sampling_defaults())
    prompts = [_prompt(sources, tenant, body)]
    tools = None if request is None else tool_answers(sources.llm, request, params)
    return prompts, prepared(sources.llm, params if tools is None else tools.params), tools


class MessageWriter:
    """Writes the answer of one request in the shape of /v1/messages."""

    def __init__(self, asked: GenerationRequest, model: str, tools: ToolAnswers | None) -> None:
        self._asked = asked
        self._tools = tools
        self._head: dict[str, Any] = {
            "id": f"msg_{asked.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, answer: BlockAnswer, tally: UsageTotals) -> MessageReply:
        """Returns one reply with the answer."""
        stop_reason, stop_sequence = _stop(answer)
        return MessageReply(
            **self._head,
            content=[_block(block) for block in answer.blocks],
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage_of(tally),
            kvmosaic=tally.report(),
        )

    async def events(self) -> AsyncGenerator[str, None]:
        """Yields the events of the answer, in Anthropic's order."""
        tally, answer, has_begun = self._asked.tally(), BlockAnswer.new(self._tools), False
        async with aclosing(deltas(self._asked)) as news:
            async for prompt_index, delta in news:
                tally.add(prompt_index, delta)
                if not has_begun:
                    has_begun = True
                    yield _told(self._begin(tally))
                for new in delta.answers:
                    for step in answer.steps(new):
                        yield _told(_piece(step))
        stop_reason, stop_sequence = _stop(answer)
        yield _told(
            MessageEvent(
                type="message_delta",
                delta=Ending(stop_reason=stop_reason, stop_sequence=stop_sequence),
                usage=usage_of(tally),
                kvmosaic=tally.report(),
            )
        )
        yield _told(MessageEvent(type="message_stop"))

    def _begin(self, tally: UsageTotals) -> MessageEvent:
        message = MessageReply(**self._head, content=[], stop_reason=None, stop_sequence=None, usage=usage_of(tally))
        return MessageEvent(type="message_start", message=message)


def _told(piece: MessageEvent) -> str:
    return event(piece, piece.type)


def _piece(step: BlockStep) -> MessageEvent:
    if step.kind == "begin":
        return MessageEvent(type="content_block_start", index=step.index, content_block=_block(step.block))
    if step.kind == "more":
        return MessageEvent(type="content_block_delta", index=step.index, delta=_delta(step))
    return MessageEvent(type="content_block_stop", index=step.index)


def _block(block: Block) -> BlockReply:
    if isinstance(block.event, CallStart):
        return ToolUseReply(type="tool_use", id=block.event.id, name=block.event.name, input=_read_input(block.text))
    if isinstance(block.event, ReasoningText):
        return ThinkingReply(type="thinking", thinking=block.text, signature="")
    return TextReply(type="text", text=block.text, citations=None)


def _stop(answer: BlockAnswer) -> tuple[StopReason, str | None]:
    """Why the answer ended, and the stop text that ended it."""
    if answer.finish_reason == "length":
        return "max_tokens", None
    if answer.is_called:
        return "tool_use", None
    if isinstance(answer.stop_reason, str):
        return "stop_sequence", answer.stop_reason
    return "end_turn", None


def _delta(step: BlockStep) -> BlockDelta:
    if isinstance(step.block.event, ContentText):
        return BlockDelta(type="text_delta", text=step.text)
    if isinstance(step.block.event, ReasoningText):
        return BlockDelta(type="thinking_delta", thinking=step.text)
    return BlockDelta(type="input_json_delta", partial_json=step.text)


def _read_input(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call; of one that was cut off, the complete ones."""
    try:
        read = from_json(arguments, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
