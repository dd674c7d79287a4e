"""Ids of stored documents: texts valid in a URL path."""

from __future__ import annotations

import re

from kvmosaic.errors import InvalidDocument

MAX_ID_CHARACTERS = 256
ID_PATTERN = r"^[A-Za-z0-9._:-]{1,256}$"
VERBS = ("warm", "pin", "unpin", "sleep", "wake")
"""URL suffixes after an id and a colon; the last two are reserved."""
REFUSED_ID_PATTERN = rf"^\.\.?$|:({'|'.join(VERBS)})$"
"""Clients strip `.` and `..` from a URL, and `:warm` at its end would be parsed as a verb."""


def check_id(document_id: str) -> str:
    """The id itself, if valid for a stored document.

    Raises:
        InvalidDocument: too long, other characters, or an id that is not valid in a URL.
    """
    if not re.fullmatch(ID_PATTERN.strip("^$"), document_id):
        raise InvalidDocument(
            f"a document's id has 1 to {MAX_ID_CHARACTERS} letters, digits and . _ : -, got {document_id!r:.80}"
        )
    if re.search(REFUSED_ID_PATTERN, document_id):
        raise InvalidDocument(
            f"the id {document_id!r:.80} cannot be part of an address; it must not be '.' or '..' nor end in "
            + " or ".join(f"':{verb}'" for verb in VERBS)
        )
    return document_id
