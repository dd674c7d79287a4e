"""Error messages for HTTP clients: fixes phrased without Python or the command line."""

from __future__ import annotations

import re

_SETTINGS = (
    (
        re.compile(r"(raise max_chunk_tokens, shorten the document,|shorten it) or set long_chunks='split'"),
        "send shorter documents, or ask the operator of the server for --long-chunks split",
    ),
    (re.compile(r"raise max_prompt_chunks \((\d+)\) or send fewer"), r"at most \1 are allowed; send fewer"),
    (re.compile(r"raise max_prompt_chunks or send fewer"), "send fewer"),
    (re.compile(r"\bposition_strategy='(\w+)'"), r'"position_strategy": "\1"'),
)
"""Fixes in our errors that refer to Python, and their equivalents for HTTP clients."""
_FIGURES_OF_OTHERS = (
    (re.compile(r", of which \d+ are pinned by others\b"), ", of which others have pinned too many"),
    (re.compile(r": of (\d+) \d+ are free(?: and \d+ may be evicted)?"), r", which has \1"),
    (
        re.compile(r", \d+ are cached and max_chunks is (\d+); \d+ may be evicted"),
        r", max_chunks is \1, and too few may be evicted",
    ),
)
"""Numbers in our errors that reveal what other clients hold, and their replacements."""


def for_clients(message: str) -> str:
    """An error message with fixes available to a client, and without figures of other clients."""
    for known, instead in (*_SETTINGS, *_FIGURES_OF_OTHERS):
        message = known.sub(instead, message)
    return message
