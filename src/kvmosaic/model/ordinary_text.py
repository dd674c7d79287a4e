"""Tokens of an ordinary text, for self-checks: random ones are ill-conditioned on real weights."""

from __future__ import annotations

import random
from importlib.resources import files
from typing import Any


def ordinary_tokens(tokenizer: Any, vocab_size: int, count: int) -> list[int]:
    """`count` tokens of ordinary text; random ones without a tokenizer, or if it gives too few."""
    text = files(__package__).joinpath("ordinary_text.txt").read_text(encoding="utf-8")
    token_ids: list[int] = [] if tokenizer is None else list(tokenizer.encode(text, add_special_tokens=False))
    token_ids = [token for token in token_ids if token < vocab_size]
    if len(set(token_ids)) < 20:
        return random.Random(0).choices(range(vocab_size), k=count)  # noqa: S311 (no secret)
    return [token_ids[number % len(token_ids)] for number in range(count)]
