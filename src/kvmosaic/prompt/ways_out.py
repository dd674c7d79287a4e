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


def for_clients(message: str) -> str:
    """The message of one of our errors, with ways out that are open to a client."""
    for known, instead in _SETTINGS:
        message = known.sub(instead, message)
    return message
