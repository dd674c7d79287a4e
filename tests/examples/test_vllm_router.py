from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "vllm_router.py"))
Router, create_app, documents_of = EXAMPLE["Router"], EXAMPLE["create_app"], EXAMPLE["documents_of"]
URLS = ["http://one:8000", "http://two:8000"]
PATH = "/v1/chat/completions"


async def slowly(text: str) -> AsyncIterator[bytes]:
    """A body in parts that end anywhere."""
    for start in range(0, len(text), 7):
        yield text[start : start + 7].encode()


class Replicas:
    """Two replicas that compose every request, and remember what they were asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.down: set[str] = set()
        self.bypass: str | None = None
        self.hold: asyncio.Event | None = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host in self.down:
            raise httpx.ConnectError("nobody listens", request=request)
        body = json.loads(request.content) if request.content else None
        self.asked.append((host, body))
        if self.hold is not None:
            await self.hold.wait()
        report = {"bypass": self.bypass, "documents": []}
        if body and body.get("stream"):
            lines = [{"choices": [{"delta": {"content": host}}]}, {"choices": [], "kvmosaic": report}]
            text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
            return httpx.Response(200, content=slowly(text), headers={"content-type": "text/event-stream"})
        text = json.dumps({"served_by": host, "kv_transfer_params": {"kvmosaic": report}})
        return httpx.Response(200, content=slowly(text), headers={"content-type": "application/json"})

    @property
    def hosts(self) -> list[str]:
        return [host for host, _ in self.asked]


def routed(use: Callable[[httpx.AsyncClient, Replicas, Any], Awaitable[None]]) -> None:
    """Runs `use` with a client of a router before two replicas."""

    async def run() -> None:
        replicas = Replicas()
        app = create_app(URLS, transport=httpx.MockTransport(replicas))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            await use(client, replicas, app.state.router)
        assert [replica.in_flight for replica in app.state.router.replicas] == [0, 0]

    asyncio.run(run())


def asking(*documents: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Where?"}]
    return {"model": "m", "messages": messages, "documents": list(documents), **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_documents_go_where_they_are_in_any_order(stream: bool) -> None:
    async def use(client: httpx.AsyncClient, replicas: Replicas, router: Any) -> None:
        for order in (("a", "b", "c"), ("c", "a", "b"), ("b", "c"), ("a",)):
            reply = await client.post(PATH, json=asking(*order, stream=stream))
            assert reply.status_code == 200
        assert len(set(replicas.hosts)) == 1
        assert len(router._holders) == 3

    routed(use)


def test_a_reply_passes_as_it_is() -> None:
    async def use(client: httpx.AsyncClient, replicas: Replicas, router: Any) -> None:
        reply = await client.post(f"{PATH}?x=1", json=asking("a", stream=True), headers={"authorization": "Bearer k"})
        assert reply.headers["content-type"] == "text/event-stream"
        assert reply.text.endswith("data: [DONE]\n\n")
        assert replicas.asked[0][1] == asking("a", stream=True)

    routed(use)


def test_what_a_report_says_counts_more_than_the_home() -> None:
    router = Router(URLS)
    documents = documents_of(json.dumps(asking("a")).encode())
    home = router.choose(documents)
    (other,) = (replica for replica in router.replicas if replica is not home)
    router.learn(other, documents, {"bypass": None})
    assert router.choose(documents) is other
    router.learn(other, documents, {"bypass": "prompt_logprobs"})
    assert router.choose(documents) is home


def test_bypassed_documents_are_not_counted_as_held() -> None:
    async def use(client: httpx.AsyncClient, replicas: Replicas, router: Any) -> None:
        replicas.bypass = "the prompt has images"
        await client.post(PATH, json=asking("a"))
        assert [len(holders) for holders in router._holders.values()] == [0]

    routed(use)


def test_another_model_system_text_or_salt_is_another_document() -> None:
    keys = [
        documents_of(json.dumps(body).encode())
        for body in (asking("a"), asking("a", model="n"), asking("a", cache_salt="s"), asking("b"))
    ]
    assert len({key for found in keys for key in found}) == 4
    other = asking("a")
    other["messages"][0]["content"] = "Reply."
    assert documents_of(json.dumps(other).encode()).keys() != keys[0].keys()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"documents": 3}', b'{"messages": "x"}', b'{"documents": {}}'])
def test_what_cannot_be_read_has_no_documents(body: bytes) -> None:
    assert documents_of(body) == {}


def test_a_replica_that_cannot_be_reached_is_passed_over_and_has_nothing_any_more() -> None:
    async def use(client: httpx.AsyncClient, replicas: Replicas, router: Any) -> None:
        first = (await client.post(PATH, json=asking("a", "b"))).json()["served_by"]
        replicas.down = {first}
        second = (await client.post(PATH, json=asking("a", "b"))).json()["served_by"]
        assert second != first
        replicas.down = set()
        assert (await client.post(PATH, json=asking("b"))).json()["served_by"] == second
        assert (await client.get("/health")).json() == {"replicas": 2, "up": 1}

    routed(use)


def test_no_replica_at_all_is_said() -> None:
    async def use(client: httpx.AsyncClient, replicas: Replicas, router: Any) -> None:
        replicas.down = {"one", "two"}
        assert (await client.post(PATH, json=asking("a"))).status_code == 503
        assert (await client.get("/health")).status_code == 503

    routed(use)


def test_a_busy_replica_is_passed_over() -> None:
    async def use(client: httpx.AsyncClient, replicas: Replicas, router: Any) -> None:
        replicas.hold = asyncio.Event()
        asked = [asyncio.create_task(client.post(PATH, json=asking("a"))) for _ in range(8)]
        while len(replicas.asked) < 8:
            await asyncio.sleep(0)
        counts = sorted(replicas.hosts.count(host) for host in ("one", "two"))
        assert counts[0] >= 2, "a hot document must not leave a replica idle"
        replicas.hold.set()
        await asyncio.gather(*asked)

    routed(use)


@given(
    held=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), max_size=12),
    busy=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    asked=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 100), max_size=6),
)
def test_somebody_is_always_chosen_and_nobody_above_the_share(
    held: list[tuple[str, int]], busy: list[int], asked: dict[str, int]
) -> None:
    router = Router([f"http://replica-{index}" for index in range(4)])
    for key, index in held:
        router.learn(router.replicas[index], {key: 1}, {"bypass": None})
    for replica, count in zip(router.replicas, busy, strict=True):
        replica.in_flight = count
    chosen = router.choose(asked)
    assert chosen.in_flight <= EXAMPLE["HEADROOM"] * (1 + sum(busy)) / 4 + 1
    if not asked:
        assert chosen.in_flight == min(busy)


def test_homes_are_spread_and_most_stay_when_a_replica_joins() -> None:
    keys = [f"document {number}" for number in range(400)]
    three = Router([f"http://replica-{index}" for index in range(3)])
    four = Router([f"http://replica-{index}" for index in range(4)])
    before = [three.choose({key: 1}).url for key in keys]
    after = [four.choose({key: 1}).url for key in keys]
    assert all(before.count(url) > 80 for url in set(before))
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    assert 50 < moved < 150
    assert all(old == new or new == "http://replica-3" for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("urls", [[], ["http://one", "http://one"]])
def test_replicas_are_named_once(urls: list[str]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Router(urls)
