"""Splitting a prompt where its preamble ends: a text prompt, a rendered conversation, or tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt.chat_template.document_placement import Placing, place_documents
from kvmosaic.prompt.conversation import Conversation
from kvmosaic.prompt.message import is_system
from kvmosaic.prompt.preamble import PreambleRule, common_start, is_marked, stable_end
from kvmosaic.prompt.segment import Segment, SegmentKind
from kvmosaic.prompt.text_pieces import TextPiece, joined
from kvmosaic.prompt.tokenizer import Encoded


def with_preamble(segments: Sequence[Segment], rule: PreambleRule) -> tuple[Segment, ...]:
    """The segments of a prompt, a system text split where its preamble ends.

    Unchanged without documents, and where a text follows the system segment: there the caller has split it.
    """
    first = segments[0]
    text = first.text if first.kind is SegmentKind.SYSTEM and first.token_ids is None else None
    if not text or not _has_chunks(segments) or segments[1].kind is SegmentKind.TEXT or rule.kind == "all":
        return tuple(segments)
    end = rule.end_in(text)
    if end is None:
        end = len(text) if rule.num_tokens is not None else stable_end(text)
    if not text[end:].strip():
        return tuple(segments)
    before, rest = (text[:end], text[end:]) if text[:end].strip() else ("", text)
    system = (replace(first, text=before),) if before else ()
    return (*system, Segment(SegmentKind.TEXT, text=rest), *segments[1:])


def with_preamble_tokens(
    segments: list[Segment], encodings: list[Encoded], num_tokens: int | None
) -> tuple[list[Segment], list[Encoded]]:
    """The tokenized segments of a prompt, its system segment split after so many tokens; None: unchanged."""
    first, whole = segments[0], encodings[0]
    if num_tokens is None or first.kind is not SegmentKind.SYSTEM or first.num_tokens <= num_tokens:
        return segments, encodings
    if not _has_chunks(segments) or segments[1].kind is SegmentKind.TEXT:
        return segments, encodings
    ids, text, starts = whole.token_ids, first.text, whole.starts
    before = rest = None
    if text is not None and starts is not None:
        before, rest = text[: starts[num_tokens]], text[starts[num_tokens] :]
    changing = Segment(SegmentKind.TEXT, ids[num_tokens:], rest)
    if not num_tokens:
        return [changing, *segments[1:]], encodings
    stable = replace(first, token_ids=ids[:num_tokens], text=before)
    ends = [Encoded(ids[:num_tokens], None), Encoded(ids[num_tokens:], None)]
    return [stable, changing, *segments[1:]], ends + encodings[1:]


def placed(conversation: Conversation, messages: Any, rule: PreambleRule) -> tuple[Conversation, Placing, int | None]:
    """The documents' places in a conversation, and where the preamble ends before them; None: not before its end.

    Tools belong to the preamble. If the template writes them after a system text that changes, they would change with
    it: then the part that changes becomes a system message of its own, after the tools.

    Args:
        conversation: the checked conversation.
        messages: as the caller gave them, with marks.
        rule: of the request or the settings.

    Returns:
        The conversation as it is rendered, the places of its documents, and the end.
    """
    placing = place_documents(conversation)
    end = preamble_end(conversation, placing.head, messages, rule)
    if end is None or not conversation.has_tools:
        return conversation, placing, end
    return _with_tools_first(conversation, placing, end) or (conversation, placing, end)


def _with_tools_first(
    conversation: Conversation, placing: Placing, end: int
) -> tuple[Conversation, Placing, int | None] | None:
    """The same with the rest of the system text after the tools; None if it is there already, or cannot be."""
    system = _system_pieces(conversation, placing.head)
    found = next(((start, piece) for start, piece in system if start < end < start + len(piece.text)), None)
    if found is None:
        return None
    (start, piece), number = found, found[1].message
    texts = piece.text[: end - start].rstrip(), piece.text[end - start :].lstrip()
    if number is None or not all(texts) or not _has_tools_after(conversation, placing, number):
        return None
    split = conversation.with_split_message(number, texts)
    try:
        moved = place_documents(split)
        # None where the template writes it after the documents: then all before them is the preamble
        rest = next((place for place, one in _system_pieces(split, moved.head) if one.message == number + 1), None)
        if _has_tools_after(split, moved, number + 1):
            return None
    except InvalidMessages:  # a template that takes one system message only
        return None
    return split, moved, rest


def _has_tools_after(conversation: Conversation, placing: Placing, number: int) -> bool:
    """Whether what a template writes after a message and before the documents is another text without tools."""
    plain = conversation.without_tools()
    without = place_documents(plain) if placing.by_template else None
    pieces = plain.pieces() if without is None else (*without.head, *without.tail)
    return not _text_after(pieces, number).startswith(_text_after(placing.head, number))


def _text_after(pieces: Sequence[TextPiece], number: int) -> str:
    """The text after the content of a message."""
    places = [index for index, piece in enumerate(pieces) if piece.message == number]
    return joined(pieces[places[-1] + 1 :]) if places else ""


def preamble_end(
    conversation: Conversation, head: Sequence[TextPiece], messages: Any, rule: PreambleRule
) -> int | None:
    """Where the preamble ends in what a chat template writes before the documents; None: not before its end.

    The first that applies: a marked part of a system message; the rule; what the template writes from its clock; and
    with the rule "auto", a system text's first sentence that changes.

    Args:
        conversation: the checked conversation.
        head: its pieces before the documents.
        messages: as the caller gave them, with marks.
        rule: of the request or the settings.
    """
    text = joined(head)
    is_found, end = _marked_end(conversation, head, messages)
    if is_found:
        return end
    if rule.kind == "all":
        return None
    if conversation.has_tools:  # whose texts, which anyone may have written, do not move the border
        found = ((start, rule.end_in(piece.text)) for start, piece in _system_pieces(conversation, head))
        end = next((start + place for start, place in found if place is not None), None)
    else:
        end = rule.end_in(text)
    if end is None and rule.num_tokens is None:
        end = _clock_end(conversation, text)
        if end is None:
            end = next((start + stable for start, stable in _stable_ends(conversation, head)), None)
    return end if end is not None and text[end:].strip() else None


def _marked_end(conversation: Conversation, head: Sequence[TextPiece], messages: Any) -> tuple[bool, int | None]:
    """Whether a part of a system message is marked, and where it ends if another part follows it."""
    for start, piece in _system_pieces(conversation, head):
        assert piece.message is not None
        marked = _marked_text(messages[piece.message])
        if marked is None:
            continue
        found = next((said for said in (marked, marked.strip()) if piece.text.startswith(said)), piece.text)
        return True, start + len(found) if piece.text[len(found) :].strip() else None
    return False, None


def _clock_end(conversation: Conversation, text: str) -> int | None:
    """Where the template begins to write what it takes from its clock: it is rendered at another time, too."""
    if not conversation.has_clock:
        return None
    try:
        other = place_documents(conversation.at_another_time())
    except InvalidMessages:  # the template reads numbers from its clock
        return None
    return common_start(text, joined(other.head))


def _stable_ends(conversation: Conversation, head: Sequence[TextPiece]) -> list[tuple[int, int]]:
    """Of the system texts that change: where each begins, and its length before the first sentence that changes."""
    ends = ((start, piece, stable_end(piece.text)) for start, piece in _system_pieces(conversation, head))
    return [(start, end) for start, piece, end in ends if end < len(piece.text)]


def _system_pieces(conversation: Conversation, head: Sequence[TextPiece]) -> list[tuple[int, TextPiece]]:
    """The contents of system messages, each with its place in the joined text."""
    found, start = [], 0
    for piece in head:
        if piece.message is not None and is_system(conversation.messages[piece.message]):
            found.append((start, piece))
        start += len(piece.text)
    return found


def _marked_text(message: Mapping[str, Any]) -> str | None:
    """The text of a message up to its first marked part; None if no part is marked, "" is possible.

    Parts are joined by line breaks, as in `read_messages`.
    """
    parts = message.get("content")
    if not isinstance(parts, Sequence) or isinstance(parts, str | bytes):
        return None
    for number, part in enumerate(parts):
        if is_marked(part):
            return "\n".join(part["text"] if isinstance(part, Mapping) else part for part in parts[: number + 1])
    return None


def _has_chunks(segments: Sequence[Segment]) -> bool:
    return any(segment.kind is SegmentKind.CHUNK for segment in segments)
