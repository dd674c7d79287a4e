"""Chat fallback for vLLM versions that take token ids on /v1/completions only, such as 0.23."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvmosaic.api.errors import ApiError

_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
}
_OF_CONVERSATIONS = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message",
    "chat_template", "chat_template_kwargs", "reasoning_effort", "include_reasoning", "max_completion_tokens",
    "logprobs", "top_logprobs", "echo", "add_special_tokens",
}  # fmt: skip


def as_completion(body: Mapping[str, Any], token_ids: Sequence[int], max_positions: int | None) -> dict[str, Any]:
    """The body of /v1/completions that samples the same answer.

    Raises:
        ApiError: 501, a field that only vLLM's chat route supports.
    """
    for name, allowed in _REFUSED.items():
        if body.get(name) not in allowed:
            raise ApiError(
                501,
                f"with documents, this vLLM knows no {name} in a conversation; leave {name} out, or update vLLM (0.32 "
                "knows them)",
                param=name,
            )
    changed = {name: value for name, value in body.items() if name not in _OF_CONVERSATIONS}
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most is None and max_positions is not None:
        most = max(max_positions - len(token_ids), 1)
    if most is not None:
        changed["max_tokens"] = most
    return {**changed, "prompt": list(token_ids)}


def as_conversation(answer: dict[str, Any]) -> None:
    """Converts a whole answer of /v1/completions to the chat format."""
    if "choices" not in answer:
        return
    answer["object"] = "chat.completion"
    answer["choices"] = [
        {**_ending(choice), "message": {"role": "assistant", "content": choice.get("text", "")}}
        for choice in answer["choices"]
    ]


def as_chunk(event: bytes) -> bytes:
    """Converts one stream event of /v1/completions to the chat format."""
    if not event.startswith(b"data: {"):
        return event
    try:
        chunk = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        return event
    if "choices" not in chunk:
        return event
    chunk["object"] = "chat.completion.chunk"
    chunk["choices"] = [
        {**_ending(choice), "delta": {"role": "assistant", "content": choice.get("text", "")}}
        for choice in chunk["choices"]
    ]
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _ending(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": choice.get("index", 0),
        "logprobs": None,
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
    }
