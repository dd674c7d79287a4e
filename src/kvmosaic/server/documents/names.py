"""Names of stored documents: ids that fit into an address, and labels that tell their texts apart in the cache."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from kvmosaic.errors import InvalidDocument

if TYPE_CHECKING:
    from kvmosaic.sampling import ReuseReport

MAX_ID_CHARACTERS = 256
ID_PATTERN = r"^[A-Za-z0-9._:-]{1,256}$"
VERBS = ("warm", "pin", "unpin", "sleep", "wake")
"""What may follow an id and a colon in an address; the last two are kept free."""
REFUSED_ID_PATTERN = rf"^\.\.?$|:({'|'.join(VERBS)})$"
"""Programs take `.` and `..` out of an address, and `:warm` at its end would be read as a verb."""

_LABEL = re.compile(r"(([A-Za-z0-9._:-]{1,256}) \[stored [0-9]+\])((?: \([0-9]+/[0-9]+\))?)")


def check_id(document_id: str) -> str:
    """The id itself, if a stored document may have it.

    Raises:
        InvalidDocument: too long, other characters, or one that cannot stand in an address.
    """
    if not re.fullmatch(ID_PATTERN.strip("^$"), document_id):
        raise InvalidDocument(
            f"a document's id has 1 to {MAX_ID_CHARACTERS} letters, digits and . _ : -, got {document_id!r:.80}"
        )
    if re.search(REFUSED_ID_PATTERN, document_id):
        raise InvalidDocument(
            f"the id {document_id!r:.80} cannot stand in an address; it must not be '.' or '..' nor end in "
            + " or ".join(f"':{verb}'" for verb in VERBS)
        )
    return document_id


def label_of(document_id: str, text_number: int) -> str:
    """What the chunks of one text of a document are called in the cache.

    Every text has a number of its own. So the chunks of a replaced text, which a request under way may still compute,
    are never taken for those of the new one; nor are those of a document that a prompt brings along under the same id.
    """
    return f"{document_id} [stored {text_number}]"


def shown_name(name: str) -> str:
    """What people are shown for the name of a chunk or segment: the id alone, and the part of a split document."""
    found = _LABEL.fullmatch(name)
    return found[2] + found[3] if found else name


def label_in(name: str) -> tuple[str, str]:
    """The label and the id in the name of a chunk, or of a part of a split document; two empty texts if it has none."""
    found = _LABEL.fullmatch(name)
    return (found[1], found[2]) if found else ("", "")


def with_shown_names(reuse: ReuseReport) -> ReuseReport:
    """A report that calls stored documents by their ids."""
    segments = tuple(
        segment if segment.name is None else replace(segment, name=shown_name(segment.name))
        for segment in reuse.segments
    )
    return replace(reuse, segments=segments)
