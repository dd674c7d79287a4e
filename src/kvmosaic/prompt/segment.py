"""Segments and prompts: the input before anything has a position."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, get_args

from kvmosaic.errors import EmptySegment, InvalidOffset, InvalidPrompt, InvalidSees, InvalidTokenId
from kvmosaic.prompt.companions import NUM_COMPANIONS
from kvmosaic.prompt.document import (
    MAX_NAME_CHARACTERS,
    Document,
    check_document_priority,
    check_offset,
    read_documents,
    seen_documents,
)
from kvmosaic.prompt.separator import check_text, named_parts

MAX_SEEN_CHUNKS = 2**16
"""Entries of `sees` of all chunks of a prompt: each is an attention read of its own."""
MAX_SALT_CHARACTERS = 4_096
MAX_TENANT_CHARACTERS = 256
MAX_ADAPTER_CHARACTERS = 256
MAX_DOCUMENTS = 10**6
PLACED = "placed"
"""The origin of documents that a request places between texts of its messages."""


class SegmentKind(StrEnum):
    """The role of a segment; it decides what the segment sees."""

    SYSTEM = "system"
    CHUNK = "chunk"
    TEXT = "text"
    """Text between documents, or the changing rest of a system text: computed with the request, after all before it."""
    QUESTION = "question"
    PLAIN = "plain"
    """The only segment of an ordinary prompt: causal, position 0, no documents."""
    REPAIR = "repair"
    """Recomputed tokens of chunks; in layouts only, never in a prompt."""
    COMPANION = "companion"
    """A text before chunks during their prefill, which nothing else sees; in layouts only."""


DocumentsOrder = Literal["sent", "any"]
"""Order in which documents are read: as sent, or so that the cache has the most of them."""

_NAMELESS = {
    SegmentKind.SYSTEM: "system text",
    SegmentKind.CHUNK: "document (it has no id)",
    SegmentKind.TEXT: "text",
    SegmentKind.QUESTION: "question",
    SegmentKind.PLAIN: "prompt",
    SegmentKind.REPAIR: "repaired tokens",
    SegmentKind.COMPANION: "companion",
}


_OF_LAYOUTS = (SegmentKind.REPAIR, SegmentKind.COMPANION)


def _kind(kind: object) -> SegmentKind:
    try:
        return SegmentKind(kind)  # type: ignore[arg-type]
    except ValueError:
        names = ", ".join(repr(str(known)) for known in SegmentKind if known not in _OF_LAYOUTS)
        raise InvalidPrompt(f"a segment's kind must be one of {names}, got {kind!r:.80}") from None


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens (or the text to tokenize) that is computed together.

    One of `text` and `token_ids` may be missing; a segment with token ids (any sequence of whole numbers, such as a
    tensor) is ready for the layout.
    """

    kind: SegmentKind
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    name: str | None = None
    """Its name for users: a document's id or title. Not part of the cache key."""
    sees: tuple[int | str, ...] = ()
    """Chunks only: earlier chunks that this chunk sees besides the system prompt, by number (from 0) or by name."""
    position_offset: int | None = None
    """Chunks only, strategy `absolute`: the position of the first token."""
    history_tokens: int = field(default=0, compare=False)
    """Conversations: number of its first tokens up to the end of the last answer before the last question."""
    priority: float | None = None
    """Chunks only: eviction priority, 0 to 1; None: unchanged, or 0.5. Not part of its key."""
    part: tuple[int, int] | None = field(default=None, compare=False)
    """Chunks of a split document: (part, number of parts), counted from 1."""
    document_offset: int = field(default=0, compare=False)
    """Chunks of a split document: tokens of the document before this part. Its positions start so much later, unless
    the document is longer than the model's positions: then this is 0, and its parts overlap."""
    is_section: bool = field(default=False, compare=False)
    """Chunks of a document in sections: computed at the same position whatever its offset, and moved, so that it stays
    a cache hit when text before it is edited."""
    number: int | None = field(default=None, compare=False)
    """Chunks of a prompt with several documents: index of its document, from 0."""
    origin: str = field(default="", compare=False)
    """Documents found in text: how, as in "pattern open-webui", or `PLACED`."""
    remark: str = field(default="", compare=False)
    """What its row of the report says besides."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _kind(self.kind))
        if self.text is not None:
            check_text(self.text)
        if self.name is not None and (not isinstance(self.name, str) or len(self.name) > MAX_NAME_CHARACTERS):
            raise InvalidPrompt(
                f"a segment's name must be a text of at most {MAX_NAME_CHARACTERS} characters, got {self.name!r:.80}"
            )
        if self.token_ids is not None and type(self.token_ids) is not tuple:
            object.__setattr__(self, "token_ids", whole_numbers(self.token_ids))
        if not isinstance(self.sees, list | tuple):
            raise InvalidSees(f"sees must be a list of chunk numbers or names, got {self.sees!r:.80}")
        object.__setattr__(self, "sees", tuple(self.sees))
        check_offset(self.position_offset, InvalidOffset)
        check_document_priority(self.priority)
        if self.token_ids is None and self.text is None:
            raise EmptySegment(f"the {self.kind} segment has neither text nor token ids; give one of them")
        if self.token_ids is not None and len(self.token_ids) == 0:
            raise EmptySegment(
                f"the {self.label} has 0 tokens; a segment needs at least 1 (leave it out instead)",
                document=self.document,
            )

    @property
    def label(self) -> str:
        """Its name in messages and reports."""
        if self.name is None and self.number is not None:
            return f"document number {self.number + 1} (it has no id)"
        return f"{self.kind} {self.name!r}" if self.name else _NAMELESS[self.kind]

    @property
    def continues(self) -> bool:
        """Whether it is not the first part of its document."""
        return self.part is not None and self.part[0] > 1

    @property
    def document(self) -> int | None:
        """Chunks only: index of its document in the prompt, from 0."""
        return self.number or 0 if self.kind is SegmentKind.CHUNK else None

    @property
    def num_tokens(self) -> int:
        """Tokens of a tokenized segment.

        Raises:
            InvalidPrompt: a text that is not tokenized yet.
        """
        if self.token_ids is None:
            raise _untokenized(self.label)
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Prompt:
    """An ordered tuple of segments: `[system] (chunk | text)* question`, or one `plain` segment.

    `Prompt(["Answer.", llm.chunks["guide"], "What does it say?"])`: a chunk handle is its segment, and a text is the
    system text if it is first, the question if it is last, and a text segment between them.

    Chunks see the system segment. A text, like the question, sees everything before it and is computed with the
    request: text between documents, or what follows the stable part of a system text (its *preamble*), such as a date.

    salt, tenant: prompts that differ in either never share a cached byte. A salt is chosen by the client; a tenant is
    the client as the server knows it, with names, pins and a quota of its own.
    """

    segments: tuple[Segment, ...]
    salt: str = ""
    tenant: str = ""
    is_joined: bool = field(default=False, compare=False)
    """Whether this is an ordinary prompt that was made from segments, for use without a chunk cache."""
    companions: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)
    """Texts before its documents during their prefill, with chunk_context "companions": document k (from 0) is computed
    after the first k of them, or all; one that is itself a companion, after those before it. An engine takes three:
    texts like its documents, or the first."""
    place: int = field(default=0, compare=False, repr=False)
    """Documents before the first one, in a prompt that warms the cache for later ones: chooses its companions."""
    documents_order: DocumentsOrder | None = field(default=None, compare=False)
    """Whether the cache may choose which documents come first ("any"); None: as the settings say."""
    remark: str = field(default="", compare=False, repr=False)
    """What the reply says of how the conversation was read."""
    has_tools: bool = field(default=False, compare=False, repr=False)
    """Whether its answer may call tools, after which the conversation goes on: its documents stay cached for that."""
    adapter: str | None = None
    """Name of the low-rank adapter that computes it; "": the base model; None: the model's default, which adapts
    prompts with documents only."""

    def __post_init__(self) -> None:
        if not isinstance(self.segments, tuple) or any(type(part) is not Segment for part in self.segments):
            object.__setattr__(self, "segments", _segments_of(self.segments))
        if not isinstance(self.tenant, str) or len(self.tenant) > MAX_TENANT_CHARACTERS:
            raise InvalidPrompt(
                f"tenant must be a text of at most {MAX_TENANT_CHARACTERS} characters, got {self.tenant!r:.80}"
            )
        if not isinstance(self.salt, str) or len(self.salt) > MAX_SALT_CHARACTERS:
            raise InvalidPrompt(
                f"salt must be a text of at most {MAX_SALT_CHARACTERS} characters, got {self.salt!r:.80}"
            )
        if self.adapter is not None and (
            not isinstance(self.adapter, str) or len(self.adapter) > MAX_ADAPTER_CHARACTERS
        ):
            raise InvalidPrompt(
                f"adapter must be a name of at most {MAX_ADAPTER_CHARACTERS} characters, got {self.adapter!r:.80}"
            )
        if self.documents_order not in (None, *get_args(DocumentsOrder)):
            raise InvalidPrompt(f"documents_order is {self.documents_order!r:.80}; choose 'sent' or 'any'")
        kinds = [segment.kind for segment in self.segments]
        if kinds == [SegmentKind.PLAIN]:
            return
        if not kinds or kinds[-1] is not SegmentKind.QUESTION:
            raise InvalidPrompt("a prompt ends with one question; got the segments " + (", ".join(kinds) or "(none)"))
        body = kinds[1:-1] if kinds[0] is SegmentKind.SYSTEM else kinds[:-1]
        if any(kind not in (SegmentKind.CHUNK, SegmentKind.TEXT) for kind in body):
            raise InvalidPrompt(
                "a prompt is an optional system segment, any number of chunks and texts and one question; got "
                + ", ".join(kinds)
            )

    @property
    def chunks(self) -> tuple[Segment, ...]:
        """The documents, in prompt order."""
        return tuple(segment for segment in self.segments if segment.kind is SegmentKind.CHUNK)

    @property
    def has_texts(self) -> bool:
        """Whether it has text segments, before or between its chunks."""
        return any(segment.kind is SegmentKind.TEXT for segment in self.segments)

    @property
    def is_plain(self) -> bool:
        """Whether this is an ordinary prompt without segments."""
        return len(self.segments) == 1 and self.segments[0].kind is SegmentKind.PLAIN

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments, once they are tokenized.

        Raises:
            InvalidPrompt: a segment is a text that is not tokenized yet.
        """
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def is_found(self) -> bool:
        """Whether it has documents, all of them found in its text."""
        return bool(self.chunks) and all(chunk.origin not in ("", PLACED) for chunk in self.chunks)

    def joined(self) -> Prompt:
        """All segments as one ordinary prompt of exactly their tokens; for texts see `PromptEncoder.joining`.

        Raises:
            InvalidPrompt: a segment is a text that is not tokenized yet.
        """
        for segment in self.segments:
            if segment.token_ids is None:
                raise _untokenized(segment.label)
        token_ids = tuple(token for segment in self.segments for token in segment.token_ids or ())
        return replace(self, segments=(Segment(SegmentKind.PLAIN, token_ids, text=self.text),), is_joined=True)

    def without_texts(self) -> Prompt:
        """A prompt of the same documents, for warming: they see no text."""
        return replace(self, segments=tuple(each for each in self.segments if each.kind is not SegmentKind.TEXT))

    @property
    def text(self) -> str | None:
        """The text of all segments, one after the other; None if a segment was given as token ids."""
        texts = [segment.text for segment in self.segments if segment.text is not None]
        return "".join(texts) if len(texts) == len(self.segments) else None

    @classmethod
    def from_text(
        cls, text: str, separator: str | None = "##", *, names: Sequence[str] | None = None, salt: str = ""
    ) -> Prompt:
        r"""Splits a text at its separators: the first part is the system text, the last one the question.

        White space around each part is removed and the separator itself never reaches the model. A text with fewer than
        two separators is an ordinary prompt. A backslash before a separator makes it text: `\##`. Texts passed to an
        `LLM` directly (not through this method) are split only where its settings name a separator.

        Args:
            text: for example "Answer from the documents. ## first document ## second document ## question".
            separator: any text with a visible character; None or "" never splits.
            names: one name per chunk, for reports, pins and deletion.
            salt: tenant salt.

        Raises:
            EmptySegment: a part is empty; the message names it.
            InvalidSeparator: a separator that cannot split anything.
            InvalidPrompt: a text that is too long, or a different number of names and chunks.
        """
        parts = named_parts(text, separator)
        if isinstance(parts, str):
            return cls((Segment(SegmentKind.PLAIN, text=parts),), salt=salt)
        system, bodies, question = parts
        _check_names(names, len(bodies))
        segments = [Segment(SegmentKind.SYSTEM, text=system)]
        segments += [
            Segment(SegmentKind.CHUNK, text=body, name=names[index] if names else None)
            for index, body in enumerate(bodies)
        ]
        segments.append(Segment(SegmentKind.QUESTION, text=question))
        return cls(tuple(segments), salt=salt)

    @classmethod
    def from_documents(
        cls, documents: Iterable[object], question: str, *, system: str | None = None, salt: str = ""
    ) -> Prompt:
        """Builds a prompt from documents, without a chat template and without splitting at separators.

        Args:
            documents: texts, mappings with "text" (and "title", "id") or `Document`s.
            question: the question about them.
            system: the system text; None omits it.
            salt: tenant salt.

        Raises:
            InvalidDocument: an entry that is not a document.
            EmptySegment: an empty system text or question.
        """
        segments = [] if system is None else [_text_segment(SegmentKind.SYSTEM, system)]
        read = read_documents(documents, MAX_DOCUMENTS)
        for document, sees in zip(read, seen_documents(read), strict=True):
            segments.append(replace(document_segment(document, sees), text=document.plain_text))
        return cls((*segments, _text_segment(SegmentKind.QUESTION, question)), salt=salt)

    def singles(self, *, with_places: bool = False) -> list[Prompt]:
        """One prompt for each chunk alone after the system text, as warming computes them.

        With `with_places`, one for each number of documents before it that changes its companions.
        """
        system = [segment for segment in self.segments if segment.kind is SegmentKind.SYSTEM]
        question = Segment(SegmentKind.QUESTION, (0,))
        alone = (replace(self, segments=(*system, chunk, question)) for chunk in self.chunks)
        return [each for one in alone for each in (one.at_places() if with_places else [one])]

    def at_places(self) -> list[Prompt]:
        """This prompt after each number of documents that changes what its own saw."""
        return [replace(self, place=place) for place in range(min(len(self.companions), NUM_COMPANIONS) + 1)]

    @classmethod
    def from_tokens(
        cls,
        system: Sequence[int] | None = None,
        chunks: Iterable[Sequence[int]] = (),
        question: Sequence[int] | None = None,
        *,
        names: Sequence[str] | None = None,
        salt: str = "",
    ) -> Prompt:
        """Builds a prompt from token ids.

        Args:
            system: token ids of the system prompt; None omits it.
            chunks: one sequence of token ids per document.
            question: token ids of the question.
            names: one name per chunk, for reports, pins and deletion.
            salt: tenant salt.

        Raises:
            EmptySegment: a segment has no tokens.
            InvalidPrompt: no question, or a different number of names and chunks.
        """
        bodies = [whole_numbers(chunk) for chunk in chunks]
        _check_names(names, len(bodies))
        if question is None:
            raise InvalidPrompt("a prompt needs a question; pass question=[...] token ids")
        segments = [] if system is None else [Segment(SegmentKind.SYSTEM, whole_numbers(system))]
        segments += [
            Segment(SegmentKind.CHUNK, body, name=names[index] if names else None) for index, body in enumerate(bodies)
        ]
        segments.append(Segment(SegmentKind.QUESTION, whole_numbers(question)))
        return cls(tuple(segments), salt=salt)

    @classmethod
    def plain(cls, token_ids: Sequence[int], *, salt: str = "") -> Prompt:
        """An ordinary prompt: one causal segment at position 0."""
        return cls((Segment(SegmentKind.PLAIN, whole_numbers(token_ids)),), salt=salt)


def has_segments(value: object) -> bool:
    """Whether this is a list of parts of one prompt: some are segments or chunk handles."""
    return isinstance(value, list | tuple) and any(isinstance(_unwrapped(part), Segment) for part in value)


def _unwrapped(part: object) -> object:
    return getattr(part, "segment", part)


def _segments_of(parts: object) -> tuple[Segment, ...]:
    """The segments of a prompt that was given as segments, chunk handles and texts.

    Raises:
        InvalidPrompt: something else.
    """
    is_list = isinstance(parts, Iterable) and not isinstance(parts, str | bytes)
    given = [_unwrapped(part) for part in parts] if is_list else [parts]  # type: ignore[attr-defined]
    wrong = [part for part in given if not isinstance(part, Segment) and not (is_list and isinstance(part, str))]
    if not given or wrong:
        raise InvalidPrompt(
            "a prompt is a list of segments, chunk handles and texts, such as "
            f"Prompt([llm.chunks['guide'], 'What does it say?']), got {(wrong or given)!r:.80}"
        )
    kinds = [SegmentKind.SYSTEM, *[SegmentKind.TEXT] * (len(given) - 1)]
    kinds[-1] = SegmentKind.QUESTION
    return tuple(
        Segment(kind, text=part) if isinstance(part, str) else part  # type: ignore[misc]
        for kind, part in zip(kinds, given, strict=True)
    )


def document_segment(document: Document, sees: tuple[int | str, ...] = ()) -> Segment:
    """The chunk of a document, with its text alone."""
    return Segment(
        SegmentKind.CHUNK,
        text=document.text,
        name=document.name,
        sees=sees,
        position_offset=document.position_offset,
        priority=document.priority,
    )


def _text_segment(kind: SegmentKind, text: str) -> Segment:
    check_text(text)
    if not text.strip():
        raise EmptySegment(f"the {kind} text is empty; write something or leave it out")
    return Segment(kind, text=text.strip())


def _untokenized(label: str) -> InvalidPrompt:
    return InvalidPrompt(
        f"the {label} is a text that was not tokenized yet, so it has no tokens; tokenize the prompt first: "
        "llm.encoder.encode(prompt)"
    )


def whole_numbers(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids as plain ints; numpy arrays and torch tensors are accepted.

    Raises:
        InvalidTokenId: something else, such as fractions or rows of ids.
    """
    if (to_list := getattr(token_ids, "tolist", None)) is not None:
        token_ids = to_list()  # one copy from a device, not one for every id
    try:
        return tuple(map(operator.index, token_ids))
    except TypeError as error:
        way_out = "; give text=..." if isinstance(token_ids, str) else ""
        raise InvalidTokenId(f"token ids must be whole numbers: {error}{way_out}") from None


def numbered(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The segments of a prompt; several documents are numbered, so that messages can identify them."""
    if sum(segment.kind is SegmentKind.CHUNK for segment in segments) < 2:
        return tuple(segments)
    numbers = itertools.count()
    return tuple(
        replace(segment, number=next(numbers)) if segment.kind is SegmentKind.CHUNK else segment for segment in segments
    )


def _check_names(names: Sequence[str] | None, num_chunks: int) -> None:
    if names is not None and (isinstance(names, str) or len(names) != num_chunks):
        raise InvalidPrompt(f"{len(names)} names for {num_chunks} chunks; give one name per chunk or none")


def seen_chunks(chunks: Sequence[Segment]) -> tuple[tuple[int, ...], ...]:
    """For every chunk of a prompt, the indexes of the chunks in its `sees`, in order.

    A name refers to the last chunk of that name before the chunk that sees it.

    Raises:
        InvalidSees: a chunk sees itself, a later chunk, one that does not exist, or one twice; too many see each other.
    """
    total = sum(len(chunk.sees) for chunk in chunks)
    if total > MAX_SEEN_CHUNKS:
        raise InvalidSees(
            f"the chunks of this prompt list {total} chunks in `sees`; at most {MAX_SEEN_CHUNKS} are allowed together"
        )
    numbers: dict[str, int] = {}
    seen = []
    for index, chunk in enumerate(chunks):
        seen.append(tuple(sorted(_number(chunk, index, entry, numbers) for entry in chunk.sees)))
        if len(set(seen[-1])) != len(chunk.sees):
            raise InvalidSees(f"{chunk.label} names a chunk twice in sees={chunk.sees!r:.80}; name each once")
        if chunk.name is not None:
            numbers[chunk.name] = index
    return tuple(seen)


def _number(chunk: Segment, index: int, entry: int | str, numbers: dict[str, int]) -> int:
    if isinstance(entry, str):
        if entry not in numbers:
            before = ", ".join(f"{name!r:.80}" for name in list(numbers)[:10]) or "none has a name"
            raise InvalidSees(
                f"{chunk.label} lists {entry!r:.80} in `sees`, and no chunk before it has that name; "
                f"before it: {before}"
            )
        return numbers[entry]
    if not index:
        raise InvalidSees(f"{chunk.label} is the first chunk and cannot see chunk {entry!r}; remove it from sees")
    if isinstance(entry, bool) or not isinstance(entry, int) or not 0 <= entry < index:
        raise InvalidSees(
            f"{chunk.label} is chunk {index} and its `sees` lists chunk {entry!r}; "
            f"a chunk sees only chunks before it (0 to {index - 1}, or their names)"
        )
    return entry
