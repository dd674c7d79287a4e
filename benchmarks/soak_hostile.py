"""Hostile clients of a soak: the attacks of `tests/attack`, fuzzed bodies, and connections that are held.

Nothing they send may be answered with a failure of the server's own; what it costs the others is seen by the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
from soak_honest import World, code_of
from soak_server import headers_of, key_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.attack import Attack
from support.fuzz import Fuzzer

ATTACK_SECONDS = 300.0
EXPECTED = {"engine_asleep", "too_many_viewers"}
"""Codes of 503 that a server has reasons for; the first only while it sleeps."""
ENDLESS = {"prompt": "The ferry goes", "max_tokens": 4_000, "ignore_eos": True, "stream": True, "n": 64}
GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
    b"GET / HTTP/9.9\r\n\r\n",
    b"\r\n\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 3_000,
    b"POST /tokenize HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    b"GET /%zz?%00 HTTP/1.1\r\nHost: [\r\n\r\n",
]


class HostileClient:
    """One client of a hostile tenant: does its worst, waits a little, and comes again."""

    def __init__(self, world: World, tenant: str, attacks: list[Attack], choose: Random, pause: float) -> None:
        self.world, self.tenant, self.choose, self.pause = world, tenant, choose, pause
        self.seen = world.seen
        self._attacks = attacks
        self._fuzzer = Fuzzer(choose)
        place = urlsplit(world.url)
        self._place = (place.hostname or "127.0.0.1", place.port or 80)

    async def run(self) -> None:
        """Until cancelled."""
        actions: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.attack, 4), (self.fuzz, 6), (self.dribble, 2), (self.hold, 2), (self.endless, 3),
            (self.push, 2), (self.guess, 2), (self.fill, 2), (self.deaf, 1), (self.babble, 2),
        ]  # fmt: skip
        names, weights = [action for action, _ in actions], [weight for _, weight in actions]
        limits = httpx.Limits(max_connections=32, max_keepalive_connections=2)
        timeout = httpx.Timeout(ATTACK_SECONDS)
        async with httpx.AsyncClient(base_url=self.world.url, timeout=timeout, limits=limits) as self._http:
            while True:
                action = self.choose.choices(names, weights)[0]
                self.seen.count(f"hostile: {action.__name__}")
                try:
                    await action()
                except httpx.TimeoutException:
                    self.seen.fault("no reply", action=f"hostile {action.__name__}")
                except (httpx.HTTPError, OSError):
                    self.seen.count("hostile: cut off")
                await asyncio.sleep(self.choose.expovariate(1 / self.pause))

    async def attack(self) -> None:
        """One of the files, in each of its copies at once."""
        attack = self.choose.choice(self._attacks)
        headers = {} if attack.sender == "anonymous" else headers_of(self.tenant)
        sent = [request for request in attack.requests for _ in range(request.times)]
        await asyncio.gather(
            *[
                self._sent(
                    request.method,
                    request.path,
                    f"attack {attack.name}",
                    content=request.body,
                    headers={"Content-Type": request.content_type, **headers},
                )
                for request in sent
            ]
        )

    async def fuzz(self) -> None:
        """Bodies that are almost right."""
        for _ in range(10):
            case = self._fuzzer.case()
            headers = {name: value for name, value in case.headers.items() if name.lower() not in _FRAMING}
            sent = {
                name.encode(): value.encode("latin-1") for name, value in {**headers, **headers_of(self.tenant)}.items()
            }
            with contextlib.suppress(httpx.LocalProtocolError):
                await self._sent(
                    case.method, case.path, f"fuzzed body {case.body[:300]!r}", content=case.body, headers=sent
                )
            await asyncio.sleep(0.05)

    async def dribble(self) -> None:
        """A body that comes a byte at a time, for longer than bodies may take or not."""
        async with self._connected() as writer:
            writer.write(self._head(100_000))
            end = time.monotonic() + self.choose.choice([3, 10, 75])
            while time.monotonic() < end and not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.2)

    async def hold(self) -> None:
        """Connections with half a head, half a body or nothing, held open."""
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                writer = await stack.enter_async_context(self._connected())
                writer.write(self.choose.choice([b"", b"POST /v1/chat", self._head(2_000_000) + b" " * 50_000]))
            await asyncio.sleep(self.choose.choice([2, 10, 40]))

    async def endless(self) -> None:
        """64 answers without end, left after some seconds."""
        await self._left("/v1/completions", ENDLESS | {"seed": self.choose.randrange(9)}, self.choose.uniform(2, 12))

    async def push(self) -> None:
        """Priorities that only admins may have, and the lowest there is, many at once."""
        body = {"prompt": "The mill grinds", "max_tokens": 40, "ignore_eos": True}
        for priority in (100, 1, 10**9):
            reply = await self._sent(
                "POST",
                "/v1/completions",
                "priority",
                json=body | {"priority": priority},
                headers=headers_of(self.tenant),
            )
            if reply is not None and reply.status_code == 200:
                self.seen.fault("a priority above 0 was granted", priority=priority)
        lowest = [self._left("/v1/completions", body | {"priority": -100, "stream": True}, 5) for _ in range(6)]
        await asyncio.gather(*lowest)

    async def guess(self) -> None:
        """Keys that do not exist, and what only admins may see."""
        key = self.choose.choice(
            [
                "",
                "x" * 2_000,
                "admin",
                key_of("admin")[:-1],
                "' OR 1=1 --",
                "\u00e9".encode("latin-1").decode("latin-1"),
            ]
        )
        for path in ("/v1/documents", "/metrics", "/v1/cache/tree", "/dashboard/events", "/nowhere"):
            reply = await self._sent(
                "GET", path, "unknown key", headers={b"Authorization": b"Bearer " + key.encode("latin-1")}
            )
            if reply is not None and reply.status_code != 401:
                self.seen.fault("an unknown key was not refused", path=path, status=reply.status_code)
        for method, path in (
            ("GET", "/metrics"),
            ("POST", "/sleep"),
            ("POST", "/wake_up"),
            ("POST", "/v1/documents:sleep"),
        ):
            reply = await self._sent(method, path, "no admin", headers=headers_of(self.tenant))
            if reply is not None and reply.status_code != 403:
                self.seen.fault("what is for admins was given", path=path, status=reply.status_code)

    async def fill(self) -> None:
        """Documents until the store is full, pinned ones among them, and all of them computed."""
        headers = headers_of(self.tenant)
        for _ in range(15):
            number = self.choose.randrange(200)
            text = f"The ferry number {number} goes to Oak Island. " * self.choose.choice([1, 3, 400])
            body = {"text": text, "pinned": self.choose.random() < 0.3, "ttl_seconds": self.choose.choice([1, 5, 60])}
            name = self.choose.choice(["loot", f"loot-{number}"])
            await self._sent("PUT", f"/v1/documents/{name}", "filling the store", json=body, headers=headers)
        await self._sent("POST", "/v1/documents:warm", "filling the cache", json={}, headers=headers)
        listed = await self._sent("GET", "/v1/documents?limit=100", "list", headers=headers)
        for shown in listed.json()["data"] if listed is not None and listed.status_code == 200 else ():
            if shown["pinned"] or self.choose.random() < 0.3:
                await self._sent("DELETE", f"/v1/documents/{shown['id']}", "delete", headers=headers)

    async def deaf(self) -> None:
        """Streams that are asked for and never read."""
        body = b'{"prompt": "The ferry", "max_tokens": 2000, "ignore_eos": true, "stream": true, "n": 8}'
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                writer = await stack.enter_async_context(self._connected())
                writer.write(self._head(len(body), "/v1/completions") + body)
            await asyncio.sleep(self.choose.uniform(2, 10))

    async def babble(self) -> None:
        """What is no HTTP."""
        for _ in range(5):
            async with self._connected() as writer:
                writer.write(self.choose.choice([*GARBAGE, self.choose.randbytes(300)]))
                await asyncio.sleep(0.1)

    def _head(self, num_bytes: int, path: str = "/tokenize") -> bytes:
        """A request up to its body."""
        return (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key_of(self.tenant)}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
        ).encode()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[asyncio.StreamWriter]:
        _, writer = await asyncio.open_connection(*self._place, limit=2**12)
        try:
            yield writer
        finally:
            writer.transport.abort()

    async def _left(self, path: str, body: dict[str, Any], seconds: float) -> None:
        """A stream that is read for so long."""
        headers = headers_of(self.tenant)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._http.stream("POST", path, json=body, headers=headers) as reply:
                self.check(reply.status_code, "endless", "" if reply.status_code == 200 else "unread", time.monotonic())
                async for _ in reply.aiter_raw():
                    pass

    async def _sent(self, method: str, path: str, what: str, **sent: Any) -> httpx.Response | None:
        begin = time.monotonic()
        reply = await self._http.request(method, path, **sent)
        self.check(reply.status_code, what, code_of(reply) if reply.status_code >= 400 else "", begin, reply)
        return reply

    def check(self, status: int, what: str, code: str, begin: float, reply: httpx.Response | None = None) -> None:
        """Counts a reply; a failure of the server's own is a fault."""
        self.seen.count(f"hostile {status}")
        may_sleep = self.world.may_refuse(begin) and code in ("engine_asleep", "unread")
        if status >= 500 and not may_sleep and not (status == 503 and code in EXPECTED - {"engine_asleep"}):
            self.seen.fault("5xx", status=status, what=what, reply="" if reply is None else reply.text)


_FRAMING = {"content-length", "transfer-encoding", "expect", "host"}
"""What httpx says itself."""
