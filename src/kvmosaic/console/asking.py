"""What a command was asked: prompt texts, standard input, or questions about a folder of documents."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvmosaic.console.folder import read_folder
from kvmosaic.console.text import one_line
from kvmosaic.errors import InvalidPrompt

if TYPE_CHECKING:
    from kvmosaic.llm import LLM
    from kvmosaic.prompt import Prompt

MAX_INPUT_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Asking:
    """What a command was asked."""

    prompt: str | None = None
    """A text with separators; "-" stands for standard input."""
    folder: Path | None = None
    """Documents for all questions."""
    questions: tuple[str, ...] = ()
    system: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is None and not self.questions:
            raise InvalidPrompt("nothing is asked; give --question TEXT, a prompt text, or - for standard input")
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
        separator = llm.chunk_cache_config.separator or "##"
        for text in split_input(_standard_input(), separator) if self.prompt == "-" else [self.prompt]:
            prompt = llm.encoder.encode(text)
            yield one_line(prompt.segments[-1].text or text), prompt


def compose(llm: LLM, question: str, documents: list[dict[str, str]], system: str | None = None) -> Prompt:
    """A prompt from a question and documents: through the model's chat template, or as they are if it has none."""
    from kvmosaic.prompt import Prompt

    if not getattr(llm.model.tokenizer, "chat_template", None):
        return llm.encoder.encode(Prompt.from_documents(documents, question, system=system))
    messages = [{"role": "system", "content": system}] if system else []
    return llm.encoder.encode_chat([*messages, {"role": "user", "content": question}], documents)


def split_input(text: str, separator: str) -> list[str]:
    """Prompts of an input: one per line if every line has at least two separators, otherwise one in all.

    Raises:
        InvalidPrompt: there is nothing but white space.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InvalidPrompt(
            f"standard input is empty; write a prompt such as 'system {separator} document {separator} question'"
        )
    return lines if all(line.count(separator) >= 2 for line in lines) else [text.strip()]


def _standard_input() -> str:
    content = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(content) > MAX_INPUT_BYTES:
        raise InvalidPrompt(f"standard input has more than {MAX_INPUT_BYTES:,} bytes; send fewer prompts")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"standard input is not UTF-8 text (byte {error.start}); convert it to UTF-8") from error
