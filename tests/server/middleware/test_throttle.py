from __future__ import annotations

import asyncio

from kvmosaic.server.middleware import AT_ONCE, Throttle


def test_crowd_is_let_in_a_few_at_a_time_and_in_order() -> None:
    async def run() -> tuple[list[int], list[int]]:
        throttle, order, sizes = Throttle(), list[int](), list[int]()

        async def come(number: int) -> None:
            await throttle.enter("acme")
            order.append(number)

        tasks = [asyncio.create_task(come(number)) for number in range(10 * AT_ONCE)]
        while not all(task.done() for task in tasks):
            before = len(order)
            await asyncio.sleep(0)
            sizes.append(len(order) - before)
        return order, sizes

    order, sizes = asyncio.run(run())
    assert order == sorted(order)
    assert max(sizes) <= AT_ONCE


def test_one_alone_waits_for_nobody() -> None:
    async def run() -> None:
        throttle = Throttle()
        for _ in range(3):
            entering = throttle.enter("acme")
            try:
                entering.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it waited")
            for _ in range(3):
                await asyncio.sleep(0)
            assert not throttle._is_turning

    asyncio.run(run())


def test_who_leaves_while_waiting_takes_no_place() -> None:
    async def run() -> int:
        throttle = Throttle()
        tasks = [asyncio.create_task(throttle.enter("acme")) for _ in range(5 * AT_ONCE)]
        await asyncio.sleep(0)
        for task in tasks[AT_ONCE::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(throttle.enter("acme"), 120)
        return sum(result is None for result in results)

    assert asyncio.run(run()) >= AT_ONCE


def test_crowd_of_one_tenant_makes_no_other_wait() -> None:
    async def run() -> list[str]:
        throttle, order = Throttle(), list[str]()

        async def come(tenant: str) -> None:
            await throttle.enter(tenant)
            order.append(tenant)

        await asyncio.gather(*(come(tenant) for tenant in ["crowd"] * 200 + ["one", "", "one"]))
        return order

    order = asyncio.run(run())
    assert len(order) == 203
    assert {"one", ""} <= set(order[: 4 * AT_ONCE]) and order[: 10 * AT_ONCE].count("one") == 2
