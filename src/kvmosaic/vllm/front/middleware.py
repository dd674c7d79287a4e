"""ASGI middleware of `vllm serve`: documents in request bodies, and /v1/documents.

On routes of vLLM on which documents cannot be composed they are refused, since vLLM would drop them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmosaic.api.errors import ApiError, error_reply
from kvmosaic.container import limited_call
from kvmosaic.vllm.front.answers import JSONAnswer, Report, StreamAnswer
from kvmosaic.vllm.front.body_prompt import Renderer
from kvmosaic.vllm.front.body_rewrite import (
    COMPLETIONS,
    ROUTES,
    Rewritten,
    Route,
    may_have_documents,
    rewritten,
)
from kvmosaic.vllm.front.documents import DocumentRoutes, open_documents
from kvmosaic.vllm.front.pool_updates import whole_body
from kvmosaic.vllm.front.served_model import find_model
from kvmosaic.vllm.front.settings import FrontSettings
from kvmosaic.vllm.report import SHELF, shelve_reports
from kvmosaic.web.json_body import add_warnings
from kvmosaic.web.request_body import lingering

CPU_SECONDS = 30.0
"""Maximum processor time for reading one request."""
P = ParamSpec("P")
T = TypeVar("T")
_SEND_LESS = " (KVMOSAIC_MAX_BODY_BYTES); send less at once, or store documents with PUT /v1/documents/{id}"


class ComposedDocuments:
    """For `vllm serve --middleware kvmosaic.vllm.ComposedDocuments`.

        client ──▶ ComposedDocuments ──▶ vLLM's own middlewares (keys, …) ──▶ vLLM's routes
                     │ /v1/documents                                            │ receive()
                     └ a body with documents is rewritten when a route reads it ◀┘

    It wraps vLLM's API key check. So a body is read and rewritten only when a route inside that check reads it.
    Requests without documents pass unchanged, and so do their answers.
    """

    def __init__(self, app: ASGIApp, settings: FrontSettings | None = None) -> None:
        """Wraps an app; without settings, reads them from the environment.

        Raises:
            InvalidConfig: an environment variable with an invalid value.
        """
        self.app = app
        self.settings = settings or FrontSettings.from_environment(os.environ)
        self.documents = open_documents(self.settings.store)
        self._routes = DocumentRoutes(self)
        self._renderer: Renderer | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kvmosaic-front")
        self._file_threads = ThreadPoolExecutor(2, thread_name_prefix="kvmosaic-file")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or passes it on."""
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            return await self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        receive, send = lingering(scope, receive, send)
        if self._routes.answers(path, scope):
            return await self._routes(scope, receive, send)
        if scope["method"] != "POST":
            return await self.app(scope, receive, send)
        return await _Exchange(self, path, scope, receive, send).run()

    async def rewritten(self, content: bytes, route: Route, scope: Scope) -> Rewritten | None:
        """Composes the documents of a body; None if it has none.

        Raises:
            ApiError: the body is invalid.
        """
        renderer = partial(self.renderer, scope)
        return await self.in_thread(rewritten, content, route, renderer, self.settings.how)

    def renderer(self, scope: Scope) -> Renderer:
        """The prompt renderer of the served model; created on first use, since vLLM loads the model later.

        Raises:
            ApiError: the model is not loaded yet, or its prompts cannot be rendered here.
        """
        if self._renderer is None:
            model = find_model(scope["app"].state)
            self._renderer = Renderer(model, self.settings.prompts, self.documents)
            shelve_reports(scope["app"].state)
        return self._renderer

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work in a thread, off the event loop, for `CPU_SECONDS` at most.

        Raises:
            TooMuchWork: it took longer.
            Whatever `work` raises.
        """
        limited = partial(limited_call, CPU_SECONDS, partial(work, *args, **kwargs))
        return await asyncio.get_running_loop().run_in_executor(self._threads, limited)

    async def in_file_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work that may wait for minutes in one of the threads for files."""
        return await asyncio.get_running_loop().run_in_executor(self._file_threads, partial(work, *args, **kwargs))


class _Elsewhere(Exception):
    """A body that another route answers."""


class _Exchange:
    """One request whose body may hold documents, and its answer."""

    def __init__(self, front: ComposedDocuments, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._front = front
        self._path = path
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_read = False
        self._refusal: ApiError | None = None
        self._asked: Rewritten | None = None
        self._answer: JSONAnswer | StreamAnswer | None = None
        self._has_begun = False
        self._is_there = False
        self._form = FormCheck(path) if _is_form(scope) else None

    async def run(self) -> None:
        """Lets vLLM answer; if the body is invalid, sends the refusal instead of vLLM's reply."""
        before = {**self._scope, "state": dict(self._scope.get("state") or {})}
        with suppress(ApiError, _Elsewhere):  # our own, unless a middleware in between converted them
            await self._front.app(self._scope, self.receive, self.send)
        if self._asked is not None and self._asked.is_elsewhere:
            await self._ask_elsewhere(before, self._asked.content)
        if self._refusal is not None and not self._has_begun:
            await error_reply(self._refusal, self._path, "")(self._scope, self._receive, self._send)

    async def receive(self) -> Message:
        """The whole body, rewritten if it has documents; afterwards, the client's messages."""
        if self._form is not None:
            return await self._form_part(self._form)
        if self._is_read:
            return await self._receive()
        self._is_read = True
        try:
            content = await whole_body(self._receive, self._front.settings.store.max_body_bytes, _SEND_LESS)
            if content is None:
                return {"type": "http.disconnect"}
            route = ROUTES.get(self._path)
            if route is None:
                await self._front.in_thread(check_no_documents, content, self._path)
            elif may_have_documents(content, self._front.settings.prompts):
                self._asked = await self._front.rewritten(content, route, self._scope)
        except ApiError as refusal:
            self._refusal = refusal
            raise
        if self._asked is not None and self._asked.is_elsewhere:
            raise _Elsewhere
        return {"type": "http.request", "body": self._asked.content if self._asked else content, "more_body": False}

    async def _form_part(self, form: FormCheck) -> Message:
        """The next part of a form, such as one with a recording, which may be larger than a body of JSON."""
        message = await self._receive()
        try:
            form.check(message.get("body", b""))
        except ApiError as refusal:
            self._refusal = refusal
            raise
        return message

    async def _ask_elsewhere(self, scope: Scope, content: bytes) -> None:
        """Forwards to /v1/completions instead; a request that got here has passed the key check."""
        path = scope.get("root_path", "") + COMPLETIONS
        scope = {**scope, "path": path, "raw_path": path.encode()}
        body: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
        self._is_there = True

        async def receive() -> Message:
            return body.pop() if body else await self._receive()

        await self._front.app(scope, receive, self.send)

    async def send(self, message: Message) -> None:
        """Passes the answer on, with the report of a composed prompt in its field."""
        if self._refusal is not None or (self._asked is not None and self._asked.is_elsewhere and not self._is_there):
            return  # vLLM's reply to a body that was withheld
        self._has_begun = True
        if message["type"] == "http.response.start" and self._asked is not None:
            add_warnings(message, self._asked.warnings)
        if message["type"] == "http.response.start" and self._asked is not None and message["status"] == 200:
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            kind = kinds[0].partition(b";")[0].strip().lower() if kinds else b""
            if kind == b"application/json":
                self._answer = JSONAnswer(message, self._asked, take_report)
                return
            if kind == b"text/event-stream":
                self._answer = StreamAnswer(message, self._asked, take_report)
                return
        if self._answer is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        for changed in self._answer.messages(message):
            await self._send(changed)


def _is_form(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name.lower() == b"content-type"]
    return bool(kinds) and kinds[0].lower().startswith(b"multipart/")


def take_report(request_id: str) -> Report | None:
    """Takes the report of a composed request.

    Inside the engine a prompt of /v1/completions is called `cmpl-7-0`, and the first of several answers `0_chatcmpl-7`.
    """
    names = (request_id, f"{request_id}-0", f"0_{request_id}", f"0_{request_id}-0")
    return next((report for name in names if (report := SHELF.take(name)) is not None), None)


_FIELDS = ("documents", "find_documents")
_BLOCKS = ("document", "search_result")
_PROMPTS = ("messages", "prompt", "input", "token_ids")
_RANKING = {
    "/rerank": "query",
    "/v1/rerank": "query",
    "/v2/rerank": "query",
    "/score": "queries",
    "/v1/score": "queries",
}
"""Routes with documents of their own, and the field of what these are compared with."""
_TEMPLATED = "/cohere/v2/chat"
"""Shows the model its documents by the chat template, as text."""
_MAX_HEADER = 512
_FORM_FIELD = re.compile(
    rb'(?i)content-disposition:[^\r\n]{0,256}[; ]name="?(documents|find_documents)(?:\[\])?["\r\n;]'
)


def check_no_documents(content: bytes, path: str) -> None:
    """Refuses a body with documents on any route that does not compose them; any other body passes.

    Raises:
        ApiError: 400, the field or the block, and where documents are composed.
    """
    if not _may_have_documents(content):
        return
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return  # vLLM reports the error best
    if not isinstance(body, dict) or _has_own_documents(body, path):
        return
    name = next((name for name in _FIELDS if body.get(name) not in (None, [], "none")), None)
    name = name or next(_document_blocks(body.get("messages"), "messages"), None)
    if name is not None:
        raise _refusal(name, path)


class FormCheck:
    """Refuses a form with documents, as its parts arrive."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._rest = b""

    def check(self, part: bytes) -> None:
        """Checks the next part.

        Raises:
            ApiError: 400, it has a field of documents.
        """
        text = self._rest + part
        if (found := _FORM_FIELD.search(text)) is not None:
            raise _refusal(found[1].decode().lower(), self._path)
        self._rest = text[-_MAX_HEADER:]


def _refusal(name: str, path: str) -> ApiError:
    return ApiError(
        400,
        f"{name}: documents are not composed on {path} inside vLLM, which would drop them; send them to "
        "/v1/chat/completions, /v1/completions or /v1/responses, or leave them out",
        param=name,
    )


def _has_own_documents(body: Mapping[str, Any], path: str) -> bool:
    """Whether vLLM itself reads the documents of this body."""
    if path == "/invocations":  # answers bodies of any route
        return any(name in body for name in _RANKING.values()) and not any(name in body for name in _PROMPTS)
    return path == _TEMPLATED or _RANKING.get(path) in body


def _may_have_documents(content: bytes) -> bool:
    """Whether a body may have documents; True is always safe, since escapes or UTF-16 could hide anything."""
    return any(sign in content for sign in (b"document", b"search_result", b"\\u", b"\0"))


def _document_blocks(messages: Any, where: str) -> Iterator[str]:
    """The places of documents in messages, in results of tools in them, and in batches of conversations."""
    for number, message in enumerate(_list(messages)):
        if isinstance(message, list):
            yield from _document_blocks(message, f"{where}.{number}")
        content = message.get("content") if isinstance(message, Mapping) else None
        for place, block in enumerate(_list(content)):
            here = f"{where}.{number}.content.{place}"
            if _is_document(block):
                yield here
            inner = block.get("content") if isinstance(block, Mapping) else None
            yield from (f"{here}.content.{index}" for index, part in enumerate(_list(inner)) if _is_document(part))


def _is_document(block: object) -> bool:
    return isinstance(block, Mapping) and block.get("type") in _BLOCKS


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
