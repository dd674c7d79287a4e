"""Storms over documents that are edits of each other: shared blocks in every state, and all that can happen to them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engine.test_offloader_attacks import MEBIBYTE, STRATEGIES, Truth, storm, with_tiers
from support.engines import build_engine, fragment
from support.loaded import loaded_family
from support.tiers import TroubledTier

from kvmosaic.prompt import Prompt, SegmentKind

SYSTEMS = [None, [5, 6, 7], [8, 9, 10, 11, 12]]


def edits(chance: random.Random, count: int) -> list[list[int]]:
    """A document and edits of it, and of these: cut, extended, changed inside a block or at its edge."""
    documents = [[chance.randrange(3, 128) for _ in range(14)]]
    while len(documents) < count:
        before = chance.choice(documents)
        first = min(chance.choice([4, 8, 8, 12, len(before) - 1, len(before), chance.randrange(20)]), len(before))
        inserted = [chance.randrange(3, 128) for _ in range(chance.choice([0, 1, 4, 7]))]
        after = before[:first] + inserted + before[first + chance.choice([0, 0, 1, 4, 20]) :]
        if after and len(after) <= 24 and after not in documents:
            documents.append(after)
    return documents


def prompts_of_edits(seed: int, count: int) -> list[tuple[Prompt, str]]:
    """Prompts of several versions of one document; some see others, and some have an offset, a salt or a tenant."""
    chance = random.Random(seed)
    documents, found = edits(chance, 9), []
    for _ in range(count):
        chosen = [chance.choice(documents) for _ in range(chance.randint(1, 5))]
        system = chance.choice(SYSTEMS[:2] if chance.random() < 0.8 else SYSTEMS)
        prompt = Prompt.from_tokens(system, chosen, [chance.randrange(3, 128), 17, 18])
        strategy, offset, number = chance.choice(STRATEGIES), 6, 0
        segments = []
        for segment in prompt.segments:
            if segment.kind is SegmentKind.CHUNK:
                sees = (number - 1,) if number and chance.random() < 0.15 else ()
                place = chance.choice([offset, 40 * (1 + number)]) if strategy == "absolute" else None
                segment = replace(segment, name=f"d{number % 3}", sees=sees, position_offset=place)
                offset, number = (place or 0) + segment.num_tokens, number + 1
            segments.append(segment)
        salt, tenant = chance.choice(["", "", "s"]), chance.choice(["", "t"])
        found.append((replace(prompt, segments=tuple(segments), salt=salt, tenant=tenant), strategy))
    return found


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3n", "gpt_oss"])
@pytest.mark.parametrize("seed", range(2))
def test_no_storm_over_edits_makes_a_wrong_chunk_or_leaks_anything(family: str, seed: int) -> None:
    model, chance = loaded_family(family), random.Random(seed + 200)
    strategies = STRATEGIES if model.is_movable else ("shared", "absolute")
    asked = [(prompt, strategy) for prompt, strategy in prompts_of_edits(seed, 30) if strategy in strategies]
    truth = Truth(build_engine(model, blocks=(512, 1024)))
    for prompt, strategy in asked:
        truth.ask(prompt, strategy)
    host, disk = TroubledTier("host", is_persistent=False), TroubledTier("disk")
    for life in range(3):
        engine = build_engine(
            model,
            blocks=(36, chance.choice([12, 18, 26])),
            max_batched_tokens=chance.choice([8, 24, 64]),
            max_running=chance.choice([3, 8]),
            prefix_caching=chance.random() < 0.7,
            eviction=chance.choice(["lru", "gdsf", "priority", "lfu"]),
        )
        if life == 1:
            fragment(engine, seed)
        offloader = with_tiers(engine, host, disk, staged=chance.choice([1, 20_000, MEBIBYTE]))
        storm(engine, offloader, truth, asked, chance, (host, disk), is_fragmented=life == 1)
