"""Tool calling of one model: its format, its control tokens, and the sampling parameters of answers with tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from kvmosaic.errors import InvalidConfig, InvalidSampling, InvalidTools
from kvmosaic.sampling.grammar import check_schema
from kvmosaic.sampling.output import CompletionOutput, RequestOutput
from kvmosaic.sampling.params import SamplingParams
from kvmosaic.sampling.structured import CallGrammar
from kvmosaic.tools import (
    TOOL_FORMATS,
    CallCollector,
    CallParser,
    ControlToken,
    ToolFormat,
    ToolRequest,
    call_grammar,
    detect_tool_format,
)

AUTO = "auto"


class ToolCalling:
    """How one model calls tools."""

    def __init__(self, tokenizer: Any, template: str, tool_format: str = AUTO) -> None:
        """Looks for the format in the chat template, unless it is named.

        Raises:
            InvalidConfig: a format that does not exist.
        """
        if tool_format != AUTO and tool_format not in TOOL_FORMATS:
            names = ", ".join(map(repr, (AUTO, *TOOL_FORMATS)))
            raise InvalidConfig(f"tool_format is {tool_format!r:.80}; choose one of {names}")
        self._format = detect_tool_format(template) if tool_format == AUTO else TOOL_FORMATS[tool_format]
        markers = () if self._format is None else self._format.markers
        special = set(getattr(tokenizer, "all_special_ids", ()))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._reserved = frozenset(token.content for token in added.values() if len(token.content) > 1)
        self._tokens = {
            token.content: ControlToken(token_id, bool(token.special) or token_id in special)
            for token_id, token in added.items()
            if token.content in markers
        }

    @property
    def format(self) -> ToolFormat:
        """The format in which the model writes calls.

        Raises:
            InvalidTools: it is not known.
        """
        if self._format is None:
            raise InvalidTools(
                "the chat template of this model does not say how it calls tools; start with tool_format "
                f"(--tool-format) set to one of {', '.join(TOOL_FORMATS)}, or leave tools out"
            )
        return self._format

    def sampling(self, params: SamplingParams, request: ToolRequest) -> SamplingParams:
        """The parameters of an answer that may call tools: tags stay in its text, and forced calls have a grammar.

        Raises:
            InvalidTools: tools that cannot be called in this model's format, or a schema that is too costly.
            InvalidSampling: tools beside structured outputs.
        """
        if not request.callable_tools:
            return params
        if params.structured_outputs is not None:
            raise InvalidSampling(
                "the form of an answer (response_format, structured_outputs) and tools exclude each other; leave one "
                "out, or set tool_choice to 'none'"
            )
        grammar = call_grammar(self.format, request, self._tokens, self._reserved)
        if grammar is not None:
            for tool in request.callable_tools:
                try:
                    check_schema(tool.schema)
                except InvalidSampling as error:
                    raise InvalidTools(f"tool {tool.name!r} cannot be used: {error}") from None
        names = tuple(tool.name for tool in request.callable_tools)
        return replace(
            params,
            shown_special_token_ids=[token.id for token in self._tokens.values() if token.is_special],
            structured_outputs=None if grammar is None else CallGrammar(grammar, names),
        )

    def parser(self, request: ToolRequest, params: SamplingParams) -> CallParser:
        """A parser of one answer."""
        hidden = [text for text, token in self._tokens.items() if token.is_special]
        return CallParser(
            self.format,
            request.callable_tools,
            hidden=hidden if params.skip_special_tokens else (),
            max_calls=1 if request.is_single else None,
        )


class AnswerReader:
    """Reads the tool calls out of the outputs of one request, whole or so far."""

    def __init__(self, calling: ToolCalling, request: ToolRequest) -> None:
        """Takes the tools of the request; if none may be called, outputs stay as they are."""
        self._calling = calling
        self._request = request

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools as a chat template reads them."""
        return self._request.for_template()

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """The parameters of the answers; see `ToolCalling.sampling`."""
        return self._calling.sampling(params, self._request)

    def read(self, output: RequestOutput, params: SamplingParams) -> RequestOutput:
        """A finished output with its calls."""
        return next(self.read_all([output], params))

    def read_all(self, outputs: Iterable[RequestOutput], params: SamplingParams) -> Iterator[RequestOutput]:
        """Outputs of one request so far, with their calls so far."""
        answers: dict[int, _Answer] = {}
        for output in outputs:
            if not self._request.callable_tools:
                yield output
                continue
            for each in output.outputs:
                if each.index not in answers:
                    answers[each.index] = _Answer(self._calling.parser(self._request, params))
            yield replace(output, outputs=tuple(answers[each.index].read(each) for each in output.outputs))


class _Answer:
    """One answer, and how much of its text was parsed."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser
        self._collector = CallCollector()
        self._num_read = 0
        self._is_finished = False

    def read(self, output: CompletionOutput) -> CompletionOutput:
        self._collector.add(self._parser.feed(output.text[self._num_read :]))
        self._num_read = len(output.text)
        if output.finished and not self._is_finished:
            self._is_finished = True
            self._collector.add(self._parser.finish())
        calls, reason = self._collector.calls, output.finish_reason
        return replace(
            output,
            text=self._collector.content,
            tool_calls=calls,
            finish_reason="tool_calls" if reason == "stop" and self._parser.is_called(output.stop_reason) else reason,
        )
