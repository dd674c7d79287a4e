"""Splitting of documents longer than the chunk limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from kvmosaic.errors import ChunkTooLong
from kvmosaic.prompt.document import MAX_POSITION
from kvmosaic.prompt.sections import section_borders
from kvmosaic.prompt.segment import Segment, SegmentKind, seen_chunks
from kvmosaic.prompt.tokenizer import Encoded

_SENTENCE_END = re.compile(r"[.!?。！？]['\")\]]*$")


def fit_chunks(
    segments: Sequence[Segment],
    encodings: Sequence[Encoded],
    limit: int,
    *,
    split: bool,
    max_section_tokens: int | None = None,
    max_in_order: int = MAX_POSITION,
) -> tuple[Segment, ...]:
    """Makes every chunk fit into `limit` tokens.

    Args:
        segments: tokenized segments of a prompt.
        encodings: character offsets of their tokens.
        limit: maximum tokens of a chunk.
        split: cut longer chunks into several (named "name (1/3)"), or raise.
        max_section_tokens: divide chunks with more tokens into sections first; None: do not.
        max_in_order: maximum tokens of a document whose parts fit one after the other.

    Raises:
        ChunkTooLong: a longer chunk, and `split` is off.
        InvalidSees: a chunk sees one that is not before it.
    """
    result: list[Segment] = []
    seen = iter(seen_chunks([segment for segment in segments if segment.kind is SegmentKind.CHUNK]))
    new_numbers: list[range] = []
    for segment, encoded in zip(segments, encodings, strict=True):
        parts: tuple[Segment, ...] = (segment,)
        if segment.kind is SegmentKind.CHUNK:
            size = limit if max_section_tokens is None else min(limit, max_section_tokens)
            if segment.num_tokens > size:
                if not split:
                    raise ChunkTooLong(
                        f"the {segment.label} has {segment.num_tokens} tokens, the limit is {limit}; raise "
                        "max_chunk_tokens, shorten the document, or set long_chunks='split'",
                        document=segment.document,
                    )
                parts = _split(segment, encoded, size, is_in_sections=max_section_tokens is not None)
                if segment.num_tokens > max_in_order:
                    parts = tuple(replace(part, document_offset=0) for part in parts)
            if sees := tuple(new for old in next(seen) for new in new_numbers[old]):
                parts = tuple(replace(part, sees=sees) for part in parts)
            first = new_numbers[-1].stop if new_numbers else 0
            new_numbers.append(range(first, first + len(parts)))
        result += parts
    return tuple(result)


def _split(segment: Segment, encoded: Encoded, limit: int, *, is_in_sections: bool) -> tuple[Segment, ...]:
    """Splits a chunk at token borders, at the end of a text unit if there is one in the second half of the limit.

    With `is_in_sections`, it is divided into sections first, and only longer ones are split.
    """
    ids, text = encoded.token_ids, segment.text
    starts = encoded.starts if text is not None else None
    borders = [0]
    sections = section_borders(text, starts, limit) if is_in_sections and text and starts else []
    for end in (*sections, len(ids)):
        while end - borders[-1] > limit:
            borders.append(_border(borders[-1], limit, text or "", starts))
        borders.append(end)
    parts = []
    for number, (first, last) in enumerate(pairwise(borders), start=1):
        part_text = None
        if text is not None and starts is not None:
            part_text = text[0 if first == 0 else starts[first] : starts[last] if last < len(ids) else len(text)]
        name = f"{segment.name} ({number}/{len(borders) - 1})" if segment.name else None
        offset = None if segment.position_offset is None else segment.position_offset + first
        parts.append(
            replace(
                segment,
                token_ids=ids[first:last],
                text=part_text,
                name=name,
                position_offset=offset,
                part=(number, len(borders) - 1),
                document_offset=first,
                is_section=is_in_sections,
            )
        )
    return tuple(parts)


def _border(first: int, limit: int, text: str, starts: tuple[int, ...] | None) -> int:
    """The token before which to split: the last of the best places in the second half of the limit."""
    if starts is None:
        return first + limit
    return max(
        range(first + limit // 2 + 1, first + limit + 1), key=lambda token: (_ending(text, starts[token]), token)
    )


def _ending(text: str, place: int) -> int:
    """The text unit that ends at a place: 4 a paragraph, 3 a line, 2 a sentence, 1 a word, 0 nothing."""
    before = text[max(0, place - 16) : place]
    body = before.rstrip()
    space = before[len(body) :]
    if "\n" in space:
        return 4 if space.count("\n") > 1 else 3
    if not space and not text[place : place + 1].isspace() and not body.endswith(("。", "！", "？")):
        return 0
    return 2 if _SENTENCE_END.search(body) else 1
