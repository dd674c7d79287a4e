"""Every route of vLLM's own app that reads a body: documents are composed there, refused, or vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from support.asking import MESSAGES
from support.messages import document, user

from kvmosaic.vllm import ComposedDocuments
from kvmosaic.vllm.front.body_rewrite import ROUTES
from kvmosaic.vllm.front.settings import FrontSettings

TASKS = ("generate", "render", "transcription", "embed", "classify", "token_classify", "token_embed", "score")
BODY = {"model": "m", "messages": MESSAGES, "prompt": "x", "input": "x", "text_1": "x", "text_2": "y"}
OWN = {"/rerank": "query", "/v1/rerank": "query", "/v2/rerank": "query", "/score": "queries", "/v1/score": "queries"}
TEMPLATED = "/cohere/v2/chat"
FORMS = {"/v1/audio/transcriptions", "/v1/audio/translations"}
NAMED = {
    "/v1/messages", "/tokenize", "/v1/chat/completions/render", "/v1/chat/completions/batch", "/pooling",
    "/score", "/generative_scoring", "/v1/embeddings", "/classify", "/invocations", "/inference/v1/generate", *FORMS,
}  # fmt: skip


class CountingApp:
    """vLLM's app, and whether the last request's body was read."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.has_read = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.has_read = False

        async def counted() -> Message:
            self.has_read = True
            return await receive()

        await self._app(scope, counted, send)


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    from types import SimpleNamespace

    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--enable-fault-tolerance"])
        model = SimpleNamespace(get_pooling_task=lambda tasks: "embed", is_cross_encoder=True)
        yield build_app(arguments, TASKS, model)


def paths(app: FastAPI) -> list[str]:
    """The paths of all POST routes, without those that the middleware composes."""
    found = {route.path for route in app.routes if "POST" in (getattr(route, "methods", None) or ())}
    assert found > NAMED, NAMED - found
    return sorted(found - ROUTES.keys())


def ask(app: FastAPI, path: str, body: dict[str, Any]) -> tuple[int, str] | None:
    """Status and text of the reply; None: the route does not read a body."""
    inner = CountingApp(app)
    client = TestClient(ComposedDocuments(inner, FrontSettings.of()), raise_server_exceptions=False)
    if path in FORMS:
        form = {name: value for name, value in body.items() if isinstance(value, str)}
        reply = client.post(path, data={"documents": ["x"], **form}, files={"file": b"RIFF" * 9000})
    else:
        reply = client.post(path.format(response_id="r"), json=body)
    return (reply.status_code, reply.text) if inner.has_read else None


def test_documents_are_dropped_nowhere(app):
    refused = set()
    for path in paths(app):
        told = ask(app, path, {**BODY, "documents": ["A mill."]})
        if told is not None and path != TEMPLATED:
            assert told[0] == 400 and "documents are not composed on" in told[1], (path, told)
            refused.add(path)
    assert refused >= NAMED, NAMED - refused


def test_blocks_of_documents_are_dropped_nowhere(app):
    asked = [user("Hello."), user(document("A mill."))]
    for path in set(paths(app)) - FORMS - {TEMPLATED}:
        for messages in (asked, [asked]):
            told = ask(app, path, {**BODY, "messages": messages})
            assert told is None or (told[0] == 400 and "documents are not composed on" in told[1]), (path, told)


def test_documents_that_vllm_compares_are_its_own(app):
    for path, name in {**OWN, "/invocations": "query"}.items():
        told = ask(app, path, {"model": "m", name: "x", "documents": ["y"]})
        assert told is not None and "not composed" not in told[1], (path, told)
