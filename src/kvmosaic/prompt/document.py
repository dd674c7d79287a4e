"""Documents: the texts of a prompt, given as mappings, strings or `Document`s."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvmosaic.errors import InvalidDocument, TooManyChunks
from kvmosaic.prompt.separator import check_unicode

MAX_DOCUMENT_CHARACTERS = 2**25
MAX_NAME_CHARACTERS = 4_096
MAX_POSITION = 2**27


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
