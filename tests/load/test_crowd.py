"""A crowd of clients that come, wait, read and leave at random, and what is left of them afterwards.

Runs 60 seconds under CI and 15 elsewhere (CROWD_SECONDS sets it).
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx
from support.server import RunningServer, wait_until

CLIENTS = 32
SECONDS = float(os.environ.get("CROWD_SECONDS", "60" if os.environ.get("CI") else "15"))
NAMES = ["Marla Denwick", "Jonas Kelberg", "Talmira Varlow", "Torren Briwick", "Quinra Holmley", "Velna Strand"]
TOWNS = ["Tolbury", "Halport", "Marhaven", "Fenbury", "Rosburg", "Linham"]
DOCUMENTS = [
    {"id": name.split()[0].lower(), "title": name, "text": f"{name} works as a baker. {name} lives in {town}."}
    for name, town in zip(NAMES, TOWNS, strict=True)
]


def body(random: Random) -> tuple[str, dict[str, Any]]:
    """A request, and what tells which others must get the same answer."""
    asked = random.randrange(len(NAMES))
    chosen = sorted({asked, *random.sample(range(len(NAMES)), 3)})
    stored = random.random() < 0.5
    documents = [{"id": DOCUMENTS[i]["id"]} if stored else DOCUMENTS[i] for i in chosen]
    random.shuffle(documents)  # `shared`: the order of documents cannot change the answer
    message = {"role": "user", "content": f"Where does {NAMES[asked]} live?"}
    return f"{asked} of {chosen}", {
        "messages": [message],
        "documents": documents,
        "temperature": 0,
        "max_tokens": 16,
        "position_strategy": "shared",
    }


class Crowd:
    """What the clients saw."""

    def __init__(self) -> None:
        self.answers: dict[str, Counter[str]] = {}
        self.outcomes: Counter[str] = Counter()

    async def client(self, url: str, number: int, until: float) -> None:
        random = Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            while time.monotonic() < until:
                key, request = body(random)
                leaves_after = random.uniform(0, 0.4) if random.random() < 0.4 else None
                ask = self.stream if random.random() < 0.5 else self.reply
                try:
                    await asyncio.wait_for(ask(client, key, request), leaves_after)
                except TimeoutError:
                    self.outcomes["left"] += 1

    async def reply(self, client: httpx.AsyncClient, key: str, request: dict[str, Any]) -> None:
        reply = await client.post("/v1/chat/completions", json=request)
        self.outcomes[f"reply {reply.status_code}"] += 1
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")
        self.note(key, choice["message"]["content"])

    async def stream(self, client: httpx.AsyncClient, key: str, request: dict[str, Any]) -> None:
        text, finish, last = "", None, ""
        async with client.stream("POST", "/v1/chat/completions", json={**request, "stream": True}) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    chunk = httpx.Response(200, content=line[6:]).json()
                    for choice in chunk["choices"]:
                        text += choice["delta"].get("content") or ""
                        finish = choice["finish_reason"] or finish
        self.outcomes["stream"] += 1
        assert last == "data: [DONE]", f"a stream ended with {last!r}"
        assert finish in ("stop", "length")
        self.note(key, text)

    def note(self, key: str, answer: str) -> None:
        self.answers.setdefault(key, Counter())[answer] += 1


def test_crowd_leaves_nothing_behind_and_everybody_gets_the_same_answer() -> None:
    with RunningServer(max_num_seqs=16, chunk_cache_size="2MiB") as server:
        with httpx.Client(base_url=server.url) as client:
            for document in DOCUMENTS:
                client.post("/v1/documents", json=document).raise_for_status()
        tasks_before = server.call(num_tasks)
        crowd = Crowd()
        memory = asyncio.run(run(crowd, server.url))
        check_nothing_is_left(server, tasks_before)
        check_answers(server, crowd)
        print(dict(crowd.outcomes), [f"{number / 2**20:.0f} MiB" for number in memory])
        assert crowd.outcomes["stream"] and crowd.outcomes["left"] and crowd.outcomes["reply 200"]
        middle = len(memory) // 2
        assert memory[-1] - memory[middle] < 48 * 2**20, f"memory grew: {memory}"


async def run(crowd: Crowd, url: str) -> list[int]:
    """Lets the crowd in; returns the process's memory, in bytes, as time goes on."""
    until = time.monotonic() + SECONDS
    clients = [asyncio.create_task(crowd.client(url, number, until)) for number in range(CLIENTS)]
    memory = []
    while not all(client.done() for client in clients):
        await asyncio.sleep(SECONDS / 20)
        memory.append(resident_bytes())
    await asyncio.gather(*clients)
    gc.collect()
    return [*memory, resident_bytes()]


def check_nothing_is_left(server: RunningServer, tasks_before: int) -> None:
    engine = server.services.engine

    def blocks(inner: Any) -> tuple[int, int]:
        inner.check_invariants()
        kv_cache = inner.kv_cache
        users = sum(chunk.ref_count for chunk in kv_cache.chunks())
        return users, kv_cache.request_pool.num_used - kv_cache.statistics().prefix_blocks

    wait_until(lambda: engine.num_running == 0 and engine.num_waiting == 0)
    users, held = server.call(engine.call, blocks)
    assert users == 0, "a chunk is held by nobody that runs"
    assert held == 0, "a block is held by nobody that runs"
    wait_until(lambda: server.call(num_tasks) <= tasks_before)


def check_answers(server: RunningServer, crowd: Crowd) -> None:
    """One answer for each question over each set of documents, the one given alone, cold and warm."""
    assert len(crowd.answers) > 20
    different = {key: answers for key, answers in crowd.answers.items() if len(answers) > 1}
    assert not different
    with RunningServer() as alone, httpx.Client(base_url=alone.url) as client:
        random = Random(5)
        for _ in range(12):
            key, request = body(random)
            request["documents"] = [
                next(known for known in DOCUMENTS if known["id"] == document["id"]) for document in request["documents"]
            ]
            texts = {
                client.post("/v1/chat/completions", json=request).json()["choices"][0]["message"]["content"]
                for _ in ("cold", "warm")
            }
            assert len(texts) == 1
            if key in crowd.answers:
                assert set(crowd.answers[key]) == texts


def num_tasks() -> int:
    return len(asyncio.all_tasks())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
