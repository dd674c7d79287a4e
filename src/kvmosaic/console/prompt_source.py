"""Prompt sources of a command: prompt texts, standard input, or questions about a folder of documents."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvmosaic.console.folder import read_folder
from kvmosaic.console.text import one_line
from kvmosaic.errors import InvalidPrompt, InvalidSeparator
from kvmosaic.prompt.separator import named_parts, split_text

if TYPE_CHECKING:
    from kvmosaic.llm import LLM
    from kvmosaic.prompt import Prompt

MAX_INPUT_BYTES = 2**26
_LONGEST_PATH = 250
"""Longer names are invalid on most systems, and raise an error when checked."""
_USUAL_SEPARATOR = "##"


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts given to a command."""

    prompt: str | None = None
    """A text, with separators if the settings name one; "-" means standard input."""
    folder: Path | None = None
    """Documents for all questions."""
    questions: tuple[str, ...] = ()
    system: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is None and not self.questions:
            raise InvalidPrompt("nothing is asked; give --question TEXT, a prompt text, or - for standard input")
        if not all(question.strip() for question in self.questions):
            raise InvalidPrompt("--question is empty; write what to ask, or leave it out")
        if self.prompt is not None and (self.questions or self.folder or self.system):
            raise InvalidPrompt(
                "a prompt text holds its own documents and question; leave out --documents, --question and --system"
            )

    def documents(self) -> list[dict[str, str]]:
        """The documents of the folder; none without a folder.

        Raises:
            InvalidDocument: a folder that cannot be read.
        """
        return read_folder(self.folder) if self.folder else []

    def prompts(self, llm: LLM, documents: list[dict[str, str]]) -> Iterator[tuple[str, Prompt]]:
        """Every prompt, tokenized, with a heading for it."""
        if self.prompt is None:
            for question in self.questions:
                yield one_line(question), compose(llm, question, documents, self.system)
            return
        separator = llm.chunk_cache_config.chunk_separator
        for text in split_input(_standard_input(), separator) if self.prompt == "-" else [self.prompt]:
            parts = named_parts(text, separator)
            yield one_line(text if isinstance(parts, str) else parts[-1]), llm.encoder.encode(text)


def check_model_is_not_a_prompt(command: str, model: str, separator: str | None, *, is_asked: bool) -> None:
    """Catches a prompt text in the place of the model, before anything is loaded.

    Raises:
        InvalidPrompt: the model has two separators, or it has spaces and no other prompt is given.
        InvalidSeparator: text cannot be split at this separator.
    """
    if separator and not separator.strip():
        raise InvalidSeparator("--chunk-separator is white space; give a text such as '##', or '' to never split")
    has_borders = _has_two_borders(model, separator or _USUAL_SEPARATOR)
    looks_like_prompt = has_borders or (not is_asked and len(model.split()) > 1)
    if looks_like_prompt and not (len(model) < _LONGEST_PATH and Path(model).exists()):
        raise InvalidPrompt(
            f"the first argument is the model, and {one_line(model, 40)!r} looks like a prompt; write the model before "
            f"it: kvmosaic {command} reader {shlex.quote(one_line(model))}"
        )


def compose(llm: LLM, question: str, documents: list[dict[str, str]], system: str | None = None) -> Prompt:
    """A tokenized prompt from a question, documents and a system text."""
    messages = [{"role": "system", "content": system}] if system else []
    return llm.compose([*messages, {"role": "user", "content": question}], documents=documents)


def split_input(text: str, separator: str | None) -> list[str]:
    """Prompts of an input: one per line if every line has at least two separators, one in all if no line has two.

    Without a separator all of it is one prompt, as it is.

    Raises:
        InvalidPrompt: there is nothing but white space, or only some of the lines are prompts.
    """
    lines = {number: line for number, line in enumerate(text.splitlines(), start=1) if line.strip()}
    if not lines:
        example = f"'system {separator} document {separator} question'" if separator else "'Where does the ferry go?'"
        raise InvalidPrompt(f"standard input is empty; write a prompt such as {example}")
    if not separator:
        return [text]
    prompts = {number: line for number, line in lines.items() if _has_two_borders(line, separator)}
    if not prompts:
        return [text.strip()]
    for number in lines:
        if number not in prompts:
            raise InvalidPrompt(
                f"line {number} of standard input is not a prompt: it has fewer than two {separator!r}, and line "
                f"{next(iter(prompts))} has them; write one prompt per line, or one prompt with every {separator!r} on "
                "a line of its own"
            )
    return list(prompts.values())


def _has_two_borders(text: str, separator: str) -> bool:
    return len(split_text(text, separator)) > 2


def _standard_input() -> str:
    content = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(content) > MAX_INPUT_BYTES:
        raise InvalidPrompt(f"standard input has more than {MAX_INPUT_BYTES:,} bytes; send fewer prompts")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"standard input is not UTF-8 text (byte {error.start}); convert it to UTF-8") from error
