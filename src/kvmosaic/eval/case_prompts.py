"""Prompts of evaluation cases: the same tokens for every variant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvmosaic.errors import InvalidConfig
from kvmosaic.eval.case import Case
from kvmosaic.llm import LLM
from kvmosaic.prompt import Prompt, Segment, SegmentKind


def prompt_of(llm: LLM, case: Case) -> Prompt:
    """Returns the tokenized prompt of a case, as a conversation if the model has a chat template.

    Full attention reads its segments one after the other, so both read the same tokens.

    Raises:
        InvalidConfig: a case without documents.
        InvalidPrompt: and its kinds, for example if it is longer than the model.
    """
    if not case.documents:
        raise InvalidConfig(f"case {case.id!r} has no documents, so there is nothing to compose; leave it out")
    prompt = llm.compose(_messages(case), documents=case.documents)
    if case.piece_tokens is None:
        return prompt
    pieces = [piece for segment in prompt.segments for piece in _cut(segment, case.piece_tokens)]
    return llm.encoder.encode(replace(prompt, segments=tuple(pieces)))


def accepted_tokens(llm: LLM, case: Case) -> tuple[int, ...]:
    """The tokens of the first accepted answer as a continuation of the prompt; none for an unlabelled case.

    A chat template may begin an answer with a space; without a template, a space separates prompt and answer.
    """
    if not case.answers:
        return ()
    answer = case.answers[0].strip()
    return llm.encoder.continuation(_lead(llm.model.tokenizer, case, answer) + answer)


def _lead(tokenizer: Any, case: Case, answer: str) -> str:
    """Returns the white space before an answer."""
    if not getattr(tokenizer, "chat_template", None):
        return " "
    messages, said = _messages(case), {"role": "assistant", "content": answer}
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answered = tokenizer.apply_chat_template([*messages, said], tokenize=False)
    lead = answered.removeprefix(asked).partition(answer)[0] if answered.startswith(asked) else ""
    return lead if lead.isspace() else ""


def _messages(case: Case) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": case.question}]
    if case.system is not None:
        messages.insert(0, {"role": "system", "content": case.system})
    return messages


def _cut(segment: Segment, length: int) -> Iterator[Segment]:
    """Cuts a chunk into pieces of this many tokens, the last of which may be shorter; other segments stay whole."""
    ids = segment.token_ids or ()
    if segment.kind is not SegmentKind.CHUNK or len(ids) <= length:
        yield segment
        return
    starts = range(0, len(ids), length)
    for number, start in enumerate(starts, start=1):
        name = f"{segment.name} ({number}/{len(starts)})" if segment.name else None
        piece = ids[start : start + length]
        place = (number, len(starts))
        yield replace(segment, token_ids=piece, text=None, name=name, part=place, document_offset=start)
