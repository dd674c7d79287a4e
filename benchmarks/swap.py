"""What it costs that an answer gives way: computing its tokens again, against moving them to the host and back.

    python benchmarks/swap.py [--model 0.1b 0.5b] [--tokens 64 256 1024] [--rounds 3] [--threads 1]

A random Llama, in the storage of a real engine. Computing is a plain prompt of so many tokens, without a prefix cache,
up to its first token. Moving is what the swap space does: its blocks are read into the memory of the host, and written
into others. Medians of wall time, in turns. On a CPU, host and device are the same memory. Results: results/swap.*
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from facts import RESULTS, save
from rich.console import Console
from tiers import SIZES, build_model

from kvmosaic.assembly import build_engine
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.engine import Engine
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams


def computed(engine: Engine, num_tokens: int, chance: random.Random) -> float:
    """Seconds of computing so many tokens."""
    prompt = Prompt.plain([chance.randrange(engine.runner.model.vocab_size) for _ in range(num_tokens)])
    began = time.perf_counter()
    request = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while not request.is_finished:
        engine.step()
    return time.perf_counter() - began


def moved(engine: Engine, num_tokens: int) -> float:
    """Seconds of moving so many tokens to the host and back, into other blocks."""
    pool, storage = engine.kv_cache.request_pool, engine.runner.storages["request"]
    blocks = pool.allocate(2 * pool.blocks_for(num_tokens))
    half = len(blocks) // 2
    began = time.perf_counter()
    storage.write_chunk(blocks[half:], storage.read_chunk(blocks[:half], num_tokens))
    if storage.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    pool.release(blocks)
    return seconds


def measure(size: str, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """One model at all lengths."""
    model = build_model(size, torch.bfloat16)
    blocks = 2 * sum(-(-length // 16) for length in lengths)
    request_cache = model.bytes_per_token() * 16 * (blocks + 16)
    config = EngineConfig(request_cache_size=request_cache, enable_prefix_caching=False)
    engine, chance, rows = build_engine(model, ChunkCacheConfig(chunk_cache_size="16MiB"), config), random.Random(1), []
    for length in lengths:
        computed(engine, length, chance), moved(engine, length)
        pairs = [(computed(engine, length, chance), moved(engine, length)) for _ in range(rounds)]
        compute, move = (statistics.median(each) for each in zip(*pairs, strict=True))
        num_bytes = length * model.bytes_per_token()
        rows.append({"tokens": length, "bytes": num_bytes, "compute_seconds": compute, "move_seconds": move})
    return rows


def written(models: dict[str, list[dict[str, Any]]]) -> str:
    """The table."""
    lines = ["| model | tokens | MiB | compute again | move and back | times |", "|---|---|---|---|---|---|"]
    for size, rows in models.items():
        for row in rows:
            times = row["compute_seconds"] / row["move_seconds"]
            lines.append(
                f"| {size} | {row['tokens']:,} | {row['bytes'] / 2**20:.1f} | {row['compute_seconds'] * 1e3:,.1f} ms | "
                f"{row['move_seconds'] * 1e3:,.2f} ms | {times:,.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["0.1b", "0.5b"], choices=list(SIZES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1_024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    models = {size: measure(size, arguments.tokens, arguments.rounds) for size in arguments.model}
    save("swap", {"torch": torch.__version__, "arguments": vars(arguments), "models": models})
    (RESULTS / "swap.md").write_text(written(models))
    Console(width=120).print(written(models))


if __name__ == "__main__":
    main()
