"""Companions: texts that documents see when they are computed, and that no prompt contains.

A document that is computed right after the system text is the first one, for the model. In a prompt there are others
before it, and models bind what they read to *which one it is in the order*: four first ones are mixed up, the more the
more alike they are (Feng and Steinhardt, arXiv 2310.17191). So document k of a prompt is computed after k other texts,
best documents of its own kind (`benchmarks/companions.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvmosaic.errors import InvalidConfig

BUNDLED, STORED = "prose", "stored"
NUM_COMPANIONS = 3
"""How many of them documents see, at most: more helped no further."""
MAX_COMPANIONS = 24
"""To choose from: those that are like the documents of a prompt."""
MAX_STORED_CHARACTERS = 4_000
"""Of a tenant's stored documents: the first short ones, so that copies stay as they are whatever it stores later."""
MAX_COMPANION_CHARACTERS = 20_000


def read_companions(given: str | Sequence[str]) -> tuple[str, ...]:
    """The texts of a setting or a request.

    Args:
        given: texts; or the path of a file of texts with empty lines between them; or "prose", the bundled paragraph;
            or "stored", the paragraph where a tenant has stored nothing.

    Returns:
        The texts; none for the bundled paragraph, whose language is that of the documents.

    Raises:
        InvalidConfig: no text, too many or too long ones, or a file that cannot be read.
    """
    if given in (BUNDLED, STORED):
        return ()
    texts = _read(Path(given)) if isinstance(given, str) else given
    limit = MAX_COMPANION_CHARACTERS
    if not isinstance(texts, tuple | list) or not 1 <= len(texts) <= MAX_COMPANIONS:
        count = len(texts) if isinstance(texts, tuple | list) else repr(texts)[:80]
        raise InvalidConfig(f"companions are 1 to {MAX_COMPANIONS} texts, got {count}; three of a kind are enough")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text.strip()) <= limit:
            raise InvalidConfig(f"a companion is a text of 1 to {limit} characters, got {text!r:.80}")
    return tuple(texts)


def _read(path: Path) -> list[str]:
    try:
        if path.stat().st_size > 8 * MAX_COMPANIONS * MAX_COMPANION_CHARACTERS:
            raise InvalidConfig(f"{str(path)!r:.200} is too large for companions; name a file of a few short texts")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidConfig(
            f"companions are {BUNDLED!r}, {STORED!r} or a file of texts with empty lines between them; "
            f"{str(path)!r:.200} cannot be read: {why}"
        ) from None
    return [part.strip() for part in text.split("\n\n") if part.strip()]
