"""Who waits how long on a mixed load: priorities with and without aging, and with answers that give way.

    python benchmarks/fairness.py [--requests 320] [--load 1.15] [--seed 1]

The real engine with a tiny random Llama, on a clock of its own: a step takes 1 tick, 1/32 tick for every token that it
computes, and 1/256 for every token that is moved to the host or back. So the times do not depend on the machine, and
the same command gives the same table. Requests of four kinds come at random (Poisson), more of them than can be done,
until all have come; then the rest is worked off:

    short, high       a question over two of twelve documents, priority 10, a person waits for it
    short             the same, priority 0
    long              a plain prompt of 160 tokens, an answer of 48, priority 0
    long, low         a plain prompt of 320 tokens, an answer of 64, priority -10, a batch job

Three tenants send them, one half of all requests, the others a quarter each. Memory is short: running answers grow into
blocks that others hold. Wait is from arrival to the first step. Slowdown is from arrival to the end, by what the same
request takes alone. Jain's index of n slowdowns is (sum x)^2 / (n sum x^2) of x = 1 / slowdown: 1 is equal, 1/n is one
request served at the cost of all others.

Then three tenants have 1, 8 and 64 requests under way all the time, for answers without end or for short ones, and
share 16 places. Jain's index is over what each gets by what max-min fairness gives it. Results: results/fairness.*
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from facts import RESULTS, save
from rich.console import Console

from kvmosaic.assembly import build_engine
from kvmosaic.config import MAX_PRIORITY, ChunkCacheConfig, EngineConfig
from kvmosaic.engine import Engine, Request, preemption, priorities
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

TICKS_PER_TOKEN = 1 / 32
TICKS_PER_MOVED_TOKEN = 1 / 256
AGING = 15.0
"""Ticks that count as one more step of priority: 150 between low and normal, and between normal and high."""
TENANTS = ("a", "a", "b", "c")
NUM_DOCUMENTS, DOCUMENT_TOKENS = 12, 48


@dataclass(frozen=True)
class Kind:
    """One kind of request."""

    name: str
    share: float
    """Of all requests."""
    priority: int
    question: int
    answer: int
    documents: int = 0


Arrival = tuple[float, Kind, str]
"""When, what, and whose."""
KINDS = (
    Kind("short, high", 0.25, 10, 16, 8, documents=2),
    Kind("short", 0.35, 0, 16, 8, documents=2),
    Kind("long", 0.25, 0, 160, 48),
    Kind("long, low", 0.15, -10, 320, 64),
)
NO_AGING = 1e9
"""Ticks for one step of priority that nothing waits for."""
GAP, NO_GAP = preemption.PREEMPTION_GAP, 2 * MAX_PRIORITY + 1


@dataclass(frozen=True)
class Policy:
    """The scheduler's policy with other constants: what each part of it is for."""

    aging: float = AGING
    gap: int = GAP
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    ignores: bool = False
    """Whether requests come without their priorities."""

    def set(self) -> None:
        """Makes it that of the engines of this process."""
        priorities.AGING_SECONDS, preemption.PREEMPTION_GAP = self.aging, self.gap


POLICIES = {
    "no priorities": Policy(NO_AGING, NO_GAP, ignores=True),
    "strict": Policy(NO_AGING, NO_GAP),
    "aging": Policy(gap=NO_GAP),
    "aging, gives way, recompute": Policy(preemption="recompute"),
    "aging, gives way, swap": Policy(preemption="swap"),
}


CROWDS = {"one": 1, "eight": 8, "many": 64}
"""Requests of each of three tenants that are under way all the time."""


def build_model() -> LoadedModel:
    """A random Llama, as small as it can be."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4_096,
    )
    return LoadedModel.from_module(transformers.LlamaForCausalLM(config).eval())


class World:
    """An engine whose clock is moved by what its steps compute."""

    def __init__(self, model: LoadedModel, policy: Policy) -> None:
        policy.set()
        per_block = model.bytes_per_token() * 16
        self.now = 0.0
        self.num_tokens = 0
        self._bytes_per_token = model.bytes_per_token()
        self.engine: Engine = build_engine(
            model,
            ChunkCacheConfig(chunk_cache_size=per_block * 128),
            EngineConfig(
                request_cache_size=per_block * 96,
                max_num_seqs=16,
                max_num_batched_tokens=256,
                preemption=policy.preemption,
            ),
        )
        for part in (self.engine, self.engine.scheduler, self.engine.scheduler.preemption):
            for name in ("clock", "_clock"):
                if hasattr(part, name):
                    setattr(part, name, lambda: self.now)
        run = self.engine.runner.run

        def counted(rows: Any, *others: Any) -> Any:
            num_tokens = sum(len(each.token_ids) for each in rows)
            self.num_tokens += num_tokens
            self.now += 1 + TICKS_PER_TOKEN * num_tokens
            return run(rows, *others)

        self.engine.runner.run = counted  # type: ignore[method-assign]

    @property
    def moved_bytes(self) -> int:
        """To the host and back, so far."""
        swap = self.engine.scheduler.preemption.swap
        return sum(swap.moved_bytes.values()) if swap is not None else 0

    def step(self) -> None:
        """One step; what it computed is there at its end."""
        began, moved = self.now, self.moved_bytes
        news = self.engine.step()
        ended = self.now if self.now > began else began + 1
        self.now = ended + TICKS_PER_MOVED_TOKEN * (self.moved_bytes - moved) / self._bytes_per_token
        for request in news:
            if request.finished_time == ended:
                request.finished_time = self.now


def prompt_of(kind: Kind, chance: random.Random, tenant: str) -> Prompt:
    """A prompt of a kind; documents are of a dozen that everybody asks about, the rest is new."""
    ids = [chance.randrange(512) for _ in range(kind.question)]
    if not kind.documents:
        return replace(Prompt.plain(ids), tenant=tenant)
    chosen = chance.sample(range(NUM_DOCUMENTS), kind.documents)
    documents = [[random.Random(f"{n} {t}").randrange(512) for t in range(DOCUMENT_TOKENS)] for n in chosen]
    return replace(Prompt.from_tokens([1, 2, 3, 4], documents, ids), tenant=tenant)


def params_of(kind: Kind) -> SamplingParams:
    """Greedy, to the last token."""
    return SamplingParams(temperature=0, max_tokens=kind.answer, ignore_eos=True)


def alone(model: LoadedModel, kind: Kind) -> float:
    """Ticks that a request takes on an idle engine and its documents are known."""
    world = World(model, POLICIES["no priorities"])
    for _ in range(2):
        request = world.engine.add_request(prompt_of(kind, random.Random(7), ""), params_of(kind))
        while not request.is_finished:
            world.step()
        world.engine.kv_cache._prefix.clear()
    assert request.finished_time is not None
    return request.finished_time - request.arrival_time


def arrivals(count: int, load: float, seed: int) -> list[Arrival]:
    """The same for every policy."""
    chance = random.Random(seed)
    mean_gap = sum(kind.share * ticks_of_work(kind) for kind in KINDS) / load
    now, coming = 0.0, []
    for _ in range(count):
        now += chance.expovariate(1 / mean_gap)
        kind = chance.choices(KINDS, [each.share for each in KINDS])[0]
        coming.append((now, kind, chance.choice(TENANTS)))
    return coming


def ticks_of_work(kind: Kind) -> float:
    """About what a request adds to the steps it is in, when these are full: its tokens, and its part of the steps."""
    tokens = kind.question + kind.answer + kind.documents * DOCUMENT_TOKENS * 0.5
    return tokens * TICKS_PER_TOKEN + kind.answer / 6


def run(model: LoadedModel, policy: Policy, coming: Sequence[tuple[float, Kind, str]], seed: int) -> dict[str, Any]:
    """One policy: every request with its kind and tenant, and what the engine did."""
    world, chance, waiting = World(model, policy), random.Random(seed), list(coming)
    asked: list[tuple[Kind, str, Request]] = []
    began = time.perf_counter()
    while waiting or world.engine.has_unfinished_requests:
        while waiting and (waiting[0][0] <= world.now or not world.engine.has_unfinished_requests):
            arrival, kind, tenant = waiting.pop(0)
            world.now = max(world.now, arrival)
            priority = 0 if policy.ignores else kind.priority
            prompt = prompt_of(kind, chance, tenant)
            request = world.engine.add_request(prompt, params_of(kind), priority=priority, arrival_time=arrival)
            asked.append((kind, tenant, request))
        world.step()
        if swap := world.engine.scheduler.preemption.swap:
            swap.check_invariants()
    preemption = world.engine.scheduler.preemption
    return {
        "asked": asked,
        "ticks": world.now,
        "tokens": world.num_tokens,
        "preemptions": dict(preemption.counts),
        "moved_bytes": world.moved_bytes,
        "wall_seconds": time.perf_counter() - began,
    }


def jain(slowdowns: Sequence[float]) -> float:
    """Jain's index of the speeds 1 / slowdown."""
    speeds = [1 / slowdown for slowdown in slowdowns]
    return sum(speeds) ** 2 / (len(speeds) * sum(speed * speed for speed in speeds))


def part(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def crowds(model: LoadedModel, policy: Policy, *, ticks: float = 20_000.0) -> dict[str, Any]:
    """Three tenants with 1, 8 and 64 requests at a time: what each gets of what would be fair, and its longest wait."""
    found: dict[str, Any] = {}
    for name, params in (
        ("endless", SamplingParams(temperature=0, max_tokens=2**20, ignore_eos=True, sink_tokens=4, window_tokens=32)),
        ("short", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)),
    ):
        world, chance = World(model, policy), random.Random(1)
        under_way: dict[str, list[Request]] = {tenant: [] for tenant in CROWDS}
        waits: dict[str, list[float]] = {tenant: [] for tenant in CROWDS}
        tokens = dict.fromkeys(CROWDS, 0)
        asked: list[Request] = []
        while world.now < ticks:
            for tenant, count in reversed(CROWDS.items()):
                while len(under_way[tenant]) < count:
                    ids = [chance.randrange(512) for _ in range(16)]
                    prompt = replace(Prompt.plain(ids), tenant=tenant)
                    request = world.engine.add_request(prompt, params, arrival_time=world.now)
                    under_way[tenant].append(request)
                    asked.append(request)
            world.step()
            for requests in under_way.values():
                requests[:] = [request for request in requests if not request.is_finished]
        for request in asked:
            tenant = request.prompt.tenant
            tokens[tenant] += len(request.answers[0].token_ids) if request.answers else 0
            first = world.now if request.first_token_time is None else request.first_token_time
            waits[tenant].append(first - request.arrival_time)
        # max-min fair: the one request of the first has a place, the others share the rest of 16
        parts = {"one": 1.0, "eight": 7.5, "many": 7.5}
        got = [tokens[tenant] / parts[tenant] for tenant in CROWDS]
        found[name] = {
            "tokens": tokens,
            "jain": round(sum(got) ** 2 / (len(got) * sum(each * each for each in got)), 3),
            "worst_wait": {tenant: round(max(each), 1) for tenant, each in waits.items()},
            "median_wait": {tenant: round(statistics.median(each), 1) for tenant, each in waits.items()},
        }
    return found


def summary(result: dict[str, Any], work: dict[str, float]) -> dict[str, Any]:
    """Waits and slowdowns by kind and by tenant, and Jain's index."""

    def waits(of: Sequence[tuple[Kind, str, Request]]) -> dict[str, float]:
        wait = [(request.first_scheduled_time or 0.0) - request.arrival_time for _, _, request in of]
        slow = [slowdown(kind, request) for kind, _, request in of]
        return {
            "requests": len(of),
            "wait_p50": round(part(wait, 0.5), 1),
            "wait_p99": round(part(wait, 0.99), 1),
            "slowdown_p50": round(part(slow, 0.5), 1),
            "slowdown_p99": round(part(slow, 0.99), 1),
            "slowdown_mean": round(statistics.fmean(slow), 2),
        }

    def slowdown(kind: Kind, request: Request) -> float:
        assert request.finished_time is not None
        return (request.finished_time - request.arrival_time) / work[kind.name]

    asked = result["asked"]
    kinds = {kind.name: waits([each for each in asked if each[0] is kind]) for kind in KINDS}
    tenants = {name: waits([each for each in asked if each[1] == name]) for name in sorted(set(TENANTS))}
    rest = {name: value for name, value in result.items() if name != "asked"}
    indexes = {
        "jain_requests": round(jain([slowdown(kind, request) for kind, _, request in asked]), 3),
        "jain_kinds": round(jain([each["slowdown_mean"] for each in kinds.values()]), 3),
        "jain_tenants": round(jain([each["slowdown_mean"] for each in tenants.values()]), 3),
    }
    return {"kinds": kinds, "tenants": tenants, **indexes, **rest}


def written(report: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        "| policy | kind | requests | wait p50 | wait p99 | slowdown p50 | slowdown p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy, found in report["policies"].items():
        for kind, row in found["kinds"].items():
            cells = (row["requests"], row["wait_p50"], row["wait_p99"], row["slowdown_p50"], row["slowdown_p99"])
            lines.append(f"| {policy} | {kind} | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    lines += [
        "",
        "| policy | ticks | tokens | gave way: recompute, swap | moved | Jain: requests | kinds | tenants | wall |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for policy, found in report["policies"].items():
        counts = found["preemptions"]
        lines.append(
            f"| {policy} | {found['ticks']:,.0f} | {found['tokens']:,} | {counts['recompute']}, {counts['swap']} | "
            f"{found['moved_bytes'] / 2**20:.1f} MiB | {found['jain_requests']} | {found['jain_kinds']} | "
            f"{found['jain_tenants']} | {found['wall_seconds']:.1f} s |"
        )
    lines += [
        "",
        "| answers | Jain, of fair parts | worst wait: 1 request | 8 | 64 | median wait: 1 request | 8 | 64 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in report["crowds"].items():
        waits = [f"{found[key][tenant]:,}" for key in ("worst_wait", "median_wait") for tenant in CROWDS]
        lines.append(f"| {name} | {found['jain']} | " + " | ".join(waits) + " |")
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any]) -> None:
    """The longest waits by kind and policy."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, (key, title) in zip(
        axes, (("wait_p99", "wait, p99, ticks"), ("slowdown_p50", "slowdown, median")), strict=True
    ):
        for number, (policy, found) in enumerate(report["policies"].items()):
            places = [index + 0.16 * (number - 2) for index in range(len(KINDS))]
            axis.bar(places, [max(found["kinds"][kind.name][key], 0.5) for kind in KINDS], width=0.15, label=policy)
        axis.set_yscale("log" if key == "wait_p99" else "linear")
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(KINDS)), [kind.name for kind in KINDS])
    axes[1].legend(fontsize=7)
    figure.savefig(RESULTS / "fairness.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--load", type=float, default=1.15, help="What comes, by what can be done.")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model()
    work = {kind.name: alone(model, kind) for kind in KINDS}
    coming = arrivals(arguments.requests, arguments.load, arguments.seed)
    policies = {name: summary(run(model, policy, coming, arguments.seed), work) for name, policy in POLICIES.items()}
    report = {"arguments": vars(arguments), "aging_ticks": AGING, "alone_ticks": work, "policies": policies}
    report["crowds"] = crowds(model, POLICIES["aging, gives way, swap"])
    save("fairness", report)
    (RESULTS / "fairness.md").write_text(written(report))
    plot(report)
    Console(width=160).print(written(report))


if __name__ == "__main__":
    main()
