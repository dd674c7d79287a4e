"""Documents: the texts of a prompt, given as mappings, strings or `Document`s; and ids of stored ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvmosaic.errors import InvalidDocument, TooManyChunks
from kvmosaic.prompt.separator import check_unicode

MAX_ID_CHARACTERS = 256
_CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029"
ID_PATTERN = rf"^[^{_CONTROL}\s~](?:[^{_CONTROL}]*[^{_CONTROL}\s])?$"
"""No control characters, no white space around it; `~` begins the places of a list."""
VERBS = ("warm", "pin", "unpin", "sleep", "wake")
"""URL suffixes after an id and a colon; the last two are reserved."""
REFUSED_ID_PATTERN = rf"(^|/)\.\.?(/|$)|:({'|'.join(VERBS)})$"
"""Clients strip `.` and `..` from a URL, and `:warm` at its end would be parsed as a verb."""
ID_RULE = f"1 to {MAX_ID_CHARACTERS} characters on one line, without white space around them and no ~ at the beginning"


def check_id(document_id: str) -> str:
    """The id itself, if valid for a stored document.

    Raises:
        InvalidDocument: empty, too long, more than one line, or an id that cannot be part of a URL.
    """
    if len(document_id) > MAX_ID_CHARACTERS or not re.fullmatch(ID_PATTERN.strip("^$"), document_id):
        raise InvalidDocument(f"a document's id has {ID_RULE}; got {document_id!r:.80}")
    try:
        document_id.encode()
    except UnicodeEncodeError:
        raise InvalidDocument(f"the id {document_id!r:.80} holds a lone surrogate, which is no character") from None
    if re.search(REFUSED_ID_PATTERN, document_id):
        raise InvalidDocument(
            f"the id {document_id!r:.80} cannot be part of an address; no part of its path may be '.' or '..', and it "
            "must not end in " + " or ".join(f"':{verb}'" for verb in VERBS)
        )
    return document_id


MAX_DOCUMENT_CHARACTERS = 2**25
MAX_NAME_CHARACTERS = 4_096
MAX_POSITION = 2**27
_MAX_LISTED = 16


@dataclass(frozen=True, slots=True)
class Document:
    """A text with an optional title and id. White space around text and title is removed.

    The model reads the title and the text. The id is a name for reports, pins and deletion; the model reads it only if
    its chat template asks for `doc_id`. The priority, 0 to 1, is the chunk's priority for the eviction policy
    "priority"; None leaves it unset, with a default of 0.5.

    sees: earlier documents that this one sees besides the system text, by id or index (from 0). It is then cached for
        these documents only.
    position_offset: position of its first token, with position strategy "absolute".
    """

    text: str
    title: str | None = None
    id: str | None = None
    priority: float | None = None
    sees: tuple[str | int, ...] = ()
    position_offset: int | None = None

    def __post_init__(self) -> None:
        for field, limit in (
            ("text", MAX_DOCUMENT_CHARACTERS),
            ("title", MAX_NAME_CHARACTERS),
            ("id", MAX_NAME_CHARACTERS),
        ):
            value = getattr(self, field)
            if value is None and field != "text":
                continue
            if not isinstance(value, str):
                raise InvalidDocument(f"a document's {field} must be a text, got {type(value).__name__}")
            if len(value) > limit:
                raise InvalidDocument(f"a document's {field} has {len(value)} characters; at most {limit} are allowed")
            check_unicode(value, InvalidDocument)
            object.__setattr__(self, field, value.strip() or None)
        if self.text is None:
            raise InvalidDocument("a document's text is empty; leave the document out")
        check_document_priority(self.priority)
        object.__setattr__(self, "sees", _checked_sees(self.sees))
        check_offset(self.position_offset, InvalidDocument)

    @property
    def name(self) -> str | None:
        """Its name for users: its id, else its title."""
        return self.id or self.title

    @property
    def plain_text(self) -> str:
        """The title on a line of its own, then the text."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    @classmethod
    def read(cls, value: object) -> Document:
        """Makes a document from a text, a mapping with "text" (and other fields of a document), or a document.

        Other keys of a mapping are the caller's data and are not shown to the model.

        Raises:
            InvalidDocument: anything else.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, Mapping):
            raise InvalidDocument(
                f'a document is {{"text": ..., "title": ..., "id": ...}} or a text, got {value!r:.80}'
            )
        if "text" not in value:
            keys = ", ".join(sorted(map(repr, value)))[:200]
            raise InvalidDocument(f'a document needs a "text"; this one has {keys or "no keys"}')
        number = value.get("id", value.get("doc_id"))
        name = str(number) if isinstance(number, int) and not isinstance(number, bool) else number
        sees, offset = value.get("sees") or (), value.get("position_offset")
        return cls(value["text"], value.get("title"), name, value.get("priority"), sees, offset)


def _checked_sees(sees: object) -> tuple[str | int, ...]:
    is_list = isinstance(sees, list | tuple)
    if is_list and all(isinstance(entry, str) or type(entry) is int for entry in sees):  # type: ignore[attr-defined]
        return tuple(sees)  # type: ignore[arg-type]
    raise InvalidDocument(f"sees is a list of ids or indexes of earlier documents, got {sees!r:.80}")


def check_offset(offset: object, error: type[Exception]) -> None:
    """Raises the error unless this is None or a position."""
    is_whole = isinstance(offset, int) and not isinstance(offset, bool)
    if offset is not None and not (is_whole and 0 <= offset <= MAX_POSITION):  # type: ignore[operator]
        raise error(f"position_offset must be a whole number from 0 to {MAX_POSITION}, got {offset!r:.80}")


def seen_documents(documents: Sequence[Document]) -> tuple[tuple[int | str, ...], ...]:
    """For each document, what it sees: indexes in place of the ids of earlier documents; the rest is unchanged."""
    indexes: dict[str, int] = {}
    seen = []
    for index, document in enumerate(documents):
        seen.append(tuple(indexes.get(each, each) if isinstance(each, str) else each for each in document.sees))
        if document.id is not None:
            indexes[document.id] = index
    return tuple(seen)


def check_document_priority(priority: object) -> None:
    """Checks the priority of a document.

    Raises:
        InvalidDocument: neither None nor a number from 0 to 1.
    """
    is_number = isinstance(priority, int | float) and not isinstance(priority, bool)
    if priority is not None and not (is_number and 0 <= priority <= 1):  # type: ignore[operator]
        raise InvalidDocument(
            "a document's priority is a number from 0 (first to leave a full cache) to 1 (last), or None for 0.5, "
            f"got {priority!r:.80}"
        )


def read_documents(documents: object, max_documents: int) -> tuple[Document, ...]:
    """Makes documents from a list of texts, mappings and documents.

    Raises:
        InvalidDocument: not a list, an entry that is not a document, or an id given twice.
        TooManyChunks: more than `max_documents`.
    """
    if not isinstance(documents, Iterable) or isinstance(documents, str | bytes | Mapping):
        raise InvalidDocument(f"documents must be a list, got {type(documents).__name__}")
    read: list[Document] = []
    places: dict[str, int] = {}
    for index, value in enumerate(documents):
        if index >= max_documents:
            raise TooManyChunks(
                f"more than {max_documents} documents in one prompt; raise max_prompt_chunks or send fewer"
            )
        try:
            document = Document.read(value)
        except InvalidDocument as error:
            raise InvalidDocument(f"document number {index + 1}: {error}", document=index) from None
        if document.id is not None and places.setdefault(document.id, index) != index:
            raise InvalidDocument(
                f"documents number {places[document.id] + 1} and {index + 1} have the same id {document.id!r}; "
                "give each its own, or none",
                document=index,
            )
        read.append(document)
    return tuple(read)


@dataclass(frozen=True, slots=True)
class GivenDocuments:
    """The documents of a request as its prompt has them."""

    documents: tuple[Document, ...] = ()
    places: tuple[int, ...] = ()
    """The place of each in the request, from 0."""
    warnings: tuple[str, ...] = ()
    """What differs from the request."""


def distinct_documents(documents: Mapping[int, Document], blank: Mapping[int, str | None]) -> GivenDocuments:
    """Leaves repeats out, and names the other texts of one id `m` `m#2`, `m#3` and so on.

    Numbers in `sees` still mean the places in the request.

    Args:
        documents: by place in the request.
        blank: ids of those without text, by place, which are left out.

    Raises:
        InvalidDocument: `sees` names an id that several texts have.
    """
    kept, moved = dict[int, Document](), dict[int, int | None](dict.fromkeys(blank))
    first, numbers = dict[tuple[object, ...], int](), dict[str, int]()
    repeats, renamed = list[str](), list[str]()
    ids = {document.id for document in documents.values()}
    for place, document in documents.items():
        moved[place], name = len(kept), document.id
        if name is not None:
            what = (name, document.title, document.text, document.sees, document.position_offset)
            if first.setdefault(what, place) != place:
                moved[place] = moved[first[what]]
                repeats.append(_listed(place, name))
                continue
            number = numbers.get(name, 1)
            while number > 1 and f"{name}#{number}" in ids:
                number += 1
            numbers[name] = number + 1
            if number > 1:
                document = replace(document, id=f"{name}#{number}")
                renamed.append(f"{_listed(place, name)} to #{number}")
        kept[place] = document
    gone = set(blank.values()) - ids
    for place, document in kept.items():
        for each in document.sees:
            if isinstance(each, str) and numbers.get(each, 0) > 2:
                raise InvalidDocument(
                    f"document number {place + 1} sees {each!r:.80}, and several texts have this id; give each its own",
                    document=place,
                )
        if document.sees and len(kept) < len(moved):
            told = [moved.get(each, each) if isinstance(each, int) else each for each in document.sees]
            sees = tuple(dict.fromkeys(each for each in told if each is not None and each not in gone))
            kept[place] = replace(document, sees=sees)
    said = (
        left_out([_listed(*each) for each in blank.items()]),
        _warning("read once, though sent again", repeats),
        _warning("renamed, since another text has the id", renamed),
    )
    return GivenDocuments(tuple(kept.values()), tuple(kept), tuple(filter(None, said)))


def left_out(listed: Sequence[str]) -> str:
    """The warning about blank documents at these places; empty without any."""
    return _warning("left out, since their texts are blank", listed)


def _listed(place: int, name: str | None) -> str:
    return f"documents.{place}" + (f" ({name!r:.80})" if name else "")


def _warning(what: str, listed: Sequence[str]) -> str:
    if not listed:
        return ""
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return f"documents {what}: {', '.join(listed[:_MAX_LISTED])}{more}"
