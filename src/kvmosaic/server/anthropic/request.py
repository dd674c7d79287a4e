"""Request bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from kvmosaic.api.fields import Body, Ignored, NumTokens, Only, Plain, StopTexts, Text, Variables, example
from kvmosaic.errors import InvalidDocument, InvalidMessages
from kvmosaic.prompt import Document
from kvmosaic.prompt.found_documents import FoundDocument, PlacedDocuments, content_key, placed_content
from kvmosaic.prompt.message import MAX_MESSAGES
from kvmosaic.prompt.preamble import is_marked
from kvmosaic.sampling import SamplingParams, StructuredOutputs
from kvmosaic.server.anthropic.blocks import (
    Content,
    ReadablePart,
    TextBlock,
    TextBlocks,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from kvmosaic.server.generation.sampling_fields import Defaults, GenerationFields
from kvmosaic.tools import ToolRequest, read_tool_request
from kvmosaic.tools.request import MAX_TOOL_CHARACTERS, MAX_TOOLS, NAME_PATTERN
from kvmosaic.web.errors import ApiError

THINKING_VARIABLE = "enable_thinking"
"""The variable by which chat templates switch thinking on and off."""


class Message(Body):
    """One message; neighbours with the same role are read as one."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Thinking(Body):
    """Whether the model thinks first."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive"],
        Field(description="Ignored with a warning where the model's chat template cannot switch thinking on."),
    ]
    budget_tokens: Ignored = None
    display: Ignored = None


class SchemaFormat(Body):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    json_schema: Annotated[Plain, Field(alias="schema")]


class OutputConfig(Body):
    """The form of the answer."""

    format: SchemaFormat | None = None
    effort: Ignored = None


class CountRequest(GenerationFields):
    """A body of /v1/messages/count_tokens: that of /v1/messages, of which only the prompt matters."""

    model_config = example(
        messages=[{"role": "user", "content": "Where does the ferry go?"}],
        documents=[{"id": "ferry", "text": "The ferry goes to Oak Island."}],
    )

    max_tokens: NumTokens | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[Text | TextBlocks | None, Field(description="The first mark in it ends the preamble.")] = None
    stop_sequences: StopTexts = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    tools: Annotated[
        Tools | None, Field(description="Functions that the model may call; it reads them in the order of their names.")
    ] = None
    tool_choice: Annotated[
        ToolChoice | None,
        Field(description="any or tool: the answer is a call that keeps to the schema. Default: auto."),
    ] = None
    chat_template_kwargs: Annotated[Variables | None, Field(description="Variables of the chat template.")] = None
    container: Annotated[Any, Only((None,), "code is not run here")] = None
    mcp_servers: Annotated[Any, Only((None, []), "other servers are not called")] = None
    context_management: Annotated[Any, Only((None, {}), "prompts are never cut", matters=False)] = None
    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None
    cache_control: Ignored = None

    def template_options(self, template: str) -> dict[str, Any] | None:
        """Returns variables of a chat template, with thinking switched as the request says."""
        options = dict(self.chat_template_kwargs or {})
        if self.thinking is not None and THINKING_VARIABLE in template:
            options.setdefault(THINKING_VARIABLE, self.thinking.type != "disabled")
        return options or None

    def warning(self, template: str) -> str:
        """What of the request is ignored for this template; empty: nothing."""
        is_thinking = self.thinking is not None and self.thinking.type != "disabled"
        if not is_thinking or THINKING_VARIABLE in template:
            return ""
        return "'thinking' was ignored: this model's chat template cannot switch it on"

    def tool_request(self) -> ToolRequest | None:
        """Returns the tools and how they may be called; None without tools.

        Raises:
            InvalidTools: tools that cannot be called, or a choice that does not go with them.
        """
        plain, choice = None if self.tools is None else [tool.plain() for tool in self.tools], self.tool_choice
        if choice is None:
            return read_tool_request(plain)
        is_named = choice.type == "tool"
        wanted = {"type": "function", "function": {"name": choice.name}} if is_named else _MODES[choice.type]
        return read_tool_request(plain, wanted, not choice.disable_parallel_tool_use)

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Returns the sampling parameters.

        Raises:
            InvalidSampling: values that do not go together.
        """
        return self.sampling(defaults, max_tokens=self.max_tokens)

    def _format(self) -> StructuredOutputs | None:
        form = self.output_config.format if self.output_config else None
        return None if form is None else StructuredOutputs(json=form.json_schema)

    def _stop_texts(self) -> list[str] | None:
        return self.stop_sequences


class MessagesRequest(CountRequest):
    """A body of /v1/messages."""

    model_config = example(
        max_tokens=16,
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "title": "The ferry",
                        "source": {"type": "text", "media_type": "text/plain", "data": "It goes to Oak Island."},
                    },
                    {"type": "text", "text": "Where does the ferry go?"},
                ],
            }
        ],
    )

    max_tokens: Annotated[NumTokens, Field(examples=[16])]


ToolName = Annotated[str, Field(pattern=NAME_PATTERN)]
_MODES = {"auto": "auto", "any": "required", "none": "none"}


class ToolFields(Body):
    """A function that the model may call. Tools that run at Anthropic (another `type`) are refused."""

    name: ToolName
    type: Literal["custom"] | None = None
    description: Annotated[str | None, Field(max_length=MAX_TOOL_CHARACTERS)] = None
    input_schema: Annotated[Plain, Field(description="A JSON schema of an object; its keys are read in this order.")]
    strict: Annotated[bool | None, Field(description="Calls keep to the schema, also where they are optional.")] = None
    defer_loading: Annotated[Any, Only((None, False), "all tools are shown to the model", matters=False)] = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None
    allowed_callers: Ignored = None

    def plain(self) -> dict[str, Any]:
        """Returns the tool as `read_tool_request` reads it."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ToolChoice(Body):
    """Whether the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[ToolName | None, Field(description="With tool: the one that must be called.")] = None
    disable_parallel_tool_use: Annotated[bool | None, Field(description="At most one call in an answer.")] = None


Tools = Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)]


_TEMPLATE_DOCUMENTS = "documents"
"""The variable of chat templates that have a format for documents."""
_FAILED = "Error:"
"""Before what a tool returned that failed, which templates have no field for."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with texts as contents, and their documents.

    A chat template that has a format for documents writes them before the messages. Otherwise they stay at their place
    in the messages, as those in results of tools always do.
    """

    is_in_place: bool
    """Whether documents stay in messages of the user."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    """Documents that go before the messages, in order."""
    places: dict[str, tuple[FoundDocument, ...]] = field(default_factory=dict)
    blank: list[str] = field(default_factory=list)
    """Places of documents without text, which are left out."""

    @property
    def placed(self) -> PlacedDocuments | None:
        """The documents in its messages; None without any."""
        return PlacedDocuments(self.places) if self.places else None

    @property
    def is_continued(self) -> bool:
        """Whether the answer continues the last message, as it does after one of the assistant."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    @property
    def has_turns(self) -> bool:
        """Whether there is a message to be answered."""
        return any(message["role"] != "system" for message in self.messages)

    def add(self, role: str, parts: Sequence[str | Document], **extra: Any) -> None:
        """Appends a message; one that says nothing is left out."""
        if role == "user" and not self.is_in_place:
            self.documents.extend(part for part in parts if isinstance(part, Document))
            parts = [part for part in parts if isinstance(part, str)]
        content, found = placed_content(parts)
        if not content.strip() and not extra.get("tool_calls") and role != "tool":
            return
        if found:
            self.places[content_key(content)] = found
        self.messages.append({"role": role, "content": content, **extra})


def read_conversation(body: CountRequest, template: str) -> Conversation:
    """Returns the conversation of a body, for a chat template.

    Raises:
        ApiError: 400, a document that cannot be used, or a block where it cannot be.
        InvalidMessages: there is nothing to answer.
    """
    conversation = _read(body, is_in_place=_TEMPLATE_DOCUMENTS not in template)
    if not conversation.has_turns and conversation.documents:  # they are all that was said
        conversation = _read(body, is_in_place=True)
    if not conversation.has_turns:
        raise InvalidMessages("there is nothing to answer: the messages hold no text and no document; send one")
    return conversation


def _read(body: CountRequest, *, is_in_place: bool) -> Conversation:
    conversation = Conversation(is_in_place)
    if body.system:
        said = body.system
        system = said if isinstance(said, str) else [block.model_dump(exclude_none=True) for block in said]
        conversation.messages.append({"role": "system", "content": system})
    for role, blocks in _turns(body.messages):
        if role == "assistant":
            _add_answer(conversation, blocks)
        else:
            _add_texts(conversation, role, blocks)
    return conversation


Blocks = list[tuple[int, int, Any]]
"""Blocks of a turn, each with the number of its message and its place there."""


def _turns(messages: Sequence[Message]) -> Iterator[tuple[str, Blocks]]:
    """Yields role and blocks of every turn: messages in a row with the same role."""
    role, blocks = messages[0].role, Blocks()
    for number, message in enumerate(messages):
        if message.role != role:
            yield role, blocks
            role, blocks = message.role, []
        content = message.content
        texts = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        blocks += [(number, place, block) for place, block in enumerate(texts)]
    yield role, blocks


def _add_answer(conversation: Conversation, blocks: Blocks) -> None:
    texts = [block.text for _, _, block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for _, _, block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for _, _, block in blocks if isinstance(block, ToolUseBlock)]
    for number, place, block in blocks:
        if not isinstance(block, TextBlock | ThinkingBlock | ToolUseBlock):
            raise _misplaced(block, number, place, "the user")
    extra: dict[str, Any] = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    if calls:
        extra["tool_calls"] = calls
    conversation.add("assistant", texts, **extra)


def _add_texts(conversation: Conversation, role: str, blocks: Blocks) -> None:
    """Adds results of tools as messages of their own, then the rest as one message."""
    parts = list[str | Document]()
    last = len(blocks) - 1
    for index, (number, place, block) in enumerate(blocks):
        if isinstance(block, ThinkingBlock | ToolUseBlock):
            raise _misplaced(block, number, place, "the assistant")
        if role == "system" and not isinstance(block, TextBlock):
            raise _misplaced(block, number, place, "the user")
        where = f"messages.{number}.content.{place}"
        if isinstance(block, ToolResultBlock):
            conversation.add("tool", _result(conversation, block, where), tool_call_id=block.tool_use_id)
        else:
            marked = isinstance(block, TextBlock) and is_marked({"cache_control": block.cache_control})
            is_document = marked and role == "user" and index != last
            parts.append(_part(conversation, block, where, is_document=is_document))
    conversation.add(role, parts)


def _part(conversation: Conversation, block: ReadablePart, where: str, *, is_document: bool = False) -> str | Document:
    if isinstance(block, TextBlock) and not (is_document and block.text.strip()):
        return block.text
    try:
        document = Document(block.text) if isinstance(block, TextBlock) else block.document()
    except InvalidDocument as error:
        raise ApiError(400, f"{where}: {error}", param=where) from None
    if document is None:
        conversation.blank.append(where)
    return document or ""


def _result(conversation: Conversation, block: ToolResultBlock, where: str) -> list[str | Document]:
    content = block.content or ""
    if isinstance(content, str):
        parts: list[str | Document] = [content]
    else:
        parts = [_part(conversation, each, f"{where}.content.{place}") for place, each in enumerate(content)]
    return [_FAILED, *parts] if block.is_error else parts


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _misplaced(block: Any, number: int, place: int, author: str) -> ApiError:
    where = f"messages.{number}.content.{place}"
    return ApiError(400, f"{where}: a block of type {block.type!r} goes in a message of {author} only", param=where)
