"""Route /v1/chat/completions: conversations over documents."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from kvmosaic.engine import AnswerDelta
from kvmosaic.sampling import SamplingParams
from kvmosaic.server.admission import RequestThreads
from kvmosaic.server.execution import PromptRunner
from kvmosaic.server.generation.answers import (
    Ending,
    GenerationRequest,
    WholeAnswer,
    deltas,
    ending_of,
    pieces_of,
    reply_of,
    whole_answers,
)
from kvmosaic.server.generation.prompts import EncodedPrompt, PromptSources, answering_model, chat_prompt
from kvmosaic.server.generation.sampling_fields import prepared
from kvmosaic.server.generation.tool_answers import ToolAnswer, ToolAnswers, read_delta, tool_answers
from kvmosaic.server.generation.usage import UsageTotals
from kvmosaic.server.openai.chat_request import ChatRequest
from kvmosaic.server.openai.logprobs import ChatLogprobs, TokenBytes, chat_logprobs
from kvmosaic.server.openai.replies import (
    AnswerMessage,
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatEnding,
    ChunkChoice,
    FunctionDelta,
    FunctionReply,
    MessageDelta,
    ToolCallReply,
)
from kvmosaic.server.openai.request_fields import StreamOptions, check_stream_options
from kvmosaic.server.openai.response_schemas import ResponseRequest
from kvmosaic.server.openai.tool_fields import named_by_field
from kvmosaic.server.tenants import Tenant, current_tenant
from kvmosaic.tools import CallEvent, CallParser, CallStart, ContentText, ReasoningText
from kvmosaic.web.errors import error_replies, streamed
from kvmosaic.web.json_body import route_class, warn
from kvmosaic.web.sse import DONE, event, open_stream

ROUTE = "/v1/chat/completions"


def router(sources: PromptSources, runner: PromptRunner, threads: RequestThreads) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(route_class=route_class(strict=sources.settings.strict), tags=["answers"])
    token_bytes = TokenBytes(sources.tokenizer)

    @routes.post(
        ROUTE,
        response_model=ChatCompletion,
        response_model_exclude_unset=True,
        responses={200: streamed("The answer, or its chunks."), **error_replies()},
    )
    async def create_chat_completion(
        request: Request, body: ChatRequest, tenant: Annotated[Tenant, Depends(current_tenant)]
    ) -> ChatCompletion | Response:
        """Answers a conversation from documents, in one reply or in chunks (`stream`)."""
        model = answering_model(sources, request, body.model)
        check_stream_options(body.stream, body.stream_options)
        runner.admission.check(tenant)
        prompts, params, tools = await threads.run(tenant.name, read_conversation, sources, tenant, body)
        if body.functions:
            warn(request, "'functions' and 'function_call' are an old form, read as 'tools' and 'tool_choice'")
        asked = GenerationRequest.by(runner, tenant, ROUTE, request, body, (prompts, params))
        writer = ChatWriter(asked, model, token_bytes, tools, is_old=bool(body.functions))
        if body.stream:
            return await open_stream(request, writer.chunks(body.stream_options or StreamOptions()))
        answers, tally = await whole_answers(asked, WholeAnswer if tools is None else tools.whole)
        return await reply_of(lambda: writer.whole(answers, tally), answers)

    return routes


def read_conversation(
    sources: PromptSources, tenant: Tenant, body: ChatRequest | ResponseRequest
) -> tuple[list[EncodedPrompt], SamplingParams, ToolAnswers | None]:
    """Returns the prompt of a conversation, and how it is answered.

    Raises:
        ApiError: 400, tools that cannot be called.
        InvalidMessages, InvalidSampling: and what `chat_prompt` raises.
    """
    with named_by_field():
        request = body.tool_request()
        params = body.sampling_params(sources.sampling_defaults())
        prompts = [chat_prompt(sources, tenant, body, body.plain_messages(), body.rendering())]
        tools = None if request is None else tool_answers(sources.llm, request, params)
        return prompts, prepared(sources.llm, params if tools is None else tools.params), tools


class ChatWriter:
    """Writes the answers of one request in the shape of /v1/chat/completions."""

    def __init__(
        self,
        asked: GenerationRequest,
        model: str,
        token_bytes: TokenBytes,
        tools: ToolAnswers | None = None,
        *,
        is_old: bool = False,
    ) -> None:
        """Creates a writer for a request; `is_old`: a call is written as `function_call`."""
        self._asked = asked
        self._is_old = is_old
        self._tools = tools
        self._parsers: dict[int, CallParser] = {}
        self._token_bytes = token_bytes
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{asked.request_id}",
            "created": asked.created,
            "model": model,
        }

    def whole(self, answers: Sequence[WholeAnswer], tally: UsageTotals) -> ChatCompletion:
        """Returns one reply with all answers."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return ChatCompletion(
            **self._head,
            object="chat.completion",
            choices=choices,
            usage=tally.usage(),
            kvmosaic=tally.report(),
        )

    async def chunks(self, options: StreamOptions) -> AsyncGenerator[str, None]:
        """Yields events: for each answer its role, then text as it arrives, then its finish reason; usage last."""
        tally, begun = self._asked.tally(), set[int]()
        num_left = self._asked.params.n
        async with aclosing(deltas(self._asked)) as news:
            async for prompt_index, delta in news:
                tally.add(prompt_index, delta)
                for answer in delta.answers:
                    num_left -= answer.finish_reason is not None
                    is_first, is_last = answer.index not in begun, not num_left
                    write = partial(self._pieces, answer, tally, options, is_first=is_first, is_last=is_last)
                    for piece in await pieces_of(write, answer):
                        yield piece
                    begun.add(answer.index)
        if options.include_usage:
            chunk = self._chunk([])
            chunk.usage, chunk.kvmosaic = tally.usage(), tally.report()
            yield event(chunk)
        yield DONE

    def _pieces(
        self, answer: AnswerDelta, tally: UsageTotals, options: StreamOptions, *, is_first: bool, is_last: bool
    ) -> list[str]:
        """Returns the events of one delta."""
        pieces = []
        for choice in self._news(answer, is_first=is_first):
            chunk = self._chunk([choice])
            if choice.finish_reason and is_last and not options.include_usage:
                chunk.kvmosaic = tally.report()
            if options.continuous_usage_stats:
                chunk.usage = tally.usage()
            elif options.include_usage:
                chunk.usage = None  # sent as null, as OpenAI does
            pieces.append(event(chunk))
        return pieces

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=choices)

    def _choice(self, index: int, answer: WholeAnswer) -> ChatChoice:
        ending: ChatEnding = answer.finish_reason
        message = AnswerMessage(role="assistant", content=answer.text, refusal=None)
        if isinstance(answer, ToolAnswer):
            ending = self._ending(answer.parser, answer.finish_reason, answer.stop_reason)
            message = message_of(answer, is_old=self._is_old)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(answer.token_ids, answer.logprobs),
            finish_reason=ending,
            stop_reason=answer.stop_reason,
        )

    def _news(self, answer: AnswerDelta, *, is_first: bool) -> list[ChunkChoice]:
        choices = []
        if is_first:
            delta = MessageDelta(role="assistant", content="" if self._tools is None else None)
            choices.append(ChunkChoice(index=answer.index, delta=delta, finish_reason=None))
        logprobs = self._logprobs(answer.token_ids, answer.logprobs or ())
        parser = self._parser_of(answer)
        if parser is None:
            said = [MessageDelta(content=answer.text)] if answer.text else []
        else:
            said = list(message_deltas(read_delta(parser, answer), is_old=self._is_old))
        if logprobs is not None and not said:
            said = [MessageDelta(content="")]
        for delta in said:
            choices.append(ChunkChoice(index=answer.index, delta=delta, logprobs=logprobs, finish_reason=None))
            logprobs = None  # those of all new tokens are in the first chunk
        if (ending := ending_of(answer)) is not None:
            choices.append(
                ChunkChoice(
                    index=answer.index,
                    delta=MessageDelta(),
                    finish_reason=ending if parser is None else self._ending(parser, ending, answer.stop_reason),
                    stop_reason=answer.stop_reason,
                )
            )
        return choices

    def _ending(self, parser: CallParser, ending: Ending, stop_reason: int | str | None) -> ChatEnding:
        """Returns the finish reason of an answer that may have calls."""
        if ending != "stop" or not parser.is_called(stop_reason):
            return ending
        return "function_call" if self._is_old else "tool_calls"

    def _parser_of(self, answer: AnswerDelta) -> CallParser | None:
        """Returns the parser of an answer; None if it cannot call tools."""
        if self._tools is not None and answer.index not in self._parsers:
            self._parsers[answer.index] = self._tools.parser()
        return self._parsers.get(answer.index)

    def _logprobs(self, token_ids: Any, logprobs: Any) -> ChatLogprobs | None:
        number = self._asked.params.logprobs
        if number is None or not logprobs:
            return None
        entries = zip(token_ids, logprobs, strict=True)
        return ChatLogprobs(content=chat_logprobs(entries, number, self._token_bytes))


def message_of(answer: ToolAnswer, *, is_old: bool) -> AnswerMessage:
    """Returns the message of an answer: content is null where there are calls only; `is_old`: as for `ChatWriter`."""
    calls = [
        ToolCallReply(id=call.id, type="function", function=FunctionReply(name=call.name, arguments=call.arguments))
        for call in answer.parsed.calls
    ]
    content = answer.parsed.content
    message = AnswerMessage(role="assistant", content=content or None if calls else content, refusal=None)
    if calls and is_old:
        message.function_call = calls[0].function
    elif calls:
        message.tool_calls = calls
    if answer.parsed.reasoning:
        message.reasoning_content = answer.parsed.reasoning
    return message


def message_deltas(events: list[CallEvent], *, is_old: bool) -> Iterator[MessageDelta]:
    """Yields events in OpenAI's shape: the name of a call first, then its arguments in pieces."""
    for each in events:
        if isinstance(each, ContentText):
            yield MessageDelta(content=each.text)
        elif isinstance(each, ReasoningText):
            yield MessageDelta(reasoning_content=each.text)
        elif isinstance(each, CallStart):
            function = FunctionDelta(name=each.name, arguments="")
            call = CallDelta(index=each.index, id=each.id, type="function", function=function)
            yield MessageDelta(function_call=function) if is_old else MessageDelta(tool_calls=[call])
        else:
            function = FunctionDelta(arguments=each.text)
            call = CallDelta(index=each.index, function=function)
            yield MessageDelta(function_call=function) if is_old else MessageDelta(tool_calls=[call])
