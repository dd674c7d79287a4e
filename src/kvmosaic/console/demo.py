"""Demo: several questions, each with other documents in another order, and the cache hits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.console.answer_output import stream_answer
from kvmosaic.console.folder import read_folder
from kvmosaic.console.options import ModelOptions, open_llm
from kvmosaic.console.prompt_source import compose
from kvmosaic.console.reuse import reuse_sentence, reuse_strip
from kvmosaic.console.text import duration_text, fact_table, one_line, printable, shrinking, size_text

if TYPE_CHECKING:
    from kvmosaic.cache import ChunkCacheStats
    from kvmosaic.llm import LLM
    from kvmosaic.prompt import Prompt
    from kvmosaic.sampling import ReuseReport


TIMES_NOTE = (
    "cold: an ordinary prompt, its documents joined, with nothing remembered; "
    "warm: composed from cached documents, in an order not asked before"
)


@dataclass(frozen=True, slots=True)
class VisitTimes:
    """Times of one question."""

    question: str
    num_tokens: int
    cold_seconds: float
    """TTFT of an ordinary prompt, its documents joined, with an empty cache."""
    warm_seconds: float
    """TTFT with every document cached, in a new order."""


def times_table(times: Sequence[VisitTimes]) -> Table:
    """One row per question: the time to the first token with nothing cached and with the documents cached."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("first token of the answer to", max_width=44)
    for heading in ("tokens", "cold", "warm", "faster"):
        table.add_column(heading, justify="right", no_wrap=True)
    for visit in times:
        table.add_row(
            shrinking(visit.question),
            f"{visit.num_tokens:,}",
            duration_text(visit.cold_seconds),
            duration_text(visit.warm_seconds),
            f"{visit.cold_seconds / visit.warm_seconds:.1f}x",
        )
    return table


def statistics_table(statistics: ChunkCacheStats, bytes_per_block: int) -> Table:
    """Returns a table of the chunk cache after the last question."""
    table = fact_table()
    used_bytes = statistics.used_blocks * bytes_per_block
    for name, value in (
        ("chunk lookups", f"{statistics.lookups}: {statistics.hits} hits, {statistics.misses} misses"),
        ("hit rate", f"{statistics.hit_rate:.0%}"),
        ("chunks cached", f"{statistics.cached_chunks}, in {statistics.used_blocks} blocks ({size_text(used_bytes)})"),
        ("evictions", str(statistics.evictions)),
        ("average lookup", duration_text(statistics.average_lookup_ms / 1000)),
        ("average allocate (whole prompt)", duration_text(statistics.average_allocate_ms / 1000)),
        ("average compute", duration_text(statistics.average_compute_ms / 1000)),
    ):
        table.add_row(name, value)
    return table


SYSTEM = "Answer the question from the documents."
ROUNDS = 3
"""Measurements per question; the fastest counts, since a busy machine only makes them slower."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One question, and the documents it is asked about, in this order."""

    question: str
    documents: tuple[str, ...]


_VISITS = """\
When was Fenbury founded?
  Fenbury, Golden Anchor Museum, Amber Pearl, Corlow Lighthouse
Who is the captain of the Amber Pearl?
  Talmira Varlow, Amber Pearl, Corlow Lighthouse, Golden Anchor Museum, Fenbury
Where did Talmira Varlow grow up?
  Corlow Lighthouse, Talmira Varlow, Torren Briwick, Fenbury, Bellos
What does Torren Briwick drink in the morning?
  Golden Anchor Museum, Bellos, Torren Briwick, Summer Breeze Regatta, Talmira Varlow
In which month does the Summer Breeze Regatta take place?
  Amber Pearl, Summer Breeze Regatta, Torren Briwick, Corlow Lighthouse, Golden Anchor Museum, Fenbury
How high is the Corlow Lighthouse?
  Bellos, Talmira Varlow, Summer Breeze Regatta, Corlow Lighthouse, Fenbury, Amber Pearl, Torren Briwick
"""
_LINES = [line.strip() for line in _VISITS.splitlines()]
VISITS = tuple(Visit(asked, tuple(about.split(", "))) for asked, about in zip(_LINES[::2], _LINES[1::2], strict=True))
"""Questions about the bundled documents."""


def run_demo(
    opening: ModelOptions, folder: Path, visits: Sequence[Visit] = VISITS, console: Console | None = None
) -> None:
    """Asks the questions of a folder of documents and prints answers, strips, times and statistics.

    Raises:
        KVMosaicError: the model or the documents cannot be read.
    """
    from kvmosaic.sampling import SamplingParams

    console, notices = console or Console(), Console(stderr=True)
    documents = {(name := Path(each["id"]).stem): {"id": name, "text": each["text"]} for each in read_folder(folder)}
    params = SamplingParams(temperature=0, max_tokens=32)
    with closing(open_llm(opening, notices)) as llm, closing(without_cache(llm)) as cold_llm:
        console.print(Text(demo_heading(opening, documents) + "\n", style="dim"))
        first_token_seconds(llm, "Is anybody there?")  # the first forward of a process pays for library startup
        reports: list[ReuseReport] = []
        for visit in visits:
            prompt = compose(llm, visit.question, [documents[name] for name in visit.documents], SYSTEM)
            output = stream_answer(one_line(visit.question), llm.stream(prompt, params), console, notices)
            console.print(reuse_strip(output.reuse, has_legend=not reports))
            console.print(Text(reuse_sentence(output.reuse) + "\n"))
            reports.append(output.reuse)
        statistics = llm.get_chunk_cache_stats()
        with notices.status("measuring the time to the first token"):
            times = [time_visit(visit, documents, llm, cold_llm) for visit in visits]
        console.print(times_table(times))
        console.print(Text(TIMES_NOTE, style="dim"))
        console.print()
        console.print(statistics_table(statistics, llm.model.bytes_per_token() * llm.chunk_cache_config.block_size))
        console.print()
        console.print(Text(summary(reports, rotates_queries=llm.engine_facts.name == "transformers")))


def demo_heading(opening: ModelOptions, documents: dict[str, dict[str, str]]) -> str:
    """Returns documents and settings of the demo in one line."""
    from kvmosaic.assembly import BUNDLED_READER

    words = sum(len(document["text"].split()) for document in documents.values())
    parts = [f"{len(documents)} documents", f"{words:,} words", f"model {opening.model}"]
    parts.append(f"{opening.values.get('position_strategy') or 'shared'} positions")
    return printable(", ".join([*parts, "no network"] if opening.model == BUNDLED_READER else parts))


def time_visit(visit: Visit, documents: dict[str, dict[str, str]], llm: LLM, cold_llm: LLM) -> VisitTimes:
    """The time to the first token with nothing cached, and with all documents cached but in a new order."""
    read = [documents[name] for name in visit.documents]
    orders = [read[turn:] + read[:turn] for turn in range(1, ROUNDS + 1)]
    prompts = [compose(llm, visit.question, order, SYSTEM) for order in orders]
    cold, warm = (min(first_token_seconds(one, prompt) for prompt in prompts) for one in (cold_llm, llm))
    return VisitTimes(visit.question, prompts[0].num_tokens, cold, warm)


def without_cache(llm: LLM) -> LLM:
    """Returns the same model with an empty cache for every prompt, to measure a cold prefill."""
    from kvmosaic.config import EngineConfig
    from kvmosaic.llm import LLM

    engine_config = EngineConfig(enable_prefix_caching=False, request_cache_size="64MiB")
    return LLM(llm.model, enable_chunk_cache=False, engine_config=engine_config)


def first_token_seconds(llm: LLM, prompt: Prompt | str) -> float:
    """Time to the first token of a prompt."""
    from kvmosaic.sampling import SamplingParams

    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    seconds = output.metrics.time_to_first_token
    assert seconds is not None, "a finished output has a first token"
    return seconds


def summary(reports: Sequence[ReuseReport], *, rotates_queries: bool = True) -> str:
    """Returns a summary in plain words; `rotates_queries`: how the engine reads a document at another position."""
    chunks = [segment for report in reports for segment in report.segments if segment.kind == "chunk"]
    num_documents = len({chunk.name for chunk in chunks})
    num_computed = sum(not chunk.reused_tokens for chunk in chunks)
    num_moved = sum(chunk.action == "moved" for chunk in chunks)
    rotated = (
        "Nothing was copied or computed again to move them: the question's queries were rotated instead."
        if rotates_queries
        else "Nothing was computed again to move them: llama.cpp rotated the keys of a copy."
    )
    unmoved = "Shared positions move nothing: every document starts right after the system text."
    return (
        f"What just happened: {len(reports)} prompts read {num_documents} documents {len(chunks)} times, each time in "
        f"other company and order. The model computed a document {num_computed} times and found one in the cache "
        f"{len(chunks) - num_computed} times; {num_moved} of these were read at another position than where they were "
        f"computed. {rotated if num_moved else unmoved}"
    )
