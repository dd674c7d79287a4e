"""What happens to a server in a day: it sleeps and wakes, its disk is damaged, its Redis goes and comes."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
from soak_honest import World
from soak_server import HONEST, headers_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.redis import RedisServer

ADMIN_SECONDS = 600.0
SILENCE_SECONDS = 60.0
"""The feed says something more often."""


class Events:
    """An operator, one event after the other; each is a promise that the others go on being answered rightly."""

    def __init__(self, world: World, disk: Path, redis: RedisServer | None, choose: Random, pause: float) -> None:
        self.world, self.disk, self.redis, self.choose, self.pause = world, disk, redis, choose, pause
        self._http = httpx.AsyncClient(base_url=world.url, headers=headers_of("admin"), timeout=ADMIN_SECONDS)

    async def run(self) -> None:
        """Until cancelled."""
        events: list[Callable[[], Awaitable[None]]] = [
            self.sleep_and_keep, self.damage, self.sleep_and_drop, self.move_cold, self.sleep_and_refuse, self.damage,
            *([self.restart_redis, self.hang_redis] if self.redis else []),
        ]  # fmt: skip
        async with self._http:
            for event in itertools.cycle(events):
                await asyncio.sleep(self.pause)
                self.world.seen.count(f"event: {event.__name__.replace('_', ' ')}")
                try:
                    await event()
                except httpx.HTTPError as failure:
                    self.world.seen.fault("no reply", action=event.__name__, failure=repr(failure))

    async def sleep_and_keep(self) -> None:
        await self._sleep(1, "wait")

    async def sleep_and_drop(self) -> None:
        await self._sleep(2, "wait")

    async def sleep_and_refuse(self) -> None:
        await self._sleep(self.choose.choice([1, 2]), "refuse")

    async def _sleep(self, level: int, mode: str) -> None:
        self.world.is_refusing = mode == "refuse"
        try:
            if (await self._asked("POST", f"/sleep?level={level}&mode={mode}"))["is_sleeping"]:
                await asyncio.sleep(min(self.choose.uniform(1, 4), self.pause))
                if not (await self._asked("GET", "/is_sleeping"))["is_sleeping"]:
                    self.world.seen.fault("a sleeping server woke by itself", level=level, mode=mode)
        finally:
            await self._asked("POST", "/wake_up")
            self.world.is_refusing, self.world.last_refusing = False, time.monotonic()

    async def move_cold(self) -> None:
        """Chunks that were not used lately are evicted from the device."""
        body = {"min_accesses": 10**6, "idle_seconds": self.choose.choice([0, 5])}
        await self._asked("POST", "/v1/documents:sleep", body)

    async def damage(self) -> None:
        """Entries of the disk are cut, changed, grown, mixed up or gone."""
        await asyncio.to_thread(self._damage)

    def _damage(self) -> None:
        entries = sorted(self.disk.glob("??/*.safetensors"))
        for path in self.choose.sample(entries, min(4, len(entries))):
            try:
                data = bytearray(path.read_bytes())
                how = self.choose.randrange(5)
                if how == 0:
                    data = data[: self.choose.randrange(len(data))]
                elif how == 1:
                    data[self.choose.randrange(len(data))] ^= 1 << self.choose.randrange(8)
                elif how == 2:
                    data += self.choose.randbytes(50_000)
                elif how == 3:
                    data = bytearray(self.choose.choice(entries).read_bytes())
                path.unlink()
                if how != 4:
                    path.write_bytes(data)
            except (FileNotFoundError, IndexError, ValueError):
                continue  # it left in the meantime

    async def restart_redis(self) -> None:
        """All that it held is gone."""
        assert self.redis is not None
        await asyncio.to_thread(self.redis.restart)

    async def hang_redis(self) -> None:
        """It is silent for some seconds."""
        assert self.redis is not None
        self.redis.hang()
        try:
            await asyncio.sleep(min(5.0, self.pause))
        finally:
            self.redis.go_on()

    async def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        reply = await self._http.request(method, path, json=body)
        if reply.status_code != 200:
            self.world.seen.fault("an admin was refused", asked=path, status=reply.status_code, reply=reply.text)
            return {"is_sleeping": False}
        read: dict[str, Any] = reply.json()
        return read


async def watch_feed(world: World, choose: Random) -> None:
    """A viewer of the dashboard, of one tenant after the other, who comes and goes."""
    for tenant in itertools.cycle((*HONEST, "admin")):
        try:
            async with (
                httpx.AsyncClient(base_url=world.url, headers=headers_of(tenant), timeout=SILENCE_SECONDS) as http,
                http.stream("GET", "/dashboard/events") as reply,
            ):
                if reply.status_code != 200:
                    world.seen.fault("a viewer was refused", status=reply.status_code)
                end = time.monotonic() + choose.uniform(2, 40)
                async for line in reply.aiter_lines():
                    if line.startswith("data: "):
                        json.loads(line[6:])
                        world.seen.count("feed: events")
                    if time.monotonic() > end:
                        break
        except (httpx.HTTPError, ValueError) as failure:
            world.seen.fault("the feed failed", tenant=tenant, failure=repr(failure))
        await asyncio.sleep(1)


async def probe(world: World, key: str, pause: float) -> None:
    """Reads what the process that probes has seen."""
    script = Path(__file__).with_name("soak_probe.py")
    command = (sys.executable, str(script), world.url, key, str(pause))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            what, seconds, status = line.decode().split()
            world.seen.took(what, float(seconds))
            is_asleep = what == "readyz" and status == "503" and world.may_refuse(time.monotonic() - float(seconds) - 1)
            if status != "200" and not is_asleep:
                world.seen.fault("a probe was not answered", what=what, status=status)
    finally:
        process.terminate()
        await process.wait()
