"""Splitting of documents longer than the chunk limit, and their sections.

Sections have borders at headings and blank lines that an edit elsewhere does not move.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from zlib import crc32

from kvmosaic.errors import ChunkTooLong
from kvmosaic.prompt.companions import alike_pairs
from kvmosaic.prompt.document import MAX_POSITION
from kvmosaic.prompt.found_documents import is_of_agent
from kvmosaic.prompt.segment import Prompt, Segment, SegmentKind, seen_chunks
from kvmosaic.prompt.tokenizer import Encoded

_SENTENCE_END = re.compile(r"[.!?。！？]['\")\]]*$")


def fit_chunks(
    segments: Sequence[Segment],
    encodings: Sequence[Encoded],
    limit: int,
    *,
    split: bool,
    max_part_tokens: int = MAX_POSITION,
    max_section_tokens: int = MAX_POSITION,
    divides_all: bool = False,
    max_in_order: int = MAX_POSITION,
) -> tuple[Segment, ...]:
    """Makes every chunk fit into `limit` tokens.

    Args:
        segments: tokenized segments of a prompt.
        encodings: character offsets of their tokens.
        limit: maximum tokens of a chunk.
        split: cut longer chunks into several (named "name (1/3)"), or raise.
        max_part_tokens: of parts of a document that does not fit as a whole.
        max_section_tokens: divide chunks with more tokens into sections first.
        divides_all: whether all chunks are divided so, not only those of an agent. One of these stays whole if its
            sections are alike (a log, a list of records): read apart, they may be mixed up.
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
            is_in_sections = divides_all or is_of_agent(segment)
            whole = min(limit, limit if segment.num_tokens <= max_in_order else max_part_tokens)
            size = min(whole, max_section_tokens) if is_in_sections else whole
            if segment.num_tokens > size:
                if not split:
                    raise ChunkTooLong(
                        f"the {segment.label} has {segment.num_tokens} tokens, the limit is {limit}; raise "
                        "max_chunk_tokens, shorten the document, or set long_chunks='split'",
                        document=segment.document,
                    )
                parts = _split(segment, encoded, size, is_in_sections=is_in_sections)
                if not divides_all and is_in_sections and any(alike_pairs([part.token_ids or () for part in parts])):
                    parts = _split(segment, encoded, whole, is_in_sections=False)
                if segment.num_tokens > max_in_order:
                    parts = tuple(replace(part, document_offset=0) for part in parts)
            if sees := tuple(new for old in next(seen) for new in new_numbers[old]):
                parts = tuple(replace(part, sees=sees) for part in parts)
            first = new_numbers[-1].stop if new_numbers else 0
            new_numbers.append(range(first, first + len(parts)))
        result += parts
    return tuple(result)


def told_splits(prompts: Iterable[Prompt]) -> str:
    """A warning that documents were split for their length; empty if none was."""
    chunks = (chunk for prompt in prompts for chunk in prompt.chunks if not chunk.is_section)
    first = [(chunk.label, chunk.part[1]) for chunk in chunks if chunk.part and chunk.part[0] == 1]
    listed = [f"{label.replace(f' (1/{count})', '')}, {count} parts" for label, count in first]
    if not listed:
        return ""
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return (
        f"documents that are too long for one chunk were divided (long_chunks): {'; '.join(listed[:8])}{more}; no part "
        "sees the others"
    )


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
    if len(borders) == 2:
        return (segment,)
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


_HEADING = re.compile(r"^ {0,3}(?:(#{1,6})[ \t]|<h([1-6])[ >\t])", re.MULTILINE | re.IGNORECASE)
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n\s*")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})([^\n]*)", re.MULTILINE)
_NUM_LEVELS = 6
_NEARBY_CHARACTERS = 64


def section_borders(text: str, starts: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens before which a document is divided into sections, in order.

        # Guide          0         a part of more than `max_tokens` is divided at its headings of the highest level,
        ## Ferries       12        those still longer at the next level, …
        ## Trains        340       and a part without headings at some of its blank lines
        ### Night trains 512

    A part is divided by its own text alone, so an edit moves borders only inside the smallest part around it. Which
    blank lines divide a part depends on the text next to them (content-defined chunking), so borders far from an edit
    stay, too. Costs O(text).

    Args:
        text: the document.
        starts: the character at which each of its tokens starts, ascending.
        max_tokens: parts with at most so many tokens are not divided. A part with too few headings and blank lines
            stays longer.
    """
    headings: list[list[int]] = [[] for _ in range(_NUM_LEVELS)]
    fenced, ends = fenced_blocks(text)
    for found in _HEADING.finditer(text):
        block = bisect_right(fenced, found.start()) - 1
        if block < 0 or found.start() >= ends[block]:  # not a comment in a block of code
            headings[len(found[1]) - 1 if found[1] else int(found[2]) - 1].append(found.start())
    borders = [0, len(starts)]
    for places in headings:
        borders = _divided(borders, _tokens_at(places, starts), max_tokens)
    paragraphs = [found.end() for found in _BLANK_LINE.finditer(text) if found.end() < len(text)]
    marks = [_mark(text, place) for place in paragraphs]
    chosen = _local_minima(_tokens_at(paragraphs, starts), marks, max_tokens // 4)
    return _divided(borders, chosen, max_tokens)[1:-1]


def fenced_blocks(text: str) -> tuple[list[int], list[int]]:
    """Where the fenced blocks of code begin and end, in order; a fence without an end begins none."""
    begins, ends = list[int](), list[int]()
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2].strip():
            begins.append(opened.start())
            ends.append(fence.end())
            opened = None
    return begins, ends


def _divided(borders: Sequence[int], places: Sequence[int], max_tokens: int) -> list[int]:
    """Adds the places inside parts that are too long."""
    result, index = [borders[0]], 0
    for first, end in pairwise(borders):
        while index < len(places) and places[index] < end:
            if end - first > max_tokens and places[index] > result[-1]:
                result.append(places[index])
            index += 1
        result.append(end)
    return result


def _tokens_at(places: Sequence[int], starts: Sequence[int]) -> list[int]:
    """For each character, the first token that holds it."""
    return [bisect_left(starts, starts[max(bisect_right(starts, place) - 1, 0)]) for place in places]


def _mark(text: str, place: int) -> int:
    """A number that depends on the text around a place only."""
    nearby = text[max(place - _NEARBY_CHARACTERS, 0) : place + _NEARBY_CHARACTERS]
    return crc32(nearby.encode("utf-8", "surrogatepass"))


def _local_minima(places: Sequence[int], marks: Sequence[int], distance: int) -> list[int]:
    """The places with a smaller mark than all others within a distance; of equal marks the first.

    Each of them depends on what is within the distance only. Costs O(places): the window is a queue of ascending marks.
    """
    window: deque[int] = deque()
    chosen, behind = [], 0
    for index, place in enumerate(places):
        while behind < len(places) and places[behind] <= place + distance:
            while window and marks[window[-1]] > marks[behind]:
                window.pop()
            window.append(behind)
            behind += 1
        while places[window[0]] < place - distance:
            window.popleft()
        if window[0] == index:
            chosen.append(place)
    return chosen
