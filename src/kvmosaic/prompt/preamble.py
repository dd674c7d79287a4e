"""The preamble: the stable beginning of a system text, the only part of it that documents see.

    system text   You answer from the documents. | Today is Monday, 23 November 2026. User: ada@fenbury.org
                  preamble                         rest: changes with every request

Documents are cached for one preamble. If they saw the rest too, no request would reuse what another one computed. Where
the preamble ends depends on the request and the settings alone, so that cached and computed documents are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from kvmosaic.errors import InvalidMessages, InvalidPreamble
from kvmosaic.prompt.chat_template.document_placement import Placing, place_documents
from kvmosaic.prompt.conversation import Conversation
from kvmosaic.prompt.message import is_system
from kvmosaic.prompt.segment import Segment, SegmentKind
from kvmosaic.prompt.text_pieces import TextPiece, common_length, joined
from kvmosaic.prompt.tokenizer import Encoded

MARKS = ("cache_control", "prompt_cache_breakpoint")
"""Fields that mark a part of a message as the end of what is cached, in other APIs."""
MAX_RULE_CHARACTERS = 1_000
MAX_PREAMBLE_TOKENS = 10**7
PATTERN_SECONDS = 0.1
"""Timeout of a pattern in one system text."""

_MONTHS = (
    r"jan(?:uary|\.)?|feb(?:ruary|\.)?|mar(?:ch|\.)?|apr(?:il|\.)?|may|june?|july?|aug(?:ust|\.)?|sept?(?:ember|\.)?|"
    r"oct(?:ober|\.)?|nov(?:ember|\.)?|dec(?:ember|\.)?|januar|februar|märz|mai|juni|juli|oktober|dezember|janvier|"
    r"février|mars|avril|juin|juillet|août|septembre|octobre|novembre|décembre|enero|febrero|marzo|abril|mayo|junio|"
    r"julio|agosto|septiembre|octubre|noviembre|diciembre"
)
_CHANGING = re.compile(
    "|".join(
        (
            r"(?<!\d)\d{4}([-/.])\d{1,2}\1\d{1,2}(?!\d)",  # 2026-11-23
            r"(?<!\d)\d{1,2}([-/.])\d{1,2}\2\d{2,4}(?!\d)",  # 23.11.2026
            r"(?<!\d)\d{4} ?[年년] ?\d{1,2} ?[月월] ?\d{1,2} ?[日일]",
            rf"(?<!\d)\d{{1,2}}(?:st|nd|rd|th|\.)? (?:of |de )?(?:{_MONTHS})(?!\w)",  # 23 November
            rf"(?<!\w)(?:{_MONTHS}) \d{{1,2}}(?:st|nd|rd|th)?(?!\w)",  # November 23, but not November 2026
            r"(?<![\d:])\d{1,2}:\d{2}(?![\d:]|:)",  # 10:45
            r"(?<![\d:])\d{1,2}:\d{2}:\d{2}(?!\d)",
            r"(?<!\w)\d{1,2} ?[ap]\.?m(?!\w)",  # 5 pm
            r"(?<![0-9a-f])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9a-f])",
            r"(?<!\d)\d{8}",  # ids, and seconds since 1970
            r"(?<=[\w.+-])@(?=[\w-]{1,63}\.\w)",  # ada@fenbury.org
        )
    ),
    re.IGNORECASE,
)
"""Dates, times of the day, UUIDs, long numbers and e-mail addresses. Every part has a bounded length: linear time."""
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*[ \t]|[。！？]")

RuleKind = Literal["auto", "all", "tokens", "text", "pattern"]


@dataclass(frozen=True)
class PreambleRule:
    """Where a preamble ends, as a setting or a request says."""

    kind: RuleKind
    value: str = ""

    def __str__(self) -> str:
        prefix = {"text": "before:", "pattern": "pattern:"}.get(self.kind, "")
        return prefix + (self.value or self.kind)

    @property
    def num_tokens(self) -> int | None:
        """Length in tokens, if the rule names one."""
        return int(self.value) if self.kind == "tokens" else None

    @cached_property
    def _pattern(self) -> Any:
        import regex  # only where a pattern is set

        return regex.compile(self.value)

    def end_in(self, text: str) -> int | None:
        """Where the preamble ends by the rule's own text or pattern; None if it has none, or it is not found.

        Raises:
            InvalidPreamble: the pattern takes too long.
        """
        if self.kind == "text":
            place = text.find(self.value)
            return place if place >= 0 else None
        if self.kind != "pattern":
            return None
        try:
            found = self._pattern.search(text, timeout=PATTERN_SECONDS)
        except TimeoutError:
            raise InvalidPreamble(
                f"the pattern of preamble={str(self)!r:.80} takes more than {PATTERN_SECONDS} s in this system text; "
                "write one without nested repetitions, or use 'before:TEXT'"
            ) from None
        return found.start() if found else None


def preamble_rule(value: object) -> PreambleRule:
    """Reads a rule.

    Args:
        value: "auto"; "all": documents see the whole system text; a number of tokens; "before:TEXT" or "pattern:REGEX":
            before the first of them; or a rule.

    Raises:
        InvalidPreamble: anything else.
    """
    if isinstance(value, PreambleRule):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and len(value) <= MAX_RULE_CHARACTERS:
        if value in ("auto", "all"):
            return PreambleRule("auto" if value == "auto" else "all")
        if value.isascii() and value.isdigit() and int(value) <= MAX_PREAMBLE_TOKENS:
            return PreambleRule("tokens", str(int(value)))
        kind, _, said = value.partition(":")
        if kind == "before" and said:
            return PreambleRule("text", said)
        if kind == "pattern" and said:
            return _pattern_rule(said)
    raise InvalidPreamble(
        f"preamble is {value!r:.80}; choose 'auto', 'all', a number of tokens up to {MAX_PREAMBLE_TOKENS}, "
        f"'before:TEXT' or 'pattern:REGEX', in at most {MAX_RULE_CHARACTERS} characters"
    )


def _pattern_rule(pattern: str) -> PreambleRule:
    import regex

    rule = PreambleRule("pattern", pattern)
    try:
        is_empty = rule._pattern.match("") is not None
    except (regex.error, ValueError, RecursionError, OverflowError) as error:
        raise InvalidPreamble(f"the pattern of preamble={str(rule)!r:.80} cannot be read: {error}") from None
    if is_empty:
        raise InvalidPreamble(f"the pattern of preamble={str(rule)!r:.80} matches an empty text, so it says nothing")
    return rule


def stable_end(text: str) -> int:
    """Where the sentence or line begins that holds the first date, time, UUID, long number or e-mail address.

    The length of the text if there is none.
    """
    found = _CHANGING.search(text)
    return len(text) if found is None else sentence_start(text, found.start())


def sentence_start(text: str, place: int) -> int:
    """The start of the sentence or line around a place, with the spaces before it."""
    line = text.rfind("\n", 0, place) + 1
    start = line
    for end in _SENTENCE_END.finditer(text, line, place):
        start = end.end()
    while start > line and text[start - 1] in " \t":
        start -= 1
    return start


def common_start(one: str, other: str) -> int | None:
    """Where the first sentence or line begins in which two texts differ; None if they are equal."""
    return None if one == other else sentence_start(one, common_length(one, other))


def is_marked(part: object) -> bool:
    """Whether a part of a message carries one of the `MARKS`."""
    return isinstance(part, Mapping) and any(part.get(mark) not in (None, False) for mark in MARKS)


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
    if not _has_chunks(segments):
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
    conversation: Conversation,
    head: Sequence[TextPiece],
    messages: Any,
    rule: PreambleRule,
    *,
    has_documents: bool = True,
) -> int | None:
    """Where the preamble ends in what a chat template writes before the documents; None: not before its end.

    The first that applies: a marked part of a system message; the rule; what the template writes from its clock; and
    with the rule "auto", a system text's first sentence that changes.

    Args:
        conversation: the checked conversation.
        head: its pieces before the documents.
        messages: as the caller gave them, with marks.
        rule: of the request or the settings.
        has_documents: whether documents are placed in the conversation; else they are found in its messages.
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
        end = _clock_end(conversation, text, has_documents)
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


def _clock_end(conversation: Conversation, text: str, has_documents: bool) -> int | None:
    """Where the template begins to write what it takes from its clock: it is rendered at another time, too."""
    if not conversation.has_clock:
        return None
    try:
        other = conversation.at_another_time()
        head = place_documents(other).head if has_documents else other.pieces()
    except InvalidMessages:  # the template reads numbers from its clock
        return None
    other_text = joined(head)
    return common_start(text, other_text if has_documents else other_text[: len(text)])


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
