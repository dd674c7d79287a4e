"""A router before several `vllm serve` with kvmosaic: a request goes to the replica that has most of its documents.

    python examples/vllm_router.py http://replica-0:8000 http://replica-1:8000 --port 8080

A document that no reply has told of yet has a home all the same: every router computes the same one, so several routers
agree without talking. What a reply's report says (composed here, or bypassed) is remembered and counts more. Busy
replicas are passed over, replicas that cannot be reached are left out for some seconds. Needs what vLLM brings along.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MAX_BODY = 64 * 2**20
MAX_LINE = 2**20
MAX_KNOWN = 200_000
"""Documents whose place is remembered; the one that was not asked for longest is forgotten first."""
HEADROOM = 1.25
"""A replica has at most this many times its equal share of the requests under way."""
PAUSE_SECONDS = 5.0
"""A replica that could not be reached is not tried again before."""
_OF_ONE_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"}


@dataclass(eq=False)
class Replica:
    """One `vllm serve`."""

    url: str
    in_flight: int = 0
    paused_until: float = 0.0


class Router:
    """Chooses replicas. No network in here, so it is tested in microseconds."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"replicas are {list(urls)}; name at least one, and each once")
        self.replicas = [Replica(url.rstrip("/")) for url in urls]
        self._holders: OrderedDict[str, set[Replica]] = OrderedDict()

    def choose(self, documents: Mapping[str, int], without: Sequence[Replica] = ()) -> Replica:
        """The replica for a prompt of these documents (key: length), or the least busy one if it has none."""
        now = time.monotonic()
        left = [replica for replica in self.replicas if replica not in without] or self.replicas
        ready = [replica for replica in left if replica.paused_until <= now] or left
        share = math.ceil(HEADROOM * (1 + sum(replica.in_flight for replica in ready)) / len(ready))
        free = [replica for replica in ready if replica.in_flight < share]
        held = dict.fromkeys(free, 0)
        for key, length in documents.items():
            for replica in self._homes(key, ready):
                if replica in held:
                    held[replica] += length
        return max(free, key=lambda replica: (held[replica], -replica.in_flight))

    def _homes(self, key: str, ready: Sequence[Replica]) -> list[Replica]:
        """Who has a document, as far as it is known, or else who is to have it."""
        if key in self._holders:
            self._holders.move_to_end(key)
            if known := [replica for replica in ready if replica in self._holders[key]]:
                return known
        return [max(ready, key=lambda replica: hashlib.blake2b(f"{key} {replica.url}".encode()).digest())]

    def learn(self, replica: Replica, documents: Mapping[str, int], report: Any) -> None:
        """What a reply's report says: the documents are there now, or it was bypassed and they are not."""
        if not isinstance(report, Mapping):
            return
        for key in documents:
            holders = self._holders.setdefault(key, set())
            (holders.discard if report.get("bypass") else holders.add)(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > MAX_KNOWN:
            self._holders.popitem(last=False)

    def lost(self, replica: Replica) -> None:
        """A replica cannot be reached: what it had is gone, if it was started anew."""
        replica.paused_until = time.monotonic() + PAUSE_SECONDS
        for holders in self._holders.values():
            holders.discard(replica)


def documents_of(body: bytes) -> dict[str, int]:
    """Key and length of every document of a request: a chunk depends on model, system text, salt and its own text."""
    try:
        asked = json.loads(body)
        documents = asked.get("documents") or []
        seen = [message["content"] for message in asked.get("messages") or [] if message.get("role") == "system"]
        about = [asked.get("model"), asked.get("cache_salt"), seen]
        texts = [json.dumps([*about, document], sort_keys=True) for document in documents]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {}  # the replica says what is wrong with it
    return {hashlib.blake2b(text.encode(), digest_size=16).hexdigest(): len(text) for text in texts}


def report_in(line: bytes) -> Any:
    """The report in a reply, or in a line of a streamed one; None if there is none."""
    if b'"kvmosaic"' not in line:
        return None
    try:
        reply = json.loads(line.removeprefix(b"data:"))
        return reply.get("kvmosaic") or (reply.get("kv_transfer_params") or {}).get("kvmosaic")
    except (ValueError, AttributeError, RecursionError):
        return None


def create_app(urls: Sequence[str], transport: httpx.AsyncBaseTransport | None = None) -> Starlette:
    """The router as an ASGI application; `app.state.router` is the `Router`. Tests give a transport of their own."""
    router = Router(urls)
    unlimited = httpx.Limits(max_connections=None)
    waits = httpx.Timeout(None, connect=2.0)
    client = httpx.AsyncClient(transport=transport, timeout=waits, limits=unlimited, trust_env=False)

    async def health(request: Request) -> Response:
        now = time.monotonic()
        up = [replica.url for replica in router.replicas if replica.paused_until <= now]
        return JSONResponse({"replicas": len(router.replicas), "up": len(up)}, status_code=200 if up else 503)

    async def forward(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return JSONResponse({"error": {"message": f"a body has at most {MAX_BODY} bytes"}}, status_code=413)
        documents = documents_of(body) if request.method == "POST" else {}
        tried: list[Replica] = []
        while len(tried) < len(router.replicas):
            replica = router.choose(documents, without=tried)
            tried.append(replica)
            replica.in_flight += 1
            try:
                return await send(request, body, replica, documents)
            except httpx.ConnectError:  # nothing was sent: another one may do it
                replica.in_flight -= 1
                router.lost(replica)
            except BaseException as error:
                replica.in_flight -= 1
                if isinstance(error, httpx.TransportError):
                    router.lost(replica)
                    return JSONResponse({"error": {"message": f"{replica.url} broke off"}}, status_code=502)
                raise
        return JSONResponse({"error": {"message": "no replica can be reached"}}, status_code=503)

    async def send(request: Request, body: bytes, replica: Replica, documents: Mapping[str, int]) -> Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in _OF_ONE_HOP]
        headers = [(name, value) for name, value in headers if name != "accept-encoding"]
        url = httpx.URL(replica.url + request.url.path, query=request.url.query.encode())
        headers.append(("accept-encoding", "identity"))
        reply = await client.send(client.build_request(request.method, url, headers=headers, content=body), stream=True)

        async def parts() -> AsyncIterator[bytes]:
            line, is_long = b"", not documents
            async for part in reply.aiter_raw():
                yield part
                if is_long:
                    continue
                *lines, line = (line + part).split(b"\n")
                for whole in lines:
                    router.learn(replica, documents, report_in(whole))
                is_long = len(line) > MAX_LINE
            if not is_long:
                router.learn(replica, documents, report_in(line))

        async def done() -> None:
            replica.in_flight -= 1
            await reply.aclose()

        passed = {name: value for name, value in reply.headers.items() if name not in _OF_ONE_HOP}
        return _Streamed(parts(), reply.status_code, passed, background=BackgroundTask(done))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
    routes = [Route("/health", health), Route("/{path:path}", forward, methods=methods)]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.router = router
    return app


class _Streamed(StreamingResponse):
    """Ends what belongs to it also when the client goes away in the middle."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        background, self.background = self.background, None
        try:
            await super().__call__(scope, receive, send)
        finally:
            if background is not None:
                await background()


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description="Routes requests to the replica that has their documents.")
    parser.add_argument("replicas", nargs="+", help="addresses, such as http://replica-0:8000")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    uvicorn.run(create_app(options.replicas), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
