"""Recorded traffic, replayed without a model: what a cache of documents saves of it.

    python benchmarks/replay.py RAGPulse/data [--requests 400] [--cache-share 0.2] [--eviction lru] [--output FOLDER]

A trace is a folder of RAGPulse, or a .jsonl file of Mooncake, whose requests do not tell documents from other text. It
has ids and lengths of blocks of at most 512 tokens; equal ids are equal texts. A prompt of the same shape is planned
and allocated by the library's own layouts, keys, pools and eviction, counts as computed at once, and is released: the
figures of an engine that answers one request after the other.

`--cache-share` (several times for more) bounds the documents' cache, as a share of all different documents.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

from facts import RESULTS, commit, save
from rich.progress import track

from kvmosaic.cache import KVCache, Plan
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.console.text import markdown_table
from kvmosaic.engine.placement import in_best_order
from kvmosaic.errors import ChunkCacheFull, RequestTooLarge
from kvmosaic.eviction import POLICIES
from kvmosaic.layout import arrange
from kvmosaic.prompt import Prompt, PromptEncoder, Segment, SegmentKind
from kvmosaic.prompt.preamble import preamble_rule, with_preamble

BLOCK_TOKENS = 512
REQUESTS = "0_trace.jsonl"
LENGTHS = {
    "1_sys_prompt.jsonl": "sys_prompt_id",
    "2_passages.jsonl": "passage_id",
    "3_history.jsonl": "history_id",
    "4_user_input.jsonl": "user_input_id",
    "5_web_search.jsonl": "web_search_id",
}
"""The files with the lengths of blocks, and their field with the id."""
POOL_BLOCKS, POOL_TOKENS = 2**21, 2**27
"""Limits of an unlimited pool, so that any trace fits into memory."""
FILLERS, DATES = 20, 84
COMPANION = (0,) * 8
CURVE_POINTS = 50


class TraceBlock(NamedTuple):
    """A block of text: equal ids are equal texts."""

    id: int
    num_tokens: int


@dataclass(frozen=True)
class TraceRequest:
    """One request, in the order of its prompt; `rest`: history, results of a web search, and the question."""

    seconds: float
    system: tuple[TraceBlock, ...]
    documents: tuple[TraceBlock, ...]
    rest: tuple[TraceBlock, ...]

    @property
    def num_document_tokens(self) -> int:
        return sum(block.num_tokens for block in self.documents)

    @property
    def num_tokens(self) -> int:
        return sum(block.num_tokens for part in (self.system, self.documents, self.rest) for block in part)


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their times."""

    name: str
    requests: tuple[TraceRequest, ...]

    @property
    def has_documents(self) -> bool:
        return any(request.documents for request in self.requests)

    @property
    def distinct_tokens(self) -> int:
        """Of all documents, each counted once; of a trace without documents, of all blocks."""
        parts = ((each.documents if self.has_documents else each.rest) for each in self.requests)
        return sum({block.id: block.num_tokens for part in parts for block in part}.values())


def objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one per line."""
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


def read_trace(path: Path, max_requests: int | None = None) -> Trace:
    """Reads a folder of RAGPulse, its 0_trace.jsonl, or a file of Mooncake."""
    file = path / REQUESTS if path.is_dir() else path
    if file.name == REQUESTS:
        name, found = file.resolve().parent.name, _ragpulse(file)
    else:
        name, found = file.stem, [_mooncake(each) for each in objects(file)]
    return Trace(name, tuple(sorted(found, key=lambda request: request.seconds)[:max_requests]))


def _ragpulse(file: Path) -> list[TraceRequest]:
    blocks = {
        each[field]: TraceBlock(each[field], each["token_length"])
        for name, field in LENGTHS.items()
        for each in objects(file.parent / name)
    }
    names = (("sys_prompt",), ("passages_ids",), ("history", "web_search", "user_input"))
    return [
        TraceRequest(
            float(each["timestamp"]),
            *(tuple(blocks[id] for name in part for id in each["hash_ids"].get(name, ())) for part in names),
        )
        for each in objects(file)
    ]


def _mooncake(each: dict[str, Any]) -> TraceRequest:
    *ids, last = each["hash_ids"]
    blocks = [TraceBlock(id, BLOCK_TOKENS) for id in ids]
    blocks.append(TraceBlock(last, each["input_length"] - BLOCK_TOKENS * len(ids)))
    return TraceRequest(float(each["timestamp"]) * 1e-3, (), (), tuple(blocks))


@dataclass(frozen=True)
class Variant:
    """One way to cache the prompts of a trace."""

    name: str
    about: str
    """What documents see, so that they are found after it only."""
    preamble: str = "all"
    """What documents see of the system text: all, its first block, or what the rule "auto" finds."""
    chunk_context: str = "system"
    documents_order: str = "sent"
    is_plain: bool = False


PREFIX_ONLY = Variant("prefix", "prefix caching only", is_plain=True)
FIRST_BLOCK = Variant("first-block", "its first block", "first")
VARIANTS = (
    PREFIX_ONLY,
    Variant("system", "the whole system text"),
    FIRST_BLOCK,
    Variant("auto", "it, up to the first date", "auto"),
    Variant("companions", "it, and a companion", "auto", "companions"),
    Variant("any-order", "the same, in the order that reuses most", "auto", "companions", "any"),
    Variant("none", "nothing", chunk_context="none"),
)


class PromptWriter:
    """Writer of prompts with the shape and the repetitions of a trace.

    A block becomes words, each of which is one token: the first one identifies it, the others are the same in all
    blocks. A block of a system text *changes* if other requests with the same blocks before it go on differently,
    wherever in the trace; the first one never does. A line with a date begins there, as applications write it.
    """

    def __init__(self, trace: Trace) -> None:
        self._numbers: dict[int, int] = {}
        self._changing = _ChangingBlocks(request.system for request in trace.requests)
        for request in trace.requests:
            for block in (*request.system, *request.documents, *request.rest):
                self._numbers.setdefault(block.id, FILLERS + len(self._numbers))
        self.vocab_size = FILLERS + len(self._numbers) + DATES
        self._fillers = tuple(range(FILLERS)) * (BLOCK_TOKENS // FILLERS + 1)
        self._auto = preamble_rule("auto")
        self._encoders = {
            preamble: PromptEncoder(
                None, ChunkCacheConfig(preamble=rule, max_prompt_chunks=10**6), vocab_size=self.vocab_size
            )
            for preamble, rule in (("all", "all"), ("first", BLOCK_TOKENS), ("auto", "all"))
        }

    def prompt(self, request: TraceRequest, variant: Variant) -> Prompt:
        """The prompt of a request, as token ids."""
        num_stable = self._changing.first_in(request.system)
        lines = [self._words((block,), is_dated=index >= num_stable) for index, block in enumerate(request.system)]
        system = tuple(itertools.chain(*lines))
        documents, rest = [self._words((block,)) for block in request.documents], self._words(request.rest)
        if variant.is_plain or not (system or documents):
            return Prompt.plain((*system, *itertools.chain(*documents), *rest))
        segments = [Segment(SegmentKind.CHUNK, words) for words in documents]
        if system and variant.preamble == "auto" and documents:
            text = "\n".join(" ".join(map(self._word, line)) for line in lines)
            head = with_preamble([Segment(SegmentKind.SYSTEM, text=text), *segments], self._auto)
            segments = [*_split_words(system, head[: len(head) - len(segments)]), *segments]
        elif system:
            segments.insert(0, Segment(SegmentKind.SYSTEM, system))
        prompt = Prompt((*segments, Segment(SegmentKind.QUESTION, rest)), companions=(COMPANION,))
        return self._encoders[variant.preamble].encode(prompt)

    def _words(self, blocks: Iterable[TraceBlock], *, is_dated: bool = False) -> tuple[int, ...]:
        words: list[int] = []
        for block in blocks:
            number = self._numbers[block.id]
            first = (self.vocab_size - 1 - number % DATES, number) if is_dated else (number,)
            words += first
            words += self._fillers[: max(block.num_tokens - len(first), 0)]
        return tuple(words)

    def _word(self, number: int) -> str:
        date = self.vocab_size - 1 - number
        if date < DATES:
            return f"2026-{1 + date % 12:02}-{1 + date % 28:02}"
        letters = ""
        while number >= 0:
            letters = ascii_lowercase[number % 26] + letters
            number = number // 26 - 1
        return letters


class _ChangingBlocks:
    """Tree of the system texts of a trace: where texts that begin alike go on differently."""

    def __init__(self, texts: Iterable[Sequence[TraceBlock]]) -> None:
        self._children: dict[tuple[int, int], int] = {}
        """(node, block) -> node; node 0 is the beginning of all texts."""
        self._num_children = [0]
        for text in texts:
            node = 0
            for block in text:
                after = self._children.get((node, block.id))
                if after is None:
                    after = self._children[node, block.id] = len(self._num_children)
                    self._num_children[node] += 1
                    self._num_children.append(0)
                node = after

    def first_in(self, text: Sequence[TraceBlock]) -> int:
        """Index of the first block of a text that changes, at least 1; the number of its blocks if none does."""
        node = 0
        for index, block in enumerate(text):
            if index and self._num_children[node] > 1:
                return index
            node = self._children[node, block.id]
        return len(text)


def _split_words(words: tuple[int, ...], parts: Sequence[Segment]) -> list[Segment]:
    segments, start = [], 0
    for part in parts:
        end = start + len((part.text or "").split())
        segments.append(Segment(part.kind, words[start:end]))
        start = end
    assert start == len(words), "a system text has as many words as tokens"
    return segments


@dataclass
class Row:
    """What one variant saved."""

    variant: str
    about: str
    cache: str
    document_tokens: int = 0
    document_reused: int = 0
    prompt_tokens: int = 0
    prompt_reused: int = 0
    evictions: int = 0
    """Chunks evicted; of a trace without documents, blocks."""
    curve: tuple[tuple[int, float, float], ...] = ()
    """Requests so far, and both shares at that moment."""

    @property
    def document_share(self) -> float:
        return self.document_reused / self.document_tokens if self.document_tokens else 0.0

    @property
    def prompt_share(self) -> float:
        return self.prompt_reused / self.prompt_tokens if self.prompt_tokens else 0.0


def cache_name(share: float | None, eviction: str) -> str:
    return "unlimited" if share is None else f"{100 * share:.4g}%, {eviction}"


def simulate(
    trace: Trace, writer: PromptWriter, variant: Variant, share: float | None = None, eviction: str = "lru"
) -> Row:
    """Replays a trace in a cache of this size: without a model, in the time of the trace."""
    row = Row(variant.name, variant.about, cache_name(share, eviction))
    block_size = 16 if trace.has_documents else BLOCK_TOKENS
    # each part of a prompt begins on a block of its own
    wanted = sum(each.num_tokens // block_size + 3 + len(each.documents) for each in trace.requests)
    blocks = [min(wanted, POOL_BLOCKS, POOL_TOKENS // block_size)] * 2
    if share is not None:
        blocks[trace.has_documents] = max(math.ceil(share * trace.distinct_tokens / block_size), 1)
    now = itertools.count()
    kv_cache = KVCache(
        "replay",
        ChunkCacheConfig(block_size=block_size, max_chunks=10**6, eviction=eviction),
        request_blocks=blocks[0],
        chunk_blocks=blocks[1],
        clock=lambda: seconds + 1e-6 * next(now),  # later than the last reading, so that one chunk is the oldest
    )
    for number, request in enumerate(trace.requests, 1):
        seconds = request.seconds
        prompt = writer.prompt(request, variant)
        layout = arrange(prompt, "sequential", variant.chunk_context)
        if variant.documents_order == "any":
            layout = arrange(in_best_order(prompt, layout, kv_cache), "sequential", variant.chunk_context)
        plan = kv_cache.plan(layout)
        try:
            allocation = kv_cache.allocate(plan)
        except (ChunkCacheFull, RequestTooLarge) as error:
            sys.exit(f"a prompt has no room in a cache of {row.cache} ({error}); raise --cache-share")
        kv_cache.begin_step()
        for index, span in enumerate(allocation.spans):
            if span.can_advance:
                kv_cache.advance(allocation, index, span.num_tokens - span.num_computed)
        kv_cache.end_step()
        kv_cache.release(allocation)
        _count(row, plan, request)
        if number % max(len(trace.requests) // CURVE_POINTS, 1) == 0 or number == len(trace.requests):
            row.curve += ((number, round(row.document_share, 5), round(row.prompt_share, 5)),)
    statistics = kv_cache.statistics()
    row.evictions = statistics.evictions if trace.has_documents else statistics.prefix_evictions
    return row


def _count(row: Row, plan: Plan, request: TraceRequest) -> None:
    chunks = [span for span in plan.spans if span.is_chunk]
    num_documents, num_reused = request.num_document_tokens, sum(span.num_reused for span in chunks)
    if request.documents and not chunks:  # a plain prompt: what its reused prefix has of them
        before = sum(block.num_tokens for block in request.system)
        num_reused = min(max(plan.reused_tokens - before, 0), num_documents)
    spans = [span for span in plan.spans if span.kind is not SegmentKind.COMPANION]
    row.document_tokens += num_documents
    row.document_reused += num_reused
    row.prompt_tokens += sum(span.num_tokens for span in spans)
    row.prompt_reused += sum(span.num_reused for span in spans)


def clairvoyant(trace: Trace, share: float) -> Row:
    """Evicts the document whose next use is farthest away (Belady), for keys of the first block and the document.

    The optimum for documents of one size; for different sizes a close one. Only documents are counted.
    """
    uses = [
        ((request.system[0].id if request.system else -1, block.id), block.num_tokens)
        for request in trace.requests
        for block in request.documents
    ]
    never = len(uses)
    next_uses, later = [never] * len(uses), dict[tuple[int, int], int]()
    for index in range(len(uses) - 1, -1, -1):
        next_uses[index] = later.get(uses[index][0], never)
        later[uses[index][0]] = index
    row = Row("clairvoyant", FIRST_BLOCK.about, cache_name(share, "clairvoyant"))
    capacity, held, used = math.ceil(share * trace.distinct_tokens / 16), dict[tuple[int, int], int](), 0
    order: list[tuple[int, tuple[int, int], int]] = []
    for (key, num_tokens), next_use in zip(uses, next_uses, strict=True):
        num_blocks = -(-num_tokens // 16)
        row.document_tokens += num_tokens
        row.document_reused += num_tokens if key in held else 0
        used += 0 if key in held else num_blocks
        held[key] = next_use
        heapq.heappush(order, (-next_use, key, num_blocks))
        while used > capacity:
            farthest, victim, size = heapq.heappop(order)
            if held.get(victim) == -farthest:  # an older entry of a chunk that was used since is skipped
                del held[victim]
                used -= size
                row.evictions += 1
    return row


def run(trace: Trace, shares: Sequence[float] = (), evictions: Sequence[str] = ("lru",)) -> list[Row]:
    """The rows of all variants, and of all caches of these sizes."""
    writer = PromptWriter(trace)
    variants = VARIANTS if trace.has_documents else (PREFIX_ONLY,)
    limited = FIRST_BLOCK if trace.has_documents else PREFIX_ONLY
    rounds = [(variant, None, "lru") for variant in variants]
    rounds += [(limited, share, eviction) for share in shares for eviction in evictions]
    rows = [simulate(trace, writer, *each) for each in track(rounds, trace.name, disable=not sys.stderr.isatty())]
    return rows + ([clairvoyant(trace, share) for share in shares] if trace.has_documents else [])


def markdown(trace: Trace, rows: Sequence[Row], options: str) -> str:
    documents = sum(request.num_document_tokens for request in trace.requests)
    headings = ("documents see", "cache", "documents reused", "prompts saved", "evicted")
    cells = [
        (
            row.about,
            row.cache,
            f"{row.document_share:.1%}" if row.document_tokens else "–",
            f"{row.prompt_share:.1%}" if row.prompt_tokens else "–",
            f"{row.evictions:,}",
        )
        for row in rows
    ]
    return (
        f"# Replay of {trace.name}\n\n{len(trace.requests):,} requests, "
        f"{sum(request.num_tokens for request in trace.requests):,} prompt tokens, {documents:,} of them in documents; "
        f"`python benchmarks/replay.py {options}`; commit {commit()}\n\n{markdown_table(headings, cells)}\n\n"
        "Documents reused: share of the documents' tokens that was cached; prompts saved: share of all prompt tokens "
        "that was not computed; evicted: chunks. Where the trace has no documents, cache and evicted count prefix "
        "blocks.\n"
    )


def draw(trace: Trace, rows: Sequence[Row], path: Path) -> None:
    """The shares by the number of requests so far."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = FigureCanvasAgg(Figure(figsize=(12, 4.2), layout="constrained")).figure
    for column, label in ((1, "documents reused"), (2, "prompts saved")):
        axes = figure.add_subplot(1, 2, column)
        for row in rows:
            if row.curve:
                axes.plot(
                    *zip(*((at[0], at[column]) for at in row.curve), strict=True), label=f"{row.variant}, {row.cache}"
                )
        axes.set(xlabel="requests so far", ylabel=label, ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.suptitle(f"Replay of {trace.name}, {len(trace.requests):,} requests", fontsize=10)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Replays, and writes JSON, Markdown and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--cache-share", type=float, action="append", default=[])
    parser.add_argument("--eviction", choices=tuple(POLICIES), action="append")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    trace = read_trace(chosen.trace, chosen.requests)
    rows = run(trace, chosen.cache_share, chosen.eviction or ("lru",))
    options = " ".join([trace.name, *(f"--cache-share {share:g}" for share in chosen.cache_share)])
    name = f"trace-{trace.name}"
    save(name, {"trace": trace.name, "options": options, "rows": [asdict(row) for row in rows]}, chosen.output)
    text = markdown(trace, rows, options)
    (chosen.output / f"{name}.md").write_text(text)
    draw(trace, rows, chosen.output / f"{name}.png")
    print(text)


if __name__ == "__main__":
    main()
