from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from support.server import RunningServer

from kvmosaic.server.dashboard.feed import Feed
from kvmosaic.server.errors import ApiError
from kvmosaic.server.tenants import Tenant

ADMIN = Tenant("default", is_admin=True)
OTHER = Tenant("other")
PAUSE = 0.1


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


def ask(server: RunningServer, question: str = "Where does Bellos live?") -> None:
    body = {"model": "reader", "max_tokens": 4, "messages": [{"role": "user", "content": question}]}
    httpx.post(server.url + "/v1/chat/completions", json=body, timeout=30).raise_for_status()


def test_a_viewer_is_told_everything_and_then_what_is_new(server: RunningServer) -> None:
    async def look() -> None:
        feed = Feed(server.services, seconds=PAUSE)
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
        feed = Feed(server.services, seconds=PAUSE)
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


def test_all_viewers_together_look_at_the_engine_once_per_interval(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []
    real = server.services.engine.call

    async def counting(function: Any) -> Any:
        calls.append(time.monotonic())
        return await real(function)

    monkeypatch.setattr(server.services.engine, "call", counting)

    async def look() -> None:
        feed = Feed(server.services, seconds=PAUSE)
        for _ in range(3):  # coming and going does not make more looks either
            async with viewer(feed) as one, viewer(feed) as two, viewer(feed) as three:
                for next_of in (one, two, three):
                    await next_of("state")
                    await next_of("blocks")
        assert all(later - earlier >= 0.9 * PAUSE for earlier, later in pairwise(calls))
        await asyncio.sleep(2 * PAUSE)
        num_calls = len(calls)
        await asyncio.sleep(3 * PAUSE)
        assert len(calls) == num_calls, "nobody looks, and the engine is still asked"
        assert feed.num_viewers == 0

    server.call(look)


@pytest.mark.alone
def test_a_busy_engine_is_waited_for_and_not_asked_twice(server: RunningServer) -> None:
    async def look() -> None:
        feed = Feed(server.services, seconds=PAUSE)
        busy = asyncio.create_task(server.services.engine.call(lambda engine: time.sleep(6 * PAUSE)))
        await asyncio.sleep(PAUSE / 2)
        started = time.monotonic()
        async with viewer(feed) as next_of:
            await next_of("state")
            assert time.monotonic() - started < 4 * PAUSE, "the first event has waited for the engine"
            assert (await next_of("statistics"))["chunks"] is None
            assert server.services.engine.num_waiting <= 1
            assert await next_of("blocks")
        await busy

    server.call(look)


def test_the_number_of_viewers_is_bounded(server: RunningServer) -> None:
    async def look() -> None:
        feed = Feed(server.services, seconds=PAUSE, max_viewers=1)
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


def test_a_server_that_shuts_down_sends_its_viewers_away(server: RunningServer) -> None:
    async def look() -> None:
        feed = Feed(server.services, seconds=PAUSE)
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
