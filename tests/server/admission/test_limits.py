from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.server.admission import AdmissionControl
from kvmosaic.server.tenants import Tenant
from kvmosaic.web.errors import ApiError

ACME, UMBRA = Tenant("acme"), Tenant("umbra")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def admission(running: int = 1, queue: int = 2, per_tenant: int = 2, clock: Clock | None = None) -> AdmissionControl:
    return AdmissionControl(
        max_running=running, max_queue=queue, max_queue_per_tenant=per_tenant, clock=clock or Clock()
    )


@given(
    st.integers(1, 5), st.integers(0, 5), st.integers(0, 5), st.lists(st.sampled_from("+a +b -".split()), max_size=40)
)
def test_never_more_than_the_limits_are_under_way(running: int, queue: int, per_tenant: int, moves: list[str]) -> None:
    door = admission(running, queue, per_tenant)
    inside: list[tuple[str, ExitStack]] = []
    for move in moves:
        if move == "-":
            if inside:
                inside.pop(0)[1].close()
            continue
        place, mine = ExitStack(), sum(name == move for name, _ in inside)
        must_refuse = len(inside) >= running + queue or mine >= running + per_tenant
        try:
            place.enter_context(door.enter(Tenant(move)))
            inside.append((move, place))
            assert not must_refuse
        except ApiError as refusal:
            assert must_refuse and refusal.status == 429
        assert door.num_under_way == len(inside)
        assert door.num_waiting == max(0, len(inside) - running)
    for _, place in inside:
        place.close()
    assert door.num_under_way == 0


def test_one_tenant_cannot_take_every_place() -> None:
    door = admission(running=1, queue=4, per_tenant=1)
    with ExitStack() as places:
        for _ in range(2):
            places.enter_context(door.enter(ACME))
        with pytest.raises(ApiError) as caught, door.enter(ACME):
            pass
        assert caught.value.code == "tenant_queue_full"
        places.enter_context(door.enter(UMBRA))
    assert door.num_refused == 1


def test_retry_after_follows_the_recent_throughput() -> None:
    clock = Clock()
    door = admission(running=1, queue=1, per_tenant=9, clock=clock)
    assert door.retry_seconds == 1
    for _ in range(10):  # one request every 4 seconds
        with door.enter(ACME):
            clock.seconds += 4
    with door.enter(ACME), door.enter(ACME):
        assert 7 <= door.retry_seconds <= 8  # one waits, and this one would come after it
        with pytest.raises(ApiError) as caught:
            door.check(ACME)
    assert caught.value.headers["Retry-After"] == str(8)
    clock.seconds += 10_000
    assert door.retry_seconds == 60


def test_place_is_given_back_after_an_error() -> None:
    door = admission()
    with pytest.raises(RuntimeError), door.enter(ACME):
        raise RuntimeError
    assert door.num_under_way == 0


def test_draining_refuses_everything_new_with_503() -> None:
    door = admission()
    with door.enter(ACME):
        door.is_draining = True
        with pytest.raises(ApiError) as caught:
            door.check(UMBRA)
    assert caught.value.status == 503 and int(caught.value.headers["Retry-After"]) >= 1


def test_drained_waits_for_what_is_under_way_but_not_for_ever() -> None:
    door = AdmissionControl(max_running=1, max_queue=1, max_queue_per_tenant=1)

    async def hold(seconds: float) -> None:
        with door.enter(ACME):
            await asyncio.sleep(seconds)

    async def check() -> None:
        task = asyncio.create_task(hold(0.1))
        await asyncio.sleep(0)
        assert not await door.drained(0.02)
        assert await door.drained(10)
        await task

    asyncio.run(check())
