"""The demo: several questions, each about other documents in another order, and what the cache did."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kvmosaic.console.answering import stream_answer
from kvmosaic.console.asking import compose
from kvmosaic.console.folder import read_folder
from kvmosaic.console.opening import Opening, open_llm
from kvmosaic.console.reuse import reuse_sentence, reuse_strip
from kvmosaic.console.statistics import Outcome, statistics_table, times_table
from kvmosaic.console.text import duration_text, one_line

if TYPE_CHECKING:
    from kvmosaic.llm import LLM
    from kvmosaic.prompt import Prompt
    from kvmosaic.sampling import SamplingParams

SYSTEM = "Answer the question from the documents."


@dataclass(frozen=True, slots=True)
class Visit:
    """One question, and the documents it is asked about, in this order."""

    question: str
    documents: tuple[str, ...]


VISITS = (
    Visit("When was Fenbury founded?", ("Fenbury", "Fenbury Museum", "Amber Pearl", "Corlow Lighthouse")),
    Visit(
        "Who is the captain of the Amber Pearl?",
        ("Zora Lumski", "Amber Pearl", "Corlow Lighthouse", "Fenbury Museum", "Fenbury"),
    ),
    Visit("Where did Zora Lumski grow up?", ("Corlow Lighthouse", "Zora Lumski", "Torren Mason", "Fenbury", "Bellos")),
    Visit(
        "What does Torren Mason drink in the morning?",
        ("Fenbury Museum", "Bellos", "Torren Mason", "Fenbury Regatta", "Zora Lumski"),
    ),
    Visit(
        "In which month does the Fenbury Regatta take place?",
        ("Amber Pearl", "Fenbury Regatta", "Torren Mason", "Corlow Lighthouse", "Fenbury Museum", "Fenbury"),
    ),
    Visit(
        "How high is the Corlow Lighthouse?",
        ("Bellos", "Zora Lumski", "Fenbury Regatta", "Corlow Lighthouse", "Fenbury", "Amber Pearl", "Torren Mason"),
    ),
)
"""Questions about the bundled documents."""


def run_demo(opening: Opening, folder: Path, visits: Sequence[Visit] = VISITS) -> None:
    """Asks the questions of a folder of documents and prints answers, strips, times and statistics.

    Raises:
        KVMosaicError: the model or the documents cannot be read.
    """
    from kvmosaic.sampling import SamplingParams

    console, notices = Console(), Console(stderr=True)
    documents = {document["id"]: document for document in read_folder(folder)}
    params = SamplingParams(temperature=0, max_tokens=32)
    with closing(open_llm(opening, notices)) as llm, closing(without_cache(llm)) as cold:
        words = sum(len(document["text"].split()) for document in documents.values())
        console.print(f"{len(documents)} documents, {words:,} words, one small model, no network\n", style="dim")
        warm_up(cold, params)
        outcomes = []
        for visit in visits:
            prompt = compose(llm, visit.question, [documents[name] for name in visit.documents], SYSTEM)
            cold_seconds = first_token_seconds(cold, prompt, params)
            output = stream_answer(one_line(visit.question), llm.stream(prompt, params), console, notices)
            console.print(reuse_strip(output.reuse, has_legend=not outcomes))
            console.print(Text(f"{reuse_sentence(output.reuse)} (cold: {duration_text(cold_seconds)})\n"))
            outcomes.append(Outcome(visit.question, output.reuse, cold_seconds))
        bytes_per_block = llm.model.bytes_per_token() * llm.chunk_cache_config.block_size
        console.print(times_table(outcomes))
        console.print()
        console.print(statistics_table(llm.get_chunk_cache_stats(), bytes_per_block))
        console.print()
        console.print(Text(summary(outcomes)))


def without_cache(llm: LLM) -> LLM:
    """The same model with nothing remembered from one prompt to the next, to measure what a first reading takes."""
    from kvmosaic.config import EngineConfig
    from kvmosaic.llm import LLM

    engine_config = EngineConfig(enable_prefix_caching=False, request_cache="64MiB")
    return LLM(llm.model, enable_chunk_cache=False, engine_config=engine_config)


def warm_up(llm: LLM, params: SamplingParams) -> None:
    """Answers something once, so that the first measurement is not about loading libraries."""
    llm.generate("Is anybody there?", params)


def first_token_seconds(llm: LLM, prompt: Prompt, params: SamplingParams) -> float:
    """Time to the first token of a prompt."""
    outputs = llm.stream(prompt, params)
    seconds = next(outputs).metrics.time_to_first_token
    outputs.close()  # type: ignore[attr-defined]
    assert seconds is not None, "an output has a first token"
    return seconds


def summary(outcomes: Sequence[Outcome]) -> str:
    """What just happened, in plain words."""
    chunks = [segment for outcome in outcomes for segment in outcome.reuse.segments if segment.kind == "chunk"]
    computed = {segment.name for segment in chunks if not segment.reused_tokens}
    moved = sum(segment.action == "moved" for segment in chunks)
    return (
        f"What just happened: {len(outcomes)} prompts read {len({chunk.name for chunk in chunks})} documents "
        f"{len(chunks)} times, in ever other company and order. The model computed each of them once "
        f"({len(computed)} times in all) and found them again {len(chunks) - len(computed)} times, {moved} times at "
        "another position than before. Nothing was copied or computed again to move them: only the question's queries "
        "were turned."
    )
