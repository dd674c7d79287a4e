from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from support.server import RunningServer

from kvmosaic.server.dashboard.feed import Feed
from kvmosaic.server.tenants import Tenant
from kvmosaic.web.errors import ApiError

ADMIN = Tenant("default", is_admin=True)
OTHER = Tenant("other")
ACME, ZENITH, BOSS = ALL = (Tenant("acme"), Tenant("zenith"), Tenant("boss", is_admin=True))
PAUSE = 0.1


def feed_of(server: RunningServer, **limits: Any) -> Feed:
    """Another feed of a running server."""
    parts = server.services
    return Feed(
        parts.llm,
        parts.engine,
        parts.documents,
        parts.admission,
        parts.records,
        parts.settings,
        **limits,
    )


@asynccontextmanager
async def viewer(feed: Feed, tenant: Tenant = ADMIN) -> AsyncIterator[Callable[[str], Awaitable[Any]]]:
    """Gives the next event of a name."""
    async with aclosing(feed.watch(tenant)) as events:

        async def next_of(name: str) -> Any:
            async with asyncio.timeout(20):
                async for found, news in events:
                    if found == name:
                        return news
            raise AssertionError(f"the stream has ended without {name}")

        yield next_of


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with two tenants and an admin."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(
        "".join(
            f"- {{key: {tenant.name}-key-123, tenant: {tenant.name}, admin: {tenant.is_admin}}}\n" for tenant in ALL
        )
    )
    with RunningServer(keys_file=path) as running:
        yield running


def headers_of(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def ask(server: RunningServer, *, key: str | None = None, max_tokens: int = 4, **fields: Any) -> None:
    messages = [{"role": "user", "content": "Where does Bellos live?"}]
    body = {"model": "reader", "max_tokens": max_tokens, "ignore_eos": True, "messages": messages, **fields}
    url = server.url + "/v1/chat/completions"
    httpx.post(url, json=body, headers=headers_of(key), timeout=120).raise_for_status()


def store(server: RunningServer, tenant: str, document_id: str, **fields: Any) -> None:
    body = {"id": document_id, "text": "The ferry leaves at noon.", "ttl_seconds": None, **fields}
    headers = headers_of(f"{tenant}-key-123")
    httpx.post(server.url + "/v1/documents", json=body, headers=headers, timeout=30).raise_for_status()


def test_a_viewer_is_told_everything_and_then_what_is_new(server: RunningServer) -> None:
    async def look() -> None:
        feed = feed_of(server, seconds=PAUSE)
        async with viewer(feed) as next_of:
            state = await next_of("state")
            assert set(state) == {"server", "records", "statistics", "documents", "blocks"}
            assert state["server"]["model"] == "reader"
            blocks = await next_of("blocks")
            for pool in blocks["pools"]:
                assert sum(pool["runs"][1::2]) == pool["num_blocks"]
            await asyncio.to_thread(ask, server)
            (record,) = await next_of("records")
            assert [segment["kind"] for segment in record["segments"]] == ["plain"]
        async with viewer(feed) as next_of:
            assert (await next_of("state"))["records"] == [record]

    server.call(look)


def test_a_tenant_is_told_nothing_of_another(server: RunningServer) -> None:
    async def look() -> None:
        feed = feed_of(server, seconds=PAUSE)
        async with viewer(feed) as of_admin, viewer(feed, OTHER) as of_other:
            await of_admin("state")
            await of_other("state")
            await asyncio.to_thread(ask, server)
            assert await of_admin("records")
            names = set()
            async with aclosing(feed.watch(OTHER)) as events:
                async for name, news in events:
                    names.add(name)
                    assert not news.get("records") and news.get("blocks") is None
                    if name == "statistics" and news["pools"]:
                        assert news["chunks"] is None
                        break
            assert "records" not in names and "blocks" not in names

    server.call(look)


def test_what_others_do_changes_nothing_that_a_tenant_is_told(locked: RunningServer) -> None:
    """A tenant's whole feed before others ask, store and pin, while they run, and afterwards."""

    async def told(feed: Feed) -> dict[str, Any]:
        async with viewer(feed, ACME) as next_of:
            state = await next_of("state")
            statistics = await next_of("statistics")
            while len(statistics["pools"]) < 2:  # what its requests hold is known after the first look
                statistics = await next_of("statistics")
            state["documents"] = await next_of("documents")  # with what is known after that look
        state["statistics"] = {name: value for name, value in statistics.items() if name != "uptime_seconds"}
        return state

    async def look() -> None:
        feed = feed_of(locked, seconds=PAUSE)
        await asyncio.to_thread(store, locked, "acme", "a")
        await asyncio.to_thread(ask, locked, documents=[{"id": "a"}], key="acme-key-123")
        before = await told(feed)
        assert before["records"][0]["number"] == 1
        assert before["statistics"]["tenant"]["num_chunks"] == 1
        await asyncio.to_thread(store, locked, "zenith", "z", pinned=True)
        asked = asyncio.create_task(
            asyncio.to_thread(ask, locked, documents=[{"id": "z"}], key="zenith-key-123", max_tokens=400)
        )
        while not locked.services.engine.num_running:
            await asyncio.sleep(0.01)
        assert await told(feed) == before
        await asked
        assert await told(feed) == before
        await asyncio.to_thread(ask, locked, documents=[{"id": "a"}], key="acme-key-123")
        after = await told(feed)
        assert [record["number"] for record in after["records"]] == [1, 2], "gaps would tell how much others ask"
        async with viewer(feed, BOSS) as next_of:
            state = await next_of("state")
            assert [record["number"] for record in state["records"]] == [1, 2, 3]
            assert state["statistics"]["chunks"]["cached"] == 2

    locked.call(look)


def test_a_tenant_is_told_what_its_own_requests_hold(locked: RunningServer) -> None:
    async def look() -> None:
        feed = feed_of(locked, seconds=PAUSE)
        asked = asyncio.create_task(asyncio.to_thread(ask, locked, key="zenith-key-123", max_tokens=600))
        async with viewer(feed, ZENITH) as of_zenith, viewer(feed, ACME) as of_acme:
            async with asyncio.timeout(60):
                while not (held := held_in(statistics := await of_zenith("statistics"))):
                    assert not asked.done()
            assert statistics["running"] == 1 and statistics["waiting"] == 0
            assert held < locked.llm.engine.kv_cache.request_pool.num_blocks
            others = await of_acme("statistics")
            assert (others["running"], others["waiting"]) == (0, 0) and not held_in(others)
            await asked
            async with asyncio.timeout(60):
                while held_in(await of_zenith("statistics")):
                    pass

    locked.call(look)


def held_in(statistics: dict[str, Any]) -> int:
    """Blocks that the tenant's running requests hold."""
    return sum(pool["used"] for pool in statistics["pools"] if pool["name"] == "request")


def test_all_viewers_together_look_at_the_engine_once_per_interval(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watch() -> None:
        feed, looks = feed_of(server, seconds=PAUSE), list[float]()
        look = feed._look  # calls of the engine may be those of a feed that ends, of another test

        async def counting() -> None:
            looks.append(time.monotonic())
            await look()

        monkeypatch.setattr(feed, "_look", counting)
        for _ in range(3):  # coming and going does not make more looks either
            async with viewer(feed) as one, viewer(feed) as two, viewer(feed) as three:
                for next_of in (one, two, three):
                    await next_of("state")
                    await next_of("blocks")
        assert all(later - earlier >= 0.9 * PAUSE for earlier, later in pairwise(looks))
        await asyncio.sleep(2 * PAUSE)
        num_looks = len(looks)
        await asyncio.sleep(3 * PAUSE)
        assert len(looks) == num_looks, "nobody looks, and the engine is still asked"
        assert len(feed.viewers) == 0

    server.call(watch)


def test_a_busy_engine_is_waited_for_and_not_asked_twice(server: RunningServer) -> None:
    async def look() -> None:
        feed = feed_of(server, seconds=PAUSE)
        is_over = threading.Event()
        busy = asyncio.create_task(server.services.engine.call(lambda engine: is_over.wait(60)))
        await asyncio.sleep(PAUSE / 2)
        async with viewer(feed) as next_of:
            state = await next_of("state")
            last = server.services.engine.figures
            for statistics in (state["statistics"], await next_of("statistics")):
                assert statistics["chunks"]["lookups"] == last.caches.lookups
                assert [pool["used"] for pool in statistics["pools"]] == [
                    last.caches.used_blocks,
                    last.caches.request_used_blocks,
                ]
            assert server.services.engine.num_waiting <= 1
            assert not busy.done(), "nothing has waited for the engine"
            is_over.set()
            assert await next_of("blocks")
        await busy

    server.call(look)


def test_the_number_of_viewers_is_bounded(server: RunningServer) -> None:
    async def look() -> None:
        feed = feed_of(server, seconds=PAUSE, max_viewers=1)
        async with viewer(feed) as next_of:
            await next_of("state")
            with pytest.raises(ApiError, match="1 viewers look at this dashboard") as refused:
                async with viewer(feed) as another:
                    await another("state")
            assert refused.value.status == 503
            assert refused.value.headers["Retry-After"]
        async with viewer(feed) as next_of:
            assert await next_of("state")

    server.call(look)


def test_a_tenant_has_as_many_viewers_as_it_leaves_free_and_admins_have_places_of_their_own(
    server: RunningServer,
) -> None:
    async def look() -> None:
        feed = feed_of(server, seconds=PAUSE, max_viewers=8)  # four of them for admins
        async with AsyncExitStack() as stack:

            async def come(tenant: Tenant, times: int) -> None:
                for _ in range(times):
                    assert await (await stack.enter_async_context(viewer(feed, tenant)))("state")

            async def is_refused(tenant: Tenant, status: int, words: str) -> None:
                with pytest.raises(ApiError, match=words) as refused:
                    await come(tenant, 1)
                assert refused.value.status == status and refused.value.code == "too_many_viewers"
                assert "close one of them" in refused.value.message and refused.value.headers["Retry-After"]

            await come(OTHER, 2)
            await is_refused(OTHER, 429, "2 viewers of 'other' look at this dashboard, which is its share of 4")
            await come(ACME, 1)
            await is_refused(ACME, 429, "1 viewers of 'acme'")
            await come(ZENITH, 1)
            await is_refused(Tenant("late"), 503, "4 viewers look at this dashboard, which is the limit")
            await come(ADMIN, 2)
            await is_refused(ADMIN, 429, "2 viewers of 'default'")
            await come(BOSS, 1)
            assert len(feed.viewers) == 7
        async with viewer(feed, Tenant("late")) as next_of:
            assert await next_of("state")

    server.call(look)


def test_a_server_that_shuts_down_sends_its_viewers_away(server: RunningServer) -> None:
    async def look() -> None:
        feed = feed_of(server, seconds=PAUSE)
        async with aclosing(feed.watch(ADMIN)) as events:
            await anext(events)
            server.services.admission.is_draining = True
            try:
                async with asyncio.timeout(20):
                    async for _ in events:
                        pass
                with pytest.raises(ApiError, match="shutting down"):
                    await anext(feed.watch(ADMIN))
            finally:
                server.services.admission.is_draining = False

    server.call(look)
