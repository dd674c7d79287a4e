from __future__ import annotations

import inspect
from dataclasses import fields

import httpx
import pytest
from support.server import RunningServer

from kvmosaic import ChunkCacheConfig, Prompt, errors
from kvmosaic.api.errors import MAX_MESSAGE_CHARACTERS
from kvmosaic.prompt import PromptEncoder
from kvmosaic.web.errors import ApiError, as_api_error

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.KVMosaicError)]


def test_every_error_of_ours_has_a_status() -> None:
    for kind in KINDS:
        told = as_api_error(kind("port 99 is too high; lower it"), "case-7")
        assert 400 <= told.status <= 503, kind
        assert set(told.body["error"]) == {"message", "type", "param", "code"}, kind
        if told.status == 500 and kind is not errors.DocumentDamaged:
            assert "99" not in told.message, kind
        else:
            assert told.message == "port 99 is too high; lower it", kind
        if told.status == 503 or (told.status == 429 and told.type != "insufficient_quota"):
            assert int(told.headers["Retry-After"]) >= 1, kind


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (errors.InvalidDocument, 400, None),
        (errors.PromptTooLong, 400, "context_length_exceeded"),
        (errors.InvalidSampling, 400, None),
        (errors.InvalidConfig, 400, None),
        (errors.InvalidRepair, 400, "invalid_repair"),
        (errors.InvalidPreamble, 400, "invalid_preamble"),
        (errors.UnknownDocument, 404, "document_not_found"),
        (errors.UnknownChunk, 404, "chunk_not_found"),
        (errors.DocumentExists, 409, "document_exists"),
        (errors.ChunkInUse, 409, "chunk_in_use"),
        (errors.QuotaExceeded, 429, "quota_exceeded"),
        (errors.ChunkCacheFull, 400, "chunk_cache_full"),
        (errors.QueueFull, 429, "queue_full"),
        (errors.RequestTooLarge, 400, "request_too_large"),
        (errors.EngineStopped, 503, "engine_stopped"),
        (errors.EngineError, 500, "internal_error"),
    ],
)
def test_statuses_are_those_of_the_contract(kind: type[Exception], status: int, code: str | None) -> None:
    told = as_api_error(kind("why"))
    assert (told.status, told.code) == (status, code)


def test_unexpected_errors_tell_nothing_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    told = as_api_error(ZeroDivisionError("secret"), "case-7")
    assert (told.status, told.message) == (500, "internal error (request case-7)")
    assert "ZeroDivisionError: secret" in caplog.text


def test_messages_are_short_and_can_be_sent() -> None:
    told = ApiError(400, "\ud800" + "x" * 10_000)
    assert len(told.message) == MAX_MESSAGE_CHARACTERS
    assert told.reply().body.decode("utf-8")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nothing", 404, "not_found"), ("POST", "/livez", 405, "method_not_allowed")],
)
def test_unknown_addresses_and_methods_answer_in_the_same_shape(
    server: RunningServer, method: str, path: str, status: int, code: str
) -> None:
    reply = httpx.request(method, server.url + path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    if status == 405:
        assert "GET" in reply.headers["allow"]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            "the chunk 'a' has 9 tokens, the limit is 4; raise max_chunk_tokens, shorten the document, or set "
            "long_chunks='split'",
            "the chunk 'a' has 9 tokens, the limit is 4; send shorter documents, or ask the operator of the server for "
            "--long-chunks split",
        ),
        (
            "5 documents in one prompt (parts of long ones included); raise max_prompt_chunks (4) or send fewer",
            "5 documents in one prompt (parts of long ones included); at most 4 are allowed; send fewer",
        ),
        (
            "more than 4 documents in one prompt; raise max_prompt_chunks or send fewer",
            "more than 4 documents in one prompt; send fewer",
        ),
        ("place documents at position_strategy='shared'", 'place documents at "position_strategy": "shared"'),
    ],
)
def test_clients_are_not_told_names_of_python(told: str, expected: str) -> None:
    assert as_api_error(errors.InvalidPrompt(told)).message == expected


def test_what_the_encoder_says_names_no_setting_of_python() -> None:
    settings = ChunkCacheConfig(max_chunk_tokens=4, max_prompt_chunks=2, long_chunks="error")
    encoder = PromptEncoder(None, settings, vocab_size=99, max_positions=8)
    for system, documents in (([1], [[1] * 5]), ([1], [[1], [2], [3]]), ([1] * 9, [[1]])):
        with pytest.raises(errors.InvalidPrompt) as raised:
            encoder.encode(Prompt.from_tokens(system, documents, [1]))
        message = as_api_error(raised.value).message
        assert not [field.name for field in fields(settings) if field.name in message], message
