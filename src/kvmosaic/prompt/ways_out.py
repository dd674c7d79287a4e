"""Ways out of an error, for somebody who sends requests and sees neither Python nor a command line."""

from __future__ import annotations

import re

_SETTINGS = (
    (
        re.compile(r"(raise max_chunk_tokens, shorten the document,|shorten it) or set long_chunks='split'"),
        "send shorter documents, or ask whoever runs the server for --long-chunks split",
    ),
    (re.compile(r"raise max_prompt_chunks \((\d+)\) or send fewer"), r"at most \1 are allowed; send fewer"),
    (re.compile(r"raise max_prompt_chunks or send fewer"), "send fewer"),
    (re.compile(r"\bposition_strategy='(\w+)'"), r'"position_strategy": "\1"'),
)
"""Ways out that our errors name in Python's words, and what somebody who sends requests can do instead."""
_FIGURES_OF_OTHERS = (
    (re.compile(r", of which \d+ are pinned by others\b"), ", of which others have pinned too many"),
    (re.compile(r": of (\d+) \d+ are free(?: and \d+ may be evicted)?"), r", which has \1"),
    (
        re.compile(r", \d+ are cached and max_chunks is (\d+); \d+ may be evicted"),
        r", max_chunks is \1, and too few may be evicted",
    ),
)
"""Numbers in our errors that tell what other clients hold, and what is said instead."""


def for_clients(message: str) -> str:
    """The message of one of our errors, with ways out that are open to a client, and without figures of others."""
    for known, instead in (*_SETTINGS, *_FIGURES_OF_OTHERS):
        message = known.sub(instead, message)
    return message
