"""Answering prompts from the command line, token by token."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvmosaic.console.folder import read_folder
from kvmosaic.console.opening import Opening, open_llm
from kvmosaic.console.reuse import reuse_strip, reuse_table
from kvmosaic.console.text import one_line, printable
from kvmosaic.errors import InvalidPrompt

if TYPE_CHECKING:
    from kvmosaic.llm import LLM
    from kvmosaic.prompt import Prompt
    from kvmosaic.sampling import RequestOutput, SamplingParams

MAX_INPUT_CHARACTERS = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Asking:
    """What a command was asked: a text with separators, or questions about a folder of documents."""

    prompt: str | None = None
    """A text with separators; "-" stands for standard input."""
    documents: Path | None = None
    questions: tuple[str, ...] = ()
    system: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is None and not self.questions:
            raise InvalidPrompt("nothing is asked; give --question TEXT, a prompt text, or - for standard input")
        if self.prompt is not None and (self.questions or self.documents or self.system):
            raise InvalidPrompt(
                "a prompt text holds its own documents and question; leave out --documents, --question and --system"
            )

    def prompts(self, llm: LLM, separator: str) -> Iterator[tuple[str, str | Prompt]]:
        """Every prompt with a heading for it."""
        if self.prompt is not None:
            texts = split_input(_standard_input(), separator) if self.prompt == "-" else [self.prompt]
            for text in texts:
                yield one_line(text.split(separator)[-1]), text
            return
        documents = read_folder(self.documents) if self.documents else []
        for question in self.questions:
            yield one_line(question), llm.compose(question_messages(question, self.system), documents=documents)


def question_messages(question: str, system: str | None = None) -> list[dict[str, str]]:
    """A question as chat messages."""
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": question}]


def split_input(text: str, separator: str) -> list[str]:
    """Prompts of an input: one per line if every line has at least two separators, otherwise one in all.

    Raises:
        InvalidPrompt: there is nothing but white space.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InvalidPrompt(f"standard input is empty; write 'system {separator} document {separator} question'")
    return lines if all(line.count(separator) >= 2 for line in lines) else [text.strip()]


def run_prompts(opening: Opening, asking: Asking, max_tokens: int, temperature: float, as_json: bool) -> None:
    """Answers every prompt: the answer as it comes, then how the prompt was put together.

    Raises:
        KVMosaicError: a prompt, document or setting that cannot work.
    """
    from kvmosaic.sampling import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    console = Console()
    with closing(open_llm(opening, Console(stderr=True))) as llm:
        for heading, prompt in asking.prompts(llm, opening.separator):
            if as_json:
                print(json.dumps(output_fields(heading, _last(llm.stream(prompt, params)))))
            else:
                answer(llm, console, heading, prompt, params)


def answer(llm: LLM, console: Console, heading: str, prompt: str | Prompt, params: SamplingParams) -> RequestOutput:
    """Prints one answer as it comes, then the strip and the table of its prompt."""
    console.print(f"Q  {heading}", style="bold", markup=False, highlight=False)
    console.print("A  ", style="bold", end="")
    output = stream_text(llm.stream(prompt, params), console)
    console.print("\n")
    console.print(reuse_strip(output.reuse))
    console.print()
    console.print(reuse_table(output.reuse))
    console.print()
    return output


def stream_text(outputs: Iterator[RequestOutput], console: Console) -> RequestOutput:
    """Prints what each output adds to the text, and returns the last one."""
    shown = ""
    for output in outputs:
        text = output.outputs[0].text
        fresh = text[len(shown) :] if shown else text.lstrip()
        if fresh:
            console.print(printable(fresh), end="", markup=False, highlight=False, soft_wrap=True)
            shown = text
    return output


def output_fields(heading: str, output: RequestOutput) -> dict[str, object]:
    """One answer, for JSON."""
    first = output.outputs[0]
    return {
        "question": heading,
        "text": first.text,
        "token_ids": list(first.token_ids),
        "finish_reason": first.finish_reason,
        "reuse": output.reuse.to_dict(),
    }


def _last(outputs: Iterator[RequestOutput]) -> RequestOutput:
    *_, last = outputs
    return last


def _standard_input() -> str:
    text = sys.stdin.read(MAX_INPUT_CHARACTERS + 1)
    if len(text) > MAX_INPUT_CHARACTERS:
        raise InvalidPrompt(f"standard input has more than {MAX_INPUT_CHARACTERS:,} characters; send fewer prompts")
    return text
