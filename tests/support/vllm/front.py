"""An app that looks like vLLM's to the middleware: it tells the bodies that reach it, and how it was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from kvmosaic.vllm.front.middleware import ComposedDocuments
from kvmosaic.vllm.front.settings import FrontSettings
from support.tokenizers import PLACING_TEMPLATES, make_tokenizer

KEY = {"Authorization": "Bearer sesame"}
REPORT = {
    "composition": "composed (sequential): documents do not see each other",
    "documents": [{"id": "ferry", "action": "moved"}],
    "segments": [],
    "totals": {"cached_tokens": 13, "composed_tokens": 9, "recomputed_tokens": 5},
}


class Renderer:
    """Takes `kv_transfer_params` with "prompt_token_ids", as vLLM 0.32 does for conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self.renderer = SimpleNamespace(tokenizer=tokenizer)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: len(tokenizer), max_model_len=4096)
        self.chat_template = None
        self.default_chat_template_kwargs = {"thinking": False}
        self.trust_request_chat_template = False


class OlderRenderer(Renderer):
    """As vLLM 0.23 keeps it: conversations come as messages only."""

    __module__ = "types"  # the source that is looked at says nothing of token ids


class App:
    """The app behind the middleware, and what reached it."""

    def __init__(
        self,
        template: str | None = PLACING_TEMPLATES["reader"],
        *,
        report: Any = REPORT,
        is_older: bool = False,
        paths: Sequence[str] = (),
        has_own_chunks: bool = False,
    ) -> None:
        self.bodies: list[bytes] = []
        self.ranks: list[str | None] = []
        """The data parallel rank that each of them asked for."""
        self.report = report
        self._has_own_chunks = has_own_chunks
        """Whether the last chunk of each choice has the report, as from vLLM 0.33 on."""
        self.refusal = ""
        answers = [f"/v1/{name}" for name in ("chat/completions", "completions", "responses")]
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                *(Route(path, self._answer, methods=["POST"]) for path in (*answers, *paths)),
            ]
        )
        if is_older:
            self.app.state.openai_serving_render = OlderRenderer(make_tokenizer(template))
        else:
            self.app.state.online_renderer = Renderer(make_tokenizer(template))

    def client(self, **settings: Any) -> TestClient:
        """Somebody who has the key, in front of the middleware."""
        self.app.add_middleware(ComposedDocuments, settings=FrontSettings.of(**settings))
        return TestClient(self.app, headers=KEY)

    @property
    def body(self) -> dict[str, Any]:
        """The last body that reached the app."""
        body: dict[str, Any] = json.loads(self.bodies[-1])
        return body

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the last prompt."""
        is_text = "prompt" in self.body
        ids: list[int] = self.body["prompt"] if is_text else self.body["kv_transfer_params"]["prompt_token_ids"]
        return ids

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": []}) if _is_allowed(request) else _refused()

    async def _answer(self, request: Request) -> Response:
        if not _is_allowed(request):
            return _refused()
        self.bodies.append(await request.body())
        self.ranks.append(request.headers.get("x-data-parallel-rank"))
        body = json.loads(self.bodies[-1])
        if self.refusal:
            return JSONResponse({"error": {"message": self.refusal}}, 400)
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        choices = [{"index": 0, "text": " Oak", "finish_reason": "stop"}] if "prompt" in body else []
        answer = {"id": "cmpl-7", "choices": choices, "usage": {"prompt_tokens": 18}}
        if "kv_transfer_params" in body:
            answer["kv_transfer_params"] = {"kvmosaic": self.report} if self.report else None
        return JSONResponse(answer)

    def _events(self, body: dict[str, Any]) -> Iterator[str]:
        head = {"id": "cmpl-7", "object": "chunk", "created": 1, "model": "m"}
        number = body.get("n") or 1
        for index in range(number):
            yield _event(head, [{"index": index, "delta": {"content": '"finish_reason":"'}, "finish_reason": None}])
        for index in range(number):
            own = {"kv_transfer_params": {"kvmosaic": self.report}} if self._has_own_chunks else {}
            yield _event(head, [{"index": index, "delta": {}, "finish_reason": "stop"}], **own)
        if (body.get("stream_options") or {}).get("include_usage"):
            yield _event({**head, "usage": {"prompt_tokens": 18}}, [])
        yield "data: [DONE]\n\n"


def _event(head: dict[str, Any], choices: list[Any], **own: Any) -> str:
    return f"data: {json.dumps({**head, 'choices': choices, **own}, separators=(',', ':'))}\n\n"


def _is_allowed(request: Request) -> bool:
    return request.headers.get("authorization") == KEY["Authorization"]


def _refused() -> Response:
    return JSONResponse({"error": "Unauthorized"}, 401)
