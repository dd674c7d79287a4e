"""Honest clients of a soak: every answer is compared with the known one, every promise about documents is held to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
from soak_known import Known, Question, document, event_data, moved_question, response_text, towns_of
from soak_seen import Seen
from soak_server import headers_of

REPLY_SECONDS = 240.0
"""Who waits longer was forgotten."""
BUSY = {"queue_full", "tenant_queue_full", "bodies_full", "too_many_viewers"}
"""Refusals that an honest client may get, and retries."""
STORE_FULL = {"quota_exceeded", "document_store_full"}


class Refused(Exception):
    """A reply that is no answer and no fault; it was counted."""


@dataclass
class World:
    """What all clients share."""

    url: str
    known: Known
    seen: Seen
    pause: float
    """Mean seconds between two requests of one honest client."""
    is_refusing: bool = False
    """Whether an admin lets the server sleep so that it refuses prompts."""
    last_refusing: float = field(default=-1e9)
    """When that ended."""

    def may_refuse(self, begin: float) -> bool:
        """Whether the server slept at some time since `begin`."""
        return self.is_refusing or begin <= self.last_refusing


class HonestClient:
    """One client of a tenant, with documents of its own; asks all kinds of things, one after the other."""

    def __init__(self, world: World, tenant: str, name: str, choose: Random) -> None:
        self.world, self.choose, self.seen = world, choose, world.seen
        self.tenant, self.name = tenant, name
        self._http = httpx.AsyncClient(base_url=world.url, headers=headers_of(tenant), timeout=REPLY_SECONDS)
        self._person = choose.randrange(3)
        self._town = ""
        self._version = 0

    async def run(self) -> None:
        """Until cancelled."""
        actions: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.ask, 6), (self.ask_stored, 4), (self.ask_streamed, 5), (self.leave, 2), (self.converse, 2),
            (self.replace, 5), (self.expire, 1), (self.pin, 1), (self.warm, 1), (self.look, 1),
        ]  # fmt: skip
        names, weights = [action for action, _ in actions], [weight for _, weight in actions]
        async with self._http:
            while True:
                action = self.choose.choices(names, weights)[0]
                try:
                    await action()
                except Refused:
                    await asyncio.sleep(self.world.pause)
                except httpx.HTTPError as failure:
                    self.seen.fault("no reply", action=action.__name__, failure=repr(failure))
                    await asyncio.sleep(1)
                except (KeyError, IndexError, TypeError, ValueError) as failure:
                    self.seen.fault("a reply of another shape", action=action.__name__, failure=repr(failure))
                await asyncio.sleep(self.choose.expovariate(1 / self.world.pause))

    async def ask(self) -> None:
        """A question with its documents, at one of two routes."""
        question = self.choose.choice(self.world.known.questions)
        await self._asked(question, None)

    async def ask_stored(self) -> None:
        """The same over stored documents, some of them."""
        question = self.choose.choice(self.world.known.questions)
        documents: list[dict[str, Any]] = []
        for number in question.people:
            written = document(number)
            if self.choose.random() < 0.7:
                await self._sent("PUT", f"/v1/documents/{written['id']}", content_of(written), allowed=(200, 201))
                documents.append({"id": written["id"]})
            else:
                documents.append({**written, "id": f"inline-{written['id']}"})
        await self._asked(question, documents)

    async def _asked(self, question: Question, documents: list[dict[str, Any]] | None) -> None:
        begin = time.monotonic()
        if self.choose.random() < 0.3:
            reply = await self._sent("POST", "/v1/responses", question.response_body(documents))
            answer = response_text(reply.json())
        else:
            reply = await self._sent("POST", "/v1/chat/completions", question.body(documents))
            answer = reply.json()["choices"][0]["message"]["content"]
        self.seen.took("answer", time.monotonic() - begin)
        self.judge(self.world.known.answers[question], answer, question)

    async def converse(self) -> None:
        """The second turn of a conversation, after the first one."""
        if self.world.known.conversations:
            question = self.choose.choice(self.world.known.conversations)
            first = Question(question.messages[:-2], question.people, question.strategy, "")
            await self._sent("POST", "/v1/chat/completions", first.body())
            await self._asked(question, None)

    async def ask_streamed(self) -> None:
        """An answer token by token."""
        question = self.choose.choice(self.world.known.questions)
        answer = await self._streamed(question, None)
        if answer is not None:
            self.judge(self.world.known.answers[question], answer, question)

    async def leave(self) -> None:
        """A stream that its client stops reading."""
        question = self.choose.choice(self.world.known.questions)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.choose.uniform(0, 0.6)):
                await self._streamed(question, None)
        self.seen.count("left")

    async def _streamed(self, question: Question, documents: list[dict[str, Any]] | None) -> str | None:
        begin, text, last, first = time.monotonic(), "", "", None
        body = question.body(documents) | {"stream": True}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                self._refused(reply, begin)
            async for line in reply.aiter_lines():
                last = line or last
                data = event_data(line)
                if data and "error" in data:
                    self.seen.fault("a stream ended with an error", error=data["error"])
                    return None
                for choice in data["choices"] if data else ():
                    if piece := choice["delta"].get("content"):
                        first = first or time.monotonic()
                        text += piece
        if last != "data: [DONE]":
            self.seen.fault("a stream was cut", last=last)
            return None
        self.seen.took("ttft", (first or time.monotonic()) - begin)
        return text

    async def replace(self) -> None:
        """Writes the client's own document anew, or only asks over it: what it says now is what counts."""
        path, known = f"/v1/documents/{self.name}", self.world.known
        if not self._town or self.choose.random() < 0.6:
            town = self.choose.choice(towns_of(known, self._person))
            content = content_of(document(self._person, town), ttl_seconds=3_600)
            self._town = ""  # whatever comes of this: until it is answered, what is stored is unknown
            reply = await self._sent("PUT", path, content, allowed=(200, 201))
            version = reply.json()["version"]
            self._town = town
            if version <= self._version:
                self.seen.fault("a version that does not grow", before=self._version, after=version)
            self._version = version
        question = moved_question(self._person, self._town)
        reply = await self._sent("POST", "/v1/chat/completions", question.body([{"id": self.name}]))
        self.judge(known.moved[self._person, self._town], reply.json()["choices"][0]["message"]["content"], question)
        stored = (await self._sent("GET", path, None)).json()
        if stored["text"] != document(self._person, self._town)["text"] or stored["version"] != self._version:
            self.seen.fault("a replaced text was shown", stored=stored)

    async def expire(self) -> None:
        """A document of a second or two: there before its time is over, and not afterwards."""
        path, ttl = f"/v1/documents/{self.name}-short", self.choose.choice([1, 2])
        begin = time.monotonic()
        content = content_of(document(self._person), ttl_seconds=ttl)
        await self._sent("PUT", path, content, allowed=(200, 201))
        reply = await self._sent("GET", path, None, allowed=(200, 404))
        if reply.status_code == 404 and time.monotonic() - begin < ttl:
            self.seen.fault("a document went before its time", path=path)
        await asyncio.sleep(ttl + 0.5)
        reply = await self._sent("GET", path, None, allowed=(200, 404))
        if reply.status_code == 200:
            self.seen.fault("a document outlived its time", stored=reply.text)
        body = moved_question(self._person, "").body([{"id": f"{self.name}-short"}])
        reply = await self._sent("POST", "/v1/chat/completions", body, allowed=(200, 404))
        if reply.status_code == 200:
            self.seen.fault("an expired document was read", reply=reply.text)

    async def pin(self) -> None:
        """A pinned document does not expire; it is deleted in the end, and gone then."""
        path = f"/v1/documents/{self.name}-pinned"
        content = content_of(document(self._person), ttl_seconds=1, pinned=True)
        await self._sent("PUT", path, content, allowed=(200, 201))
        await self._sent("POST", f"{path}:warm", {})
        await asyncio.sleep(1.5)
        await self._sent("GET", path, None)
        await self._sent("DELETE", path, None, allowed=(200, 204))
        await self._sent("GET", path, None, allowed=(404,))

    async def warm(self) -> None:
        """Documents computed beforehand."""
        question = self.choose.choice(self.world.known.questions)
        body: dict[str, Any] = {"documents": [document(number) for number in question.people]}
        system = [content for role, content in question.messages if role == "system"]
        await self._sent("POST", "/v1/documents:warm", body | ({"system": system[0]} if system else {}))
        await self._asked(question, None)

    async def look(self) -> None:
        """The list of documents, and one of another tenant, which is not listed."""
        listed = (await self._sent("GET", "/v1/documents?limit=100", None)).json()
        if any(not shown["id"].startswith((self.tenant, *_OURS)) for shown in listed["data"]):
            self.seen.fault("a document of another tenant was listed", listed=listed)
        await self._sent("GET", "/v1/documents/loot", None, allowed=(404,))

    def judge(self, right: str, answer: str, question: Question) -> None:
        """Compares an answer with the known one."""
        if answer == right:
            self.seen.count("right")
        else:
            self.seen.count("wrong")
            self.seen.fault("a wrong answer", right=right, answer=answer, question=question)

    async def _sent(
        self, method: str, path: str, body: dict[str, Any] | None, allowed: tuple[int, ...] = (200,)
    ) -> httpx.Response:
        begin = time.monotonic()
        reply = await self._http.request(method, path, json=body)
        if reply.status_code not in allowed:
            self._refused(reply, begin)
        return reply

    def _refused(self, reply: httpx.Response, begin: float) -> None:
        """Counts a refusal; one that the server had no reason for is a fault."""
        code = code_of(reply)
        self.seen.count(f"refused {reply.status_code} {code}")
        is_full = reply.status_code in (429, 503) and code in BUSY | STORE_FULL
        if not is_full and not (code == "engine_asleep" and self.world.may_refuse(begin)):
            about = {"status": reply.status_code, "asked": f"{reply.request.method} {reply.request.url.path}"}
            self.seen.fault("an honest request was refused", **about, reply=reply.text)
        raise Refused


def content_of(written: dict[str, str], **fields: Any) -> dict[str, Any]:
    """What is stored of a document whose id is in the address."""
    return {name: value for name, value in written.items() if name != "id"} | fields


_OURS = tuple(document(number)["id"] for number in range(6))


def code_of(reply: httpx.Response) -> str:
    """The code of an error in OpenAI's shape."""
    try:
        error = reply.json()["error"]
        return str(error["code"])
    except (ValueError, KeyError, TypeError):
        return "?"
