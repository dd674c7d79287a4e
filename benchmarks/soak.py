"""Hours of honest and hostile clients against a real server; are all answers right, and does nothing grow?

    python benchmarks/soak.py --hours 24 [--sample 30] [--honest 4] [--hostile 2] [--folder runs/soak]

`kvmosaic serve` with the bundled model, keys, a small cache, a small disk tier and, where there is a redis-server, a
Redis tier. Honest clients of three tenants ask questions whose answers are known (they were asked on the quiet server
first) over documents inline and stored, streamed and in conversations; they replace, pin, warm and lose documents.
Hostile ones send the attacks of `tests/attack` and fuzzed bodies, and hold what they can hold. The server is put to
sleep, its disk is damaged, its Redis is restarted. A process of its own asks /livez, /readyz and /metrics.

Every --sample seconds a line is added to samples.jsonl in --folder. Ctrl+C or SIGTERM ends it well: the report is
written, and the next call goes on with a new server until --hours are reached in all parts together (--anew begins
again). Ends with 1 if something failed. Writes results/soak.json, soak.md and, with matplotlib, soak.png.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
from facts import RESULTS, commit, processor
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from soak_events import Events, probe, watch_feed
from soak_honest import HonestClient, World
from soak_hostile import HostileClient
from soak_known import Known, known_answers
from soak_report import Record, write_report
from soak_seen import Seen, append, merged
from soak_server import HONEST, HOSTILE, SoakServer, end_left_over, headers_of, key_of, metric_figures, process_figures
from soak_verdict import verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.attack import read_attacks
from support.redis import RedisServer

CALM_SECONDS = 60.0
"""After the load, what runs must have ended in this time."""
STOP_SECONDS = 60.0
MAX_OPEN = 4_096
REDIS_MEMORY = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")


@dataclass
class Part:
    """One run of the server; a soak has several if it was interrupted."""

    arguments: argparse.Namespace
    number: int
    seconds: float
    """How long it is to be."""
    server: SoakServer
    redis: RedisServer | None
    seen: Seen
    known: Known = field(default_factory=Known)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> dict[str, Any]:
        """Load until the time is over, a signal comes or the server dies; returns how it ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stopping.set)
        seed = self.arguments.seed + 1_000 * self.number
        self.known = await asyncio.to_thread(known_answers, self.server.url, seed)
        self._write("start", **self._about(seed))
        world = World(self.server.url, self.known, self.seen, self.arguments.honest_pause)
        events = Events(world, self.server.disk, self.redis, Random(seed + 1), self.arguments.event_seconds)
        tasks = [asyncio.create_task(run) for run in self._clients(world, seed)]
        tasks += [asyncio.create_task(events.run()), asyncio.create_task(watch_feed(world, Random(seed + 2)))]
        tasks.append(asyncio.create_task(probe(world, key_of("admin"), self.arguments.probe_seconds)))
        begin = time.monotonic()
        with self._progress() as show:
            while not self.stopping.is_set() and self.server.is_alive and time.monotonic() - begin < self.seconds:
                left = self.seconds - (time.monotonic() - begin)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), min(self.arguments.sample, left))
                await self._sample(time.monotonic() - begin)
                show(time.monotonic() - begin)
                self._check_clients(tasks)
        await self._without(tasks)
        how = (
            await self._calm(world)
            if self.server.is_alive
            else f"died with {self.server.process.returncode}: {self.server.log[-600:]}"
        )
        await self._sample(time.monotonic() - begin)
        return {"how": how, "is_well": how in ("in time", "after SIGTERM")}

    def _clients(self, world: World, seed: int) -> list[Any]:
        arguments = self.arguments
        honest = [
            HonestClient(world, tenant, f"{tenant}-{number}", Random(seed * 1_000 + number)).run()
            for number, tenant in zip(range(arguments.honest), HONEST * arguments.honest, strict=False)
        ]
        attacks = read_attacks()  # tens of megabytes, once for all clients
        return honest + [
            HostileClient(world, tenant, attacks, Random(seed * 2_000 + number), arguments.hostile_pause).run()
            for number, tenant in zip(range(arguments.hostile), HOSTILE * arguments.hostile, strict=False)
        ]

    async def _without(self, tasks: list[asyncio.Task[None]]) -> None:
        """Ends all clients, in the middle of whatever they do."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_clients(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            if task.done():
                self.stopping.set()
                self.seen.fault("a client of the soak failed", failure=repr(task.exception()))

    async def _sample(self, elapsed: float) -> None:
        """One more line; the server may be dead by now."""
        sample: dict[str, Any] = {"elapsed": round(elapsed, 2)}
        own = process_figures(os.getpid())
        sample["client_mb"], sample["client_cpu_seconds"] = own["rss_mb"], own["cpu_seconds"]
        with contextlib.suppress(OSError, KeyError, httpx.HTTPError):
            sample |= self.server.figures()
            async with httpx.AsyncClient(headers=headers_of("admin"), timeout=30) as http:
                sample |= metric_figures((await http.get(f"{self.server.url}/metrics")).text)
        if self.server.num_tracebacks:
            self.seen.fault("a traceback in the log", log=self.server.log[-600:])
            self.server.num_tracebacks = 0
        self._write("sample", **sample, **self.seen.taken())

    async def _calm(self, world: World) -> str:
        """After the load: nothing runs, nothing is held, and all answers are right once more."""
        end, figures = time.monotonic() + CALM_SECONDS, {}
        async with httpx.AsyncClient(base_url=self.server.url, headers=headers_of("admin"), timeout=120) as http:
            await http.post("/wake_up")
            while time.monotonic() < end:
                figures = metric_figures((await http.get("/metrics")).text)
                held = figures["blocks"]["request held"]
                if not figures["running"] and not figures["waiting"] and not held:
                    break
                await asyncio.sleep(0.2)
            else:
                self.seen.fault("something was held without an owner", figures=figures)
        client = HonestClient(world, HONEST[0], "calm", Random(0))
        for question in self.known.questions:
            body = question.body()
            async with httpx.AsyncClient(base_url=self.server.url, headers=headers_of(HONEST[0]), timeout=120) as http:
                reply = await http.post("/v1/chat/completions", json=body)
            if reply.status_code == 200:
                client.judge(self.known.answers[question], reply.json()["choices"][0]["message"]["content"], question)
            else:
                self.seen.fault("a quiet server refused", status=reply.status_code, reply=reply.text)
        code = await asyncio.to_thread(self.server.stop, STOP_SECONDS)
        if code != 0:
            return f"it got SIGTERM, and ended with {code}: {self.server.log[-600:]}"
        return "after SIGTERM" if self.stopping.is_set() else "in time"

    def _about(self, seed: int) -> dict[str, Any]:
        known = len(self.known.answers) + len(self.known.moved)
        facts = {"commit": commit(), "processor": processor(), "load_average": os.getloadavg()[0]}
        told = {name: str(value) for name, value in vars(self.arguments).items()}
        return {
            **facts,
            "seed": seed,
            "known": known,
            "asked": self.known.num_asked,
            "redis": bool(self.redis),
            "arguments": told,
        }

    def _write(self, kind: str, **fields: Any) -> None:
        record = {"kind": kind, "part": self.number, "at": round(time.time(), 1), **fields}
        append(self.arguments.folder / "samples.jsonl", record)
        self.last = record

    @contextlib.contextmanager
    def _progress(self) -> Any:
        """A bar on a terminal, a line for each sample elsewhere."""
        columns = (TextColumn("soak"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=self.seconds)

            def show(elapsed: float) -> None:
                told = self._told(elapsed)
                progress.update(bar, completed=elapsed, description=told)
                if not console.is_terminal:
                    print(told, file=sys.stderr, flush=True)

            yield show

    def _told(self, elapsed: float) -> str:
        """The last figures in a line."""
        left, totals, last = max(self.seconds - elapsed, 0) / 3600, self.seen.totals, self.last
        waits = {name: merged([last], name).at(0.99) or 0.0 for name in ("ttft", "livez")}
        return (
            f"{left:.2f} h left · {totals['right']:,} right, {totals['wrong']} wrong, {self.seen.num_faults} faults · "
            f"{last.get('anonymous_mb', 0):.0f} MB, {last.get('descriptors', 0):.0f} descriptors, "
            f"{last.get('threads', 0):.0f} threads · p99 ttft {waits['ttft']:.2f} s, livez {waits['livez']:.3f} s"
        )


def soak(arguments: argparse.Namespace, number: int, seconds: float) -> None:
    """One part, from the start of its server to its end."""
    folder: Path = arguments.folder
    seen = Seen(folder, number)
    with contextlib.ExitStack() as stack:
        redis = None
        if shutil.which("redis-server") and not arguments.no_redis:
            place = (folder / "redis").resolve()
            place.mkdir(exist_ok=True)
            end_left_over(place)
            redis = RedisServer(place, "--pidfile", str(place / "pid"), *REDIS_MEMORY)
            stack.callback(redis.close)
        server = stack.enter_context(SoakServer(folder, redis.url if redis else None))
        part = Part(arguments, number, seconds, server, redis, seen)
        ended = asyncio.run(part.run())
    append(folder / "samples.jsonl", {"kind": "end", "part": number, "at": round(time.time(), 1), **ended})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0, help="Of load, in all parts together; may be a fraction.")
    parser.add_argument("--sample", type=float, default=30.0, help="Seconds between two samples.")
    parser.add_argument("--honest", type=int, default=4, help="Honest clients, of three tenants.")
    parser.add_argument("--honest-pause", type=float, default=1.0, help="Mean seconds between two of its requests.")
    parser.add_argument("--hostile", type=int, default=2, help="Hostile clients, of two tenants.")
    parser.add_argument("--hostile-pause", type=float, default=6.0, help="Mean seconds between two attacks of one.")
    parser.add_argument("--event-seconds", type=float, default=60.0, help="Between sleep, damage, and Redis that goes.")
    parser.add_argument("--probe-seconds", type=float, default=1.0, help="Between two probes.")
    parser.add_argument("--livez-seconds", type=float, default=1.0, help="Most that 99 of 100 probes may take.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-redis", action="store_true", help="Only the disk tier.")
    parser.add_argument("--anew", action="store_true", help="Forget what is in the folder, and begin again.")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="Of samples, faults, the log and tiers.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="Folder of the report.")
    arguments = parser.parse_args()
    if arguments.anew:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(MAX_OPEN, most), most))
    before = Record(arguments.folder)
    left = arguments.hours * 3600 - before.seconds
    console = Console()
    if left > 0:
        number = max((start["part"] for start in before.starts), default=0) + 1
        console.print(
            f"part {number}: {left / 3600:.2f} of {arguments.hours:g} hours are left; samples in {arguments.folder}"
        )
        soak(arguments, number, left)
    else:
        console.print(f"{arguments.hours:g} hours are done; --anew begins again, more --hours go on")
    found = write_report(Record(arguments.folder), arguments.livez_seconds, arguments.results)
    for check in found:
        console.print(f"{'ok  ' if check.holds else 'FAIL'} {check.name}: {check.found}", markup=False)
    console.print(f"{verdict(found)}; the report is {arguments.results / 'soak.md'}")
    sys.exit(0 if all(check.holds for check in found) else 1)


if __name__ == "__main__":
    main()
