"""Names of stored documents in the cache: labels that tell their texts apart."""

from __future__ import annotations

import re

_LABEL = re.compile(r"((.{1,256}) \[stored [0-9]+\])((?: \([0-9]+/[0-9]+\))?)")


def label_of(document_id: str, text_number: int) -> str:
    """Returns the name of the chunks of one text of a document in the cache.

    Every text has its own number. So the chunks of a replaced text, which a running request may still compute, are
    never taken for those of the new one; nor are the chunks of a document that a prompt contains inline under the same
    id.
    """
    return f"{document_id} [stored {text_number}]"


def shown_name(name: str) -> str:
    """Returns the name to display for a chunk or segment: the id alone, with the part of a split document."""
    found = _LABEL.fullmatch(name)
    return found[2] + found[3] if found else name


def label_in(name: str) -> tuple[str, str]:
    """Returns label and id from the name of a chunk or of a part of a document; two empty texts if it has none."""
    found = _LABEL.fullmatch(name)
    return (found[1], found[2]) if found else ("", "")
