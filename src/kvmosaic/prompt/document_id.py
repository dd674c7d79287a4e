"""Ids of stored documents: any text of one line that can be percent-encoded into a URL path."""

from __future__ import annotations

import re

from kvmosaic.errors import InvalidDocument

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
