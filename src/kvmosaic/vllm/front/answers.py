"""Reuse reports in answers of vLLM, whose bytes pass through; and its completions as chat answers, for vLLM 0.23."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from kvmosaic.vllm.contract import FIELD
from kvmosaic.vllm.front.body_rewrite import Rewritten

Report = dict[str, Any]
TakeReport = Callable[[str], Report | None]
"""Returns the report of the request with this id, once; None: there is none (yet)."""
Message = MutableMapping[str, Any]
_DONE = b"data: [DONE]"
_OWN_FIELD = f'"{FIELD}"'.encode()
_WHOLE_RESPONSES = (b"event: response.completed", b"event: response.incomplete")
_DETAILS = ("cached_tokens", "composed_tokens", "recomputed_tokens")


def with_report(answer: dict[str, Any], take: TakeReport) -> bool:
    """Moves the report out of `kv_transfer_params`, or adds the one that was taken; returns whether there is one."""
    taken, own = take(str(answer.get("id", ""))), _own_report(answer)
    report = taken if own is None else own
    if not isinstance(report, dict):
        return False
    answer[FIELD] = report
    _add_details(answer.get("usage"), report)
    return True


def _own_report(answer: dict[str, Any]) -> Any:
    """Removes the report from `kv_transfer_params`, and returns it."""
    params = answer.get("kv_transfer_params")
    report = params.pop(FIELD, None) if isinstance(params, dict) else None
    if isinstance(params, dict) and not params:
        answer["kv_transfer_params"] = None
    return report


def _add_details(usage: Any, report: Report) -> None:
    """Splits the prompt tokens in the usage as our own server does: cached, of these in documents, computed."""
    totals = report.get("totals")
    if not isinstance(usage, dict) or not isinstance(totals, dict) or not all(name in totals for name in _DETAILS):
        return
    name = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
    usage[name] = {**(usage.get(name) or {}), **{detail: totals[detail] for detail in _DETAILS}}


class JSONAnswer:
    """Buffers a whole answer until its report is in it."""

    def __init__(self, start: Message, asked: Rewritten, take: TakeReport) -> None:
        self._start = start
        self._is_elsewhere = asked.is_elsewhere
        self._take = take
        self._content = bytearray()

    def messages(self, message: Message) -> list[Message]:
        """Messages to send when vLLM sends a part of the body."""
        self._content += message.get("body", b"")
        if message.get("more_body"):
            return []
        content = self._with_report(bytes(self._content))
        headers = [pair for pair in self._start["headers"] if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(content)).encode()))
        return [{**self._start, "headers": headers}, {"type": "http.response.body", "body": content}]

    def _with_report(self, content: bytes) -> bytes:
        try:
            answer = json.loads(content)
        except ValueError:
            return content
        if not isinstance(answer, dict):
            return content
        with_report(answer, self._take)
        if self._is_elsewhere:
            _as_conversation(answer)
        return _json(answer)


class StreamAnswer:
    """Passes a stream through event by event, without delay, and adds the report to its last chunk.

    The last chunk is the one in which the last choice ends, or the one with the usage. If the report is known only
    later, it is sent in a chunk of its own before `data: [DONE]`.
    """

    def __init__(self, start: Message, asked: Rewritten, take: TakeReport) -> None:
        self._start: list[Message] = [start]
        self._take_shelved = take
        self._own: Any = None
        """Report of an earlier chunk: vLLM 0.33 has one in the last chunk of each choice."""
        self._num_left = asked.num_choices
        self._includes_usage = asked.includes_usage
        self._is_elsewhere = asked.is_elsewhere
        self._head: dict[str, Any] | None = None
        self._rest = b""
        self._is_told = False

    def messages(self, message: Message) -> list[Message]:
        """Messages to send when vLLM sends a part of the body."""
        *events, self._rest = (self._rest + message.get("body", b"")).split(b"\n\n")
        content = b"".join(self._written(event) + b"\n\n" for event in events)
        more = bool(message.get("more_body"))
        if not more:
            content, self._rest = content + self._rest, b""
        start, self._start = self._start, []
        if not content and more and not start:
            return []
        return [*start, {"type": "http.response.body", "body": content, "more_body": more}]

    def _written(self, event: bytes) -> bytes:
        changed = self._changed(event)
        return _as_chunk(changed) if self._is_elsewhere else changed

    def _take(self, request_id: str) -> Report | None:
        shelved = self._take_shelved(request_id)
        return self._own if isinstance(self._own, dict) else shelved

    def _changed(self, event: bytes) -> bytes:
        if _OWN_FIELD in event and event.startswith(b"data: {"):
            event = self._without_own(event)
        if self._is_told:
            return event
        if event.startswith(_DONE):
            return self._own_chunk() + event
        if event.startswith(_WHOLE_RESPONSES):
            return self._with_report(event, "response")
        if not event.startswith(b"data: {"):
            return event
        if self._head is None:
            self._head = _head_of(event)
        num_ended = event.count(b'"finish_reason":"') + event.count(b'"finish_reason": "')
        self._num_left -= num_ended
        is_usage = self._includes_usage and (b'"choices":[]' in event or b'"choices": []' in event)
        is_last = is_usage if self._includes_usage else num_ended > 0 and self._num_left <= 0
        return self._with_report(event) if is_last else event

    def _without_own(self, event: bytes) -> bytes:
        """Removes a report from a chunk; the last one has it in its field."""
        try:
            chunk = json.loads(event.removeprefix(b"data: "))
        except ValueError:
            return event
        own = _own_report(chunk)
        if own is None:
            return event
        self._own = own
        if chunk["kv_transfer_params"] is None:
            del chunk["kv_transfer_params"]
        return _data(chunk)

    def _with_report(self, event: bytes, field: str | None = None) -> bytes:
        name, _, text = event.partition(b"data: ")
        try:
            chunk = json.loads(text)
            answer = chunk if field is None else chunk[field]
        except (ValueError, KeyError):
            return event
        if not isinstance(answer, dict) or not with_report(answer, self._take):
            return event
        self._is_told = True
        return name + _data(chunk)

    def _own_chunk(self) -> bytes:
        chunk: dict[str, Any] = {**(self._head or {}), "choices": []}
        if self._head is None or not with_report(chunk, self._take):
            return b""
        return _data(chunk) + b"\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _data(chunk: Any) -> bytes:
    return b"data: " + _json(chunk)


def _head_of(event: bytes) -> dict[str, Any] | None:
    try:
        chunk = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        return None
    names = ("id", "object", "created", "model")
    return {name: chunk[name] for name in names if name in chunk} if isinstance(chunk, dict) else None


def _as_conversation(answer: dict[str, Any]) -> None:
    """Converts a whole answer of /v1/completions to the chat format."""
    if "choices" not in answer:
        return
    answer["object"] = "chat.completion"
    answer["choices"] = [
        {**_ending(choice), "message": {"role": "assistant", "content": choice.get("text", "")}}
        for choice in answer["choices"]
    ]


def _as_chunk(event: bytes) -> bytes:
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
    return _data(chunk)


def _ending(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": choice.get("index", 0),
        "logprobs": None,
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
    }
