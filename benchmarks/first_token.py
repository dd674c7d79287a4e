"""Time to first token with and without known documents, and the price of ordinary prompts against transformers.

    python benchmarks/first_token.py [--documents 8] [--tokens 512] [--dtype float32] [--threads 1]

A random Llama of 0.1 B parameters answers one question over documents. Compared in one run, interleaved, medians:

    cold        no document is known
    warm        every document is known, in a new order each time
    question    the bare question after the system prompt: what no cache can avoid
    generate    transformers with its own cache, for ordinary prefill and decode

With one thread the clock is the CPU time of the process, so that other work on the machine does not count; with more it
is wall time. Ratios count; absolute times belong to the machine. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import transformers
from facts import save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.layout import arrange
from kvmosaic.model import LoadedModel

NUM_SYSTEM, NUM_QUESTION, NUM_PLAIN, NUM_DECODED = 64, 32, 1024, 48


def build_model(dtype: torch.dtype) -> Any:
    """A random Llama with grouped queries, 0.1 B parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2_048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8_192,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


class TokenTimes(transformers.generation.streamers.BaseStreamer):
    """Notes when transformers hands out each token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(self.clock())

    def end(self) -> None:
        pass


def median_step(times: list[float]) -> float:
    """Median time between neighbouring tokens."""
    return statistics.median(later - earlier for earlier, later in pairwise(times[1:]))


class Bench:
    """The model twice: in kvmosaic, and in transformers alone (same weights)."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        dtype = getattr(torch, arguments.dtype)
        self.peer = build_model(dtype)
        model = LoadedModel.from_module(build_model(dtype))
        self.llm = LLM(
            model,
            chunk_cache_config=ChunkCacheConfig(
                position_strategy=arguments.strategy, repair="none", max_chunk_tokens=8_192
            ),
            engine_config=EngineConfig(max_num_batched_tokens=arguments.batched_tokens),
        )
        self.clock = time.process_time if arguments.threads == 1 else time.perf_counter
        self.random = random.Random(0)
        self.system = self.tokens(NUM_SYSTEM)
        self.documents = [self.tokens(arguments.tokens) for _ in range(arguments.documents)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(32_000) for _ in range(count)]

    def seconds(self, run: Callable[[], Any]) -> float:
        begin = self.clock()
        run()
        return self.clock() - begin

    def ask(self, prompt: Prompt) -> float:
        """Seconds to the first token."""
        return self.seconds(lambda: self.llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1)))

    def composed(self) -> Prompt:
        order = self.random.sample(self.documents, len(self.documents))
        return Prompt.from_tokens(self.system, order, self.tokens(NUM_QUESTION))

    def cold(self) -> float:
        self.llm.engine.kv_cache.reset()
        return self.ask(self.composed())

    def warm(self) -> float:
        return self.ask(self.composed())

    def question(self) -> float:
        return self.ask(Prompt.from_tokens(self.system, [], self.tokens(NUM_QUESTION)))

    def prefill(self) -> float:
        return self.ask(Prompt.plain(self.tokens(NUM_PLAIN)))

    def decode(self) -> float:
        params = SamplingParams(temperature=0, max_tokens=NUM_DECODED, ignore_eos=True)
        prompt = Prompt.plain(self.tokens(NUM_PLAIN))
        return median_step([self.clock() for _ in self.llm.stream(prompt, params)])

    def peer_prefill(self) -> float:
        ids = torch.tensor([self.tokens(NUM_PLAIN)])
        return self.seconds(lambda: self.generate(ids, 1))

    def peer_decode(self) -> float:
        times = TokenTimes(self.clock)
        self.generate(torch.tensor([self.tokens(NUM_PLAIN)]), NUM_DECODED, streamer=times)
        return median_step(times.times)

    def generate(self, ids: torch.Tensor, max_tokens: int, **options: Any) -> None:
        options |= {"do_sample": False, "max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "pad_token_id": 0}
        self.peer.generate(ids, attention_mask=torch.ones_like(ids), **options)

    def lookup_and_allocate(self) -> tuple[float, float]:
        """Seconds to look up one known chunk of 4,096 tokens, and to allocate it at a new place each time.

        A short document in front of it, of another length each time, moves it (under `sequential`). Its blocks stay the
        same, so no byte is copied.
        """
        chunk = self.tokens(4_096)
        self.llm.chunks.create(chunk, system=self.system)
        kv_cache = self.llm.engine.kv_cache
        lookups, allocates, blocks, distances = [], [], set(), set()
        for length in range(1, 51):
            prompt = Prompt.from_tokens(self.system, [self.tokens(length), chunk], self.tokens(NUM_QUESTION))
            alone = arrange(Prompt.from_tokens(self.system, [chunk], self.tokens(NUM_QUESTION)), "sequential")
            begin = time.perf_counter()
            kv_cache.plan(alone)
            lookups.append(time.perf_counter() - begin)
            plan = kv_cache.plan(arrange(prompt, "sequential"))
            begin = time.perf_counter()
            allocation = kv_cache.allocate(plan)
            allocates.append(time.perf_counter() - begin)
            distances.add(plan.spans[2].distance)
            blocks.add(tuple(allocation.spans[2].table.block_ids))
            kv_cache.release(allocation)
        assert len(distances) == len(allocates) and len(blocks) == 1, "moved each time, and the same blocks"
        return statistics.median(lookups), statistics.median(allocates)


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """All figures, interleaved."""
    figures = ("question", "warm", "prefill", "peer_prefill", "decode", "peer_decode")
    times: dict[str, list[float]] = {name: [] for name in (*figures, "cold")}
    bench.cold()
    for number in track(range(rounds), description="measuring"):
        if number < max(3, rounds // 3):
            times["cold"].append(bench.cold())
            bench.warm()
        for name in figures:
            times[name].append(getattr(bench, name)())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--strategy", default="sequential", choices=["shared", "sequential"])
    parser.add_argument("--batched-tokens", type=int, default=2_048)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bench = Bench(arguments)
    times = measure(bench, arguments.rounds)
    lookup, allocate = bench.lookup_and_allocate()
    median = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        "first token, cold by warm (target at least 25)": median["cold"] / median["warm"],
        "first token, warm by bare question": median["warm"] / median["question"],
        "prefill, ours by transformers (target at most 1.05)": median["prefill"] / median["peer_prefill"],
        "decode, ours by transformers (target at most 1.15)": median["decode"] / median["peer_decode"],
        "lookup of a 4,096-token chunk, ms (target below 1)": lookup * 1e3,
        "allocating it, ms (target below 0.1)": allocate * 1e3,
    }
    table = Table("figure", "value", title=f"0.1 B Llama, {arguments.dtype}, {arguments.threads} thread(s)")
    for name, value in ratios.items():
        table.add_row(name, f"{value:.3g}")
    for name, value in median.items():
        spread = (max(times[name]) - min(times[name])) / value
        table.add_row(f"{name}, seconds (spread {spread:.0%})", f"{value:.4f}")
    Console().print(table)
    report = {
        "arguments": vars(arguments),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ratios": ratios,
        "median_seconds": median,
        "seconds": times,
    }
    save(f"first_token-{arguments.dtype}-{arguments.threads}", report)


if __name__ == "__main__":
    main()
