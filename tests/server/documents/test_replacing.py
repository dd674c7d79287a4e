"""Replacing a document never serves the old one, whatever happens at the same time."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
from server.documents.world import KEYS, Client, DocumentServer
from support.server import wait_until

from kvmosaic.server.documents.cached import sweep

NUM_WRITERS, NUM_READERS, NUM_TURNS = 3, 5, 12
HEADERS = {"Authorization": f"Bearer {KEYS['alpha']}"}


def text_of(number: int) -> str:
    """A text that contains its number, and no other text of the test has its length in tokens."""
    return f"Version {number}." + " word" * (2 * number)


async def run_storm(url: str, num_tokens: dict[int, int]) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Writers and readers at once. Returns the version each text became, and of every answer the newest version known
    before it was asked for with the number of the text it read."""
    versions: dict[int, int] = {}
    answers: list[tuple[int, int]] = []
    numbers = iter(range(1, 1 + NUM_WRITERS * NUM_TURNS))
    by_length = {length: number for number, length in num_tokens.items()}
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60, trust_env=False) as client:

        async def write() -> None:
            for _ in range(NUM_TURNS):
                number = next(numbers)
                reply = await client.put("/v1/documents/x", json={"text": text_of(number)})
                versions[number] = reply.json()["version"]
                await asyncio.sleep(random.random() * 0.02)

        async def read() -> None:
            for _ in range(NUM_TURNS):
                newest = max(versions.values(), default=0)
                body = {
                    "model": "reader",
                    "messages": [{"role": "user", "content": "Which version?"}],
                    "documents": [{"id": "x"}],
                    "max_tokens": 2,
                }
                reply = await client.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
                (line,) = reply.json()["kvmosaic"]["documents"]
                assert line["id"] == line["name"] == "x"
                answers.append((newest, by_length[line["tokens"]]))

        await asyncio.gather(*(write() for _ in range(NUM_WRITERS)), *(read() for _ in range(NUM_READERS)))
    return versions, answers


def test_storm_of_replacements_never_serves_a_replaced_text(alpha: Client, server: DocumentServer) -> None:
    numbers = range(0, 1 + NUM_WRITERS * NUM_TURNS)
    prompts = {number: server.llm.encoder.encode_documents([text_of(number)]) for number in numbers}
    num_tokens = {number: prompt.chunks[0].num_tokens for number, prompt in prompts.items()}
    assert len(set(num_tokens.values())) == len(num_tokens), "the length tells which text was read"
    alpha.store("x", text_of(0), pinned=True)
    versions, answers = asyncio.run(run_storm(server.url, num_tokens))
    versions[0] = 1
    assert sorted(versions.values()) == list(range(1, 2 + NUM_WRITERS * NUM_TURNS)), "every replacement counts once"
    assert len(answers) == NUM_READERS * NUM_TURNS
    for newest, number in answers:
        assert versions[number] >= newest, f"text {number} was served after version {newest} had been stored"
    assert len({number for _, number in answers}) > 1, "readers and writers did run at the same time"

    server.call(sweep, server.services)
    last = max(versions, key=lambda number: versions[number])
    assert alpha.get("/v1/documents/x").json()["text"] == text_of(last)
    assert {chunk.num_tokens for chunk in server.chunks()} <= {num_tokens[last]}
    assert all(chunk.pinned and not chunk.ref_count for chunk in server.chunks())
    alpha.delete("/v1/documents/x")
    assert server.llm.engine.kv_cache.tenant_usage("alpha").num_blocks == 0


def test_request_that_reads_the_old_text_ends_on_it(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x", "The mayor of Fenbury is Renna Velley. " * 3)
    body: dict[str, Any] = {
        "model": "reader",
        "messages": [{"role": "user", "content": "Who is the mayor of Fenbury?"}],
        "documents": [{"id": "x"}],
        "max_tokens": 120,
        "ignore_eos": True,
        "temperature": 0,
    }
    expected = alpha.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    (old,) = server.chunks()
    with alpha.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        lines = reply.iter_lines()
        pieces = [next(line for line in lines if line)]
        assert alpha.store("x", "The mayor of Fenbury is Salla Gridin. " * 3)["version"] == 2
        assert server.chunks() == [], "nobody new finds the old chunk"
        was_used = old.ref_count
        fresh = alpha.ask({"id": "x"}, question="Who is the mayor of Fenbury?", max_tokens=8)
        pieces += [line for line in lines if line]
    assert was_used == 1, "the request still read it"
    assert "Salla" in fresh["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in pieces if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == expected
    wait_until(lambda: old.ref_count == 0)
    assert server.llm.engine.kv_cache.tenant_usage("alpha").num_chunks == 1
