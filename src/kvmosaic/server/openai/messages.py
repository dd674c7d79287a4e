"""Messages in a request body: a conversation of texts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from kvmosaic.api.fields import Body, Ignored, Name, Only, Plain, Text
from kvmosaic.prompt.message import MAX_MESSAGES

Mark = bool | Plain | None


def _shape(content: Any) -> str:
    return "text" if isinstance(content, str) else "parts"


class TextPart(Body):
    """A part of a message. A mark makes it a segment of its own: see `documents` in the manual."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: Text
    cache_control: Annotated[Mark, Field(examples=[{"type": "ephemeral"}])] = None
    prompt_cache_breakpoint: Annotated[Mark, Field(examples=[{"mode": "explicit"}])] = None
    annotations: Ignored = None
    logprobs: Ignored = None


Content = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES), Tag("parts")],
    Discriminator(_shape),
]


class ChatMessage(Body):
    """One message."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        Field(description="'developer' is 'system' for models whose template does not know it."),
    ]
    content: Content
    name: Name | None = None
    reasoning_content: Text | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Annotated[Any, Only((None,), "only text can be read")] = None
    tool_calls: Annotated[Any, Only((None, []), "tools cannot be called")] = None
    function_call: Annotated[Any, Only((None,), "tools cannot be called")] = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as the prompt encoder reads it."""
        content = self.content
        kept = content if isinstance(content, str) else [part.model_dump(exclude_none=True) for part in content]
        extra = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {"role": self.role, "content": kept, **{key: text for key, text in extra.items() if text is not None}}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
