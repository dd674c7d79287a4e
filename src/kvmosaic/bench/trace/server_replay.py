"""Replay by a running server: the prompts of a trace as chat completions with documents."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from kvmosaic.bench.progress import Watcher
from kvmosaic.bench.trace.prompts import PromptWriter, RequestTexts
from kvmosaic.bench.trace.replay import ReplayRow, Variant, replay
from kvmosaic.bench.trace.trace import Trace
from kvmosaic.console.server_call import fields_of_server, no_kvmosaic

_MAX_REPLY_BYTES = 2**24
_TIMEOUT = 600.0
_CHECK_SECONDS = 30.0


class ServerReplay:
    """Replays with a server at an address; its settings stay as they are.

    The end of the first block is marked as clients mark it, by `cache_control` on a part of the system message.
    """

    name = "server"

    def __init__(self, url: str) -> None:
        self._url = url
        self._run = secrets.token_hex(8)

    def check(self) -> None:
        """Asks for the models of the server, to fail early.

        Raises:
            InvalidConfig: no address of a server.
            ServerError: it cannot be reached, or refuses.
        """
        reply = fields_of_server(self._url, "/v1/models", _CHECK_SECONDS, method="GET", max_bytes=_MAX_REPLY_BYTES)
        if not isinstance(reply.get("data"), list):
            raise no_kvmosaic(self._url)

    def replay(self, trace: Trace, writer: PromptWriter, variant: Variant, watcher: Watcher) -> ReplayRow:
        """Sends the requests one after the other, under a salt of its own, so that nothing is cached before.

        After an interrupt, the figures so far, with `is_complete` off.

        Raises:
            ServerError: it cannot be reached, refuses, or is no kvmosaic server.
        """
        row = ReplayRow(variant.name, variant.about, self.name)
        replay(row, trace, lambda request: self._send(writer.texts(request), variant, row), watcher)
        return row

    def _send(self, texts: RequestTexts, variant: Variant, row: ReplayRow) -> None:
        salt = f"trace-{self._run}-{variant.name}"
        common: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
        path, body = _request(texts, variant)
        reply = fields_of_server(self._url, path, _TIMEOUT, body=common | body, max_bytes=_MAX_REPLY_BYTES)
        try:
            segments = reply["kvmosaic"]["segments"]
            chunks = [each for each in segments if each["kind"] == "chunk"]
            row.add(_tokens(chunks), _tokens(segments))
        except (KeyError, TypeError, ValueError):
            raise no_kvmosaic(self._url) from None


def _request(texts: RequestTexts, variant: Variant) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    if variant.is_plain:
        return "/v1/completions", {"prompt": texts.joined}
    system: Any = texts.system
    if variant.preamble == "first" and "\n" in texts.system:
        first, _, others = texts.system.partition("\n")
        marked = {"type": "text", "text": first, "cache_control": {"type": "ephemeral"}}
        system = [marked, {"type": "text", "text": others}]
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": texts.rest})
    body = {
        "messages": messages,
        "documents": list(texts.documents) or None,
        "chunk_context": variant.chunk_context,
        "documents_order": variant.documents_order,
        "preamble": "auto" if variant.preamble == "auto" else "all",
    }
    return "/v1/chat/completions", body


def _tokens(segments: list[Mapping[str, Any]]) -> tuple[int, int]:
    return sum(int(each["tokens"]) for each in segments), sum(int(each["reused_tokens"]) for each in segments)
