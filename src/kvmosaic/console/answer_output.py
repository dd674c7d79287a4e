"""Terminal output of answers, token by token, each with the composition of its prompt."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from rich.console import Console

from kvmosaic.console.options import ModelOptions, open_llm
from kvmosaic.console.prompt_source import PromptSource
from kvmosaic.console.reuse import reuse_strip, reuse_table
from kvmosaic.console.text import duration_text, printable
from kvmosaic.server.process.logs import progress_bar

if TYPE_CHECKING:
    from kvmosaic.llm import LLM
    from kvmosaic.sampling import RequestOutput, SamplingParams


def run_prompts(opening: ModelOptions, asking: PromptSource, params: SamplingParams, as_json: bool) -> None:
    """Answers every prompt: streams the answer, then shows how the prompt was composed.

    Raises:
        KVMosaicError: a prompt, document or setting that cannot work.
    """
    console, notices = Console(), Console(stderr=True)
    documents, composed = asking.documents(), False
    with closing(open_llm(opening, notices)) as llm:
        if documents and llm.has_chunk_cache:
            warm(llm, documents, asking.system, notices)
        for heading, prompt in asking.prompts(llm, documents):
            outputs = llm.stream(prompt, params)
            if as_json:
                *_, last = outputs
                print(json.dumps(output_fields(heading, last)), flush=True)
            else:
                last = show_answer(heading, outputs, console, notices)
                composed = composed or last.reuse.composition.startswith("composed")
        if composed:
            notices.print("documents did not see each other; --repair full reads them in full", style="dim")


def warm(llm: LLM, documents: list[dict[str, str]], system: str | None, notices: Console) -> None:
    """Computes the documents, with a progress bar."""
    began = time.perf_counter()
    with progress_bar(notices) as bar:
        task = bar.add_task("reading documents", total=len(documents))
        llm.warm(documents, system=system, progress=lambda done, total: bar.update(task, completed=done, total=total))
    seconds = duration_text(time.perf_counter() - began)
    loaded = llm.get_chunk_cache_stats().loaded_chunks
    origin = f" ({loaded} from tiers)" if loaded else ""
    many = "1 document" if len(documents) == 1 else f"{len(documents):,} documents"
    notices.print(f"read {many} in {seconds}{origin}", style="dim")


def show_answer(heading: str, outputs: Iterator[RequestOutput], console: Console, notices: Console) -> RequestOutput:
    """Prints an answer as it streams, then the strip and the table of its prompt."""
    output = stream_answer(heading, outputs, console, notices)
    console.print()
    console.print(reuse_strip(output.reuse))
    console.print()
    console.print(reuse_table(output.reuse))
    console.print()
    return output


def stream_answer(heading: str, outputs: Iterator[RequestOutput], console: Console, notices: Console) -> RequestOutput:
    """Prints the question, then each output's new text; returns the last output."""
    console.print(f"Q  {heading}", style="bold", markup=False, highlight=False)
    with notices.status("reading the prompt"):
        output = next(outputs)
    console.print("A  ", style="bold", end="")
    shown = _print_rest(output, 0, console)
    for output in outputs:
        shown = _print_rest(output, shown, console)
    console.print()
    return output


def output_fields(heading: str, output: RequestOutput) -> dict[str, object]:
    """Returns one answer as fields for JSON."""
    first = output.outputs[0]
    return {
        "question": heading,
        "text": first.text,
        "token_ids": list(first.token_ids),
        "finish_reason": first.finish_reason,
        "reuse": output.reuse.to_dict(),
    }


def _print_rest(output: RequestOutput, shown: int, console: Console) -> int:
    """Prints the text after the first `shown` characters; returns how many are shown then."""
    text = output.outputs[0].text
    rest = text[shown:] if shown else text.lstrip()
    console.print(printable(rest), end="", markup=False, highlight=False, soft_wrap=True)
    return len(text) if shown or rest else 0
