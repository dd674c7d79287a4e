"""Format of API keys, wherever they are configured."""

from __future__ import annotations

import re

MIN_KEY_CHARACTERS = 8
MAX_KEY_CHARACTERS = 1_024
KEY_RULE = (
    f"must be {MIN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} printable ASCII characters without spaces, "
    "since it travels in a header"
)


def is_key_text(key: object) -> bool:
    """Whether a value matches `KEY_RULE`."""
    if not isinstance(key, str) or not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS:
        return False
    return re.fullmatch(r"[!-~]+", key) is not None
