"""What the size of a block costs and saves: empty slots, bookkeeping, planning, lost matches, attention.

    python benchmarks/block_size.py [--rounds 5] [--sizes 1 2 4 8 16 32 64 128 256]

For each size, with the engine's own pools, cache and attention:

    empty       slots of last blocks that stay empty, by lengths of real texts: the descriptions of the packages of this
                environment and the pages of this repository (documents); a question of 64 tokens and one of
                their paragraphs (answers)
    bookkeeping bytes of Python objects per token (tracemalloc) for chunks, and for prefix blocks
    planning    plan, allocate and release: 8 known documents of 512 tokens; a known plain prompt of 4,096; 8 new ones
    lost        tokens of a common beginning of two prompts that are computed again, and tokens that are copied, because
                the block that they are in goes on in another way
    runs        of neighbouring slots in which a document of 512 tokens lies, after many documents came and went
    attention   one layer over 8 such documents: neighbours, as they lie after that, and every block apart

Tokens are characters by 4. Times are CPU time of one thread, medians, sizes in turns. Results: results/block_size.*
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from attention import Case
from facts import RESULTS, save

from kvmosaic.attention import AttentionBackend, Piece, RowGroup, TorchBackend, choose_backend
from kvmosaic.cache import Allocation, BlockPool, BlockTable, KVCache
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.layout import Layout, arrange
from kvmosaic.prompt import Prompt

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_DOCUMENTS, DOCUMENT, SYSTEM, QUESTION, PLAIN = 8, 512, 256, 64, 4_096
POOL_TOKENS = 16_384
"""Of the pool in which documents come and go."""
LONGEST, LONGEST_ANSWER, CHARACTERS = 8_192, 1_024, 4
ROOT = Path(__file__).parents[1]


def texts() -> list[str]:
    """Real texts."""
    pages = [path.read_text() for path in sorted(ROOT.rglob("*.md")) if ".venv" not in path.parts]
    pages += [str(each.metadata.get_payload()) for each in distributions() if each.metadata.get_payload()]
    return [page for page in pages if len(page) >= CHARACTERS]


def lengths(parts: Sequence[str], longest: int) -> list[int]:
    return [min(len(part) // CHARACTERS, longest) for part in parts if len(part) >= CHARACTERS]


def empty_share(sizes: Sequence[int], block_size: int) -> float:
    """Of all slots of their blocks, those without a token."""
    slots = sum(-(-size // block_size) * block_size for size in sizes)
    return 1 - sum(sizes) / slots


class World:
    """A KV cache with room for so many tokens, and prompts for it."""

    def __init__(self, block_size: int, num_tokens: int) -> None:
        config = ChunkCacheConfig(block_size=block_size, max_chunk_tokens=LONGEST)
        blocks = -(-num_tokens // block_size) + 64
        self.kv_cache = KVCache("model", config, request_blocks=blocks, chunk_blocks=blocks, bytes_per_block=1)
        self.random = random.Random(0)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(32_000) for _ in range(count)]

    def run(self, layout: Layout) -> Allocation:
        """Allocates a prompt and computes all of it."""
        allocation = self.kv_cache.allocate(self.kv_cache.plan(layout))
        self.kv_cache.begin_step()
        for span in allocation.spans:
            if span.can_advance:
                self.kv_cache.advance(allocation, span.index, span.num_tokens - span.num_computed)
        self.kv_cache.end_step()
        return allocation


def composed(system: list[int], documents: list[list[int]], question: list[int]) -> Layout:
    return arrange(Prompt.from_tokens(system, documents, question), "shared", "system")


def bookkeeping(block_size: int, document_lengths: Sequence[int], *, is_plain: bool) -> float:
    """Bytes per token of what the KV cache keeps, its pools included; tokens themselves (4 bytes each) too."""
    total = sum(document_lengths)
    inputs = World(block_size, 16)
    prompts = [inputs.tokens(length) for length in document_lengths]
    system = inputs.tokens(SYSTEM)
    tracemalloc.start()
    world = World(block_size, total + len(prompts) * block_size + 4 * SYSTEM)
    for prompt in prompts:
        layout = arrange(Prompt.plain(prompt)) if is_plain else composed(system, [prompt], [1])
        world.kv_cache.release(world.run(layout))
    layout = None
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / total


class Planning:
    """Times of one block size: plan, allocate, release."""

    def __init__(self, block_size: int) -> None:
        self.world = World(block_size, 2 * NUM_DOCUMENTS * DOCUMENT + 2 * PLAIN)
        self.system = self.world.tokens(SYSTEM)
        self.known = [self.world.tokens(DOCUMENT) for _ in range(NUM_DOCUMENTS)]
        self.plain = self.world.tokens(PLAIN)
        for layout in (composed(self.system, self.known, [1]), arrange(Prompt.plain(self.plain))):
            self.world.kv_cache.release(self.world.run(layout))

    def seconds(self, kind: str) -> float:
        """CPU time of this thread for one prompt; its layout is made beforehand."""
        question = self.world.tokens(QUESTION)
        if kind == "plain":
            layout = arrange(Prompt.plain([*self.plain, *question]))
        else:
            documents = self.known if kind == "known" else [self.world.tokens(DOCUMENT) for _ in self.known]
            layout = composed(self.system, documents, question)
        kv_cache = self.world.kv_cache
        begin = time.thread_time()
        kv_cache.release(kv_cache.allocate(kv_cache.plan(layout)))
        return time.thread_time() - begin


def common_beginnings(block_size: int, rounds: int) -> tuple[float, float]:
    """Mean tokens of a common beginning that the second of two plain prompts computes again, and that it copies."""
    world, lost, copied = World(block_size, 8_192), 0, 0
    for _ in range(rounds):
        shared = world.tokens(world.random.randrange(1, 2_000))
        ends = [[number, *world.tokens(QUESTION)] for number in (1, 2)]  # they differ from their first token on
        first, second = (arrange(Prompt.plain([*shared, *end])) for end in ends)
        world.kv_cache.release(world.run(first))
        (span,) = world.kv_cache.plan(second).spans
        lost += len(shared) - span.num_reused
        copied += span.num_copied
        world.kv_cache.reset()
    return lost / rounds, copied / rounds


def churned(block_size: int, document_lengths: Sequence[int], rounds: int = 3_000) -> list[BlockTable]:
    """8 documents of 512 tokens in a pool in which others came and went, the least recently used first."""
    pool, chance = BlockPool("chunk_cache", POOL_TOKENS // block_size, block_size), random.Random(0)
    tables: OrderedDict[int, BlockTable] = OrderedDict()
    usual = [length for length in document_lengths if length <= POOL_TOKENS // 8]
    for number in range(rounds + NUM_DOCUMENTS):
        length = DOCUMENT if number >= rounds else chance.choice(usual)
        if tables and chance.random() < 0.5 and number < rounds:
            tables.move_to_end(chance.choice(list(tables)))
        while not pool.can_allocate(pool.blocks_for(length)):
            tables.popitem(last=False)[1].release()
        tables[number] = BlockTable(pool)
        tables[number].append(length)
    return [tables[number] for number in range(rounds, rounds + NUM_DOCUMENTS)]


def reads_of(slots: Sequence[Sequence[tuple[int, int]]]) -> tuple[Piece, ...]:
    """Reads of documents, each given as runs (first slot, tokens), all at the same place."""
    reads = []
    for runs in slots:
        position = 0
        for first, count in runs:
            reads.append(Piece("chunk_cache", first, count, position))
            position += count
    return tuple(reads)


def scattered(block_size: int) -> list[list[tuple[int, int]]]:
    """Documents of which no two blocks are neighbours."""
    blocks = list(range(0, POOL_TOKENS // block_size, 2))
    random.Random(0).shuffle(blocks)
    size = min(block_size, DOCUMENT)
    count = DOCUMENT // size
    return [
        [(block * block_size, size) for block in blocks[number * count : (number + 1) * count]]
        for number in range(NUM_DOCUMENTS)
    ]


class Attention:
    """One layer over 8 documents that lie in different ways."""

    def __init__(self, dtype: torch.dtype, num_rows: int) -> None:
        self.case = Case(dtype, num_rows, NUM_DOCUMENTS, POOL_TOKENS, torch.device("cpu"))
        self.num_rows = num_rows

    def seconds(self, backend: AttentionBackend, reads: tuple[Piece, ...]) -> float:
        self.case.groups = [RowGroup(0, self.num_rows, DOCUMENT, reads)]
        return statistics.median(self.case.times(backend, time.thread_time))


def measure_attention(layouts: dict[str, tuple[Piece, ...]], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds per layer, by backend, rows and layout."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    native = choose_backend("native", torch.bfloat16, torch.device("cpu"))
    backends: dict[str, AttentionBackend] = {native.name: native.backend, "torch": TorchBackend()}
    for num_rows in (1, 32):
        attention = Attention(torch.bfloat16, num_rows)
        for _ in range(rounds):
            for name, backend in backends.items():
                for layout, reads in layouts.items():
                    if name == "torch" and len(reads) > 512:
                        continue  # seconds of calls, each over a few keys
                    key = f"{name}, {num_rows} row{'s' if num_rows > 1 else ''}"
                    found.setdefault(key, {}).setdefault(layout, []).append(attention.seconds(backend, reads))
    return {
        key: {layout: 1e3 * statistics.median(times) for layout, times in layouts.items()}
        for key, layouts in found.items()
    }


def median_ms(measure: Callable[[], float], rounds: int) -> float:
    return 1e3 * statistics.median(measure() for _ in range(rounds))


def study(sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """One row per size."""
    pages = texts()
    documents = lengths(pages, LONGEST)
    parts = [part for page in pages for part in re.split(r"\n\s*\n", page)]
    answers = [QUESTION + length for length in lengths(parts, LONGEST_ANSWER)]
    some = random.Random(0).sample(documents, min(60, len(documents)))
    tables = {size: churned(size, documents) for size in sizes}
    layouts = {"neighbours": reads_of([[(number * DOCUMENT, DOCUMENT)] for number in range(NUM_DOCUMENTS)])}
    for size in sizes:
        layouts[f"as they lie, {size}"] = reads_of([table.runs() for table in tables[size]])
        layouts[f"apart, {size}"] = reads_of(scattered(size))
    attention = measure_attention(layouts, rounds)
    plannings = {size: Planning(size) for size in sizes}
    seconds: dict[tuple[int, str], list[float]] = {}
    for _ in range(8 * rounds):
        for size, planning in plannings.items():
            for kind in ("known", "plain", "new"):
                seconds.setdefault((size, kind), []).append(planning.seconds(kind))
    rows = [
        {
            "block_size": size,
            "empty_documents": empty_share(documents, size),
            "empty_answers": empty_share(answers, size),
            "chunk_bytes_per_token": bookkeeping(size, some, is_plain=False),
            "prefix_bytes_per_token": bookkeeping(size, some, is_plain=True),
            "planning_ms": {kind: 1e3 * statistics.median(seconds[size, kind]) for kind in ("known", "plain", "new")},
            **dict(zip(("lost_tokens", "copied_tokens"), common_beginnings(size, 40 * rounds), strict=True)),
            "runs_per_document": statistics.fmean(len(table.runs()) for table in tables[size]),
            "attention_ms": {
                key: {
                    "neighbours": times["neighbours"],
                    "as they lie": times.get(f"as they lie, {size}"),
                    "apart": times.get(f"apart, {size}"),
                }
                for key, times in attention.items()
            },
        }
        for size in sizes
    ]
    about = {"documents": len(documents), "median": statistics.median(documents), "answers": len(answers)}
    return [{"texts": about | {"median_answer": statistics.median(answers)}}, *rows]


def written(about: dict[str, Any], rows: Sequence[dict[str, Any]], head: str) -> str:
    """The rows as Markdown."""
    keys = list(rows[0]["attention_ms"])
    lines = ["# Block size", "", f"Written by `benchmarks/block_size.py`: {head}", ""]
    lines += [
        f"{about['documents']} documents (median {about['median']:,.0f} tokens), {about['answers']:,} answers (median "
        f"{about['median_answer']:,.0f}). Planning: plan, allocate, release, ms. Lost, copied: of a common beginning.",
        "",
        "| block size | empty, documents | empty, answers | bytes per token, chunks | prefix blocks | plan 8 known | "
        "4,096 plain | 8 new | lost | copied | runs per document |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        planning = row["planning_ms"]
        lines.append(
            f"| {row['block_size']} | {row['empty_documents']:.2%} | {row['empty_answers']:.1%} | "
            f"{row['chunk_bytes_per_token']:.1f} | {row['prefix_bytes_per_token']:.1f} | {planning['known']:.2f} | "
            f"{planning['plain']:.2f} | {planning['new']:.2f} | {row['lost_tokens']:.1f} | "
            f"{row['copied_tokens']:.1f} | {row['runs_per_document']:.1f} |"
        )
    lines += [
        "",
        "Attention of one layer over 8 documents of 512 tokens, bfloat16, ms: as they lie after many came and",
    ]
    lines += ["went / with every block apart; in one run each, whatever the block size, it takes:", ""]
    lines += ["| block size | " + " | ".join(keys) + " |", "|---" * (1 + len(keys)) + "|"]
    one = [f"{rows[0]['attention_ms'][key]['neighbours']:.2f}" for key in keys]
    lines.append("| in one run | " + " | ".join(one) + " |")
    for row in rows:
        cells = []
        for key in keys:
            times = row["attention_ms"][key]
            cells.append(
                " / ".join("–" if times[way] is None else f"{times[way]:.2f}" for way in ("as they lie", "apart"))
            )
        lines.append(f"| {row['block_size']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict[str, Any]]) -> None:
    """Four small panels over the block size."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    sizes = [row["block_size"] for row in rows]
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    for name in ("documents", "answers"):
        axes[0].plot(sizes, [100 * row[f"empty_{name}"] for row in rows], marker="o", markersize=3, label=name)
    axes[0].set(title="empty slots, %")
    for name in ("chunk", "prefix"):
        axes[1].plot(sizes, [row[f"{name}_bytes_per_token"] for row in rows], marker="o", markersize=3, label=name)
    axes[1].set(title="bookkeeping, bytes per token", yscale="log")
    for kind, label in (("known", "8 known documents"), ("plain", "4,096 plain tokens"), ("new", "8 new documents")):
        axes[2].plot(sizes, [row["planning_ms"][kind] for row in rows], marker="o", markersize=3, label=label)
    axes[2].set(title="planning, ms", yscale="log")
    for key in rows[0]["attention_ms"]:
        times = [row["attention_ms"][key]["as they lie"] for row in rows]
        axes[3].plot(
            sizes, [float("nan") if each is None else each for each in times], marker="o", markersize=3, label=key
        )
    axes[3].set(title="attention as they lie, ms", yscale="log")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes], fontsize=7)
        axis.set_xlabel("block size")
        axis.axvline(ChunkCacheConfig().block_size, color="black", linestyle=":", linewidth=1)
        axis.legend(fontsize=7, loc="center right" if axis is axes[3] else "best")
    figure.savefig(RESULTS / "block_size.png", dpi=130)


def main() -> None:
    """Measures, and writes JSON, Markdown and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    arguments = parser.parse_args()
    with torch.inference_mode():
        (about, *rows) = study(arguments.sizes, arguments.rounds)
    path = save("block_size", {"rounds": arguments.rounds, **about, "rows": rows})
    facts = json.loads(path.read_text())
    head = f"{facts['processor']}, load average {facts['load_average']:.1f}, commit {facts['commit']}."
    (RESULTS / "block_size.md").write_text(written(about["texts"], rows, head))
    plot(rows)
    print((RESULTS / "block_size.md").read_text())


if __name__ == "__main__":
    main()
