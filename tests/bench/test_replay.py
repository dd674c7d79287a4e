"""`benchmarks/replay.py`: what a cache saves of recorded traffic, on an excerpt of RAGPulse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

EXCERPT = Path(__file__).parent / "traces" / "ragpulse"
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import replay  # noqa: E402  (a script)

sys.path.pop()  # whose modules have names of folders of tests

Shares = dict[tuple[str, str], tuple[float, float]]


@pytest.fixture(scope="module")
def shares() -> Shares:
    """By variant and cache: shares of documents and of prompts."""
    rows = replay.run(replay.read_trace(EXCERPT, 100), (0.1,))
    return {(row.variant, row.cache): (row.document_share, row.prompt_share) for row in rows}


def test_documents_that_see_the_stable_part_of_the_system_text_are_reused(shares: Shares) -> None:
    found = {name: share for (name, size), share in shares.items() if size == "unlimited"}
    assert found["prefix"][0] < 0.001 and found["system"][0] < 0.002
    assert found["first-block"][0] > 0.3 and found["first-block"][1] > found["prefix"][1] + 0.15
    assert found["auto"] == pytest.approx(found["first-block"], abs=0.005)
    assert found["none"][0] >= found["first-block"][0] >= found["companions"][0]


def test_no_policy_beats_the_one_that_knows_the_future(shares: Shares) -> None:
    lru, best = shares["first-block", "10%, lru"], shares["clairvoyant", "10%, clairvoyant"]
    assert 0.1 < lru[0] < best[0] < shares["first-block", "unlimited"][0]


@pytest.mark.parametrize("name", ["system", "first-block", "none"])
def test_the_cache_finds_what_a_dictionary_of_seen_documents_finds(name: str) -> None:
    trace = replay.read_trace(EXCERPT, 60)
    variant = next(each for each in replay.VARIANTS if each.name == name)

    def context(request: Any) -> tuple[int, ...]:
        ids = tuple(block.id for block in request.system)
        return {"system": ids, "first-block": ids[:1], "none": ()}[name]

    seen, reused = set(), 0
    for request in trace.requests:
        for block in request.documents:
            reused += block.num_tokens * ((context(request), block.id) in seen)
            seen.add((context(request), block.id))
    row = replay.simulate(trace, replay.PromptWriter(trace), variant)
    assert row.document_reused == reused
    assert row.prompt_tokens == sum(request.num_tokens for request in trace.requests)


def test_a_trace_without_documents_is_replayed_as_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    rows = [{"timestamp": at, "input_length": 600, "hash_ids": [46, 47]} for at in (2_000, 1_000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = replay.read_trace(path)
    assert [request.seconds for request in trace.requests] == [1.0, 2.0]
    (row,) = replay.run(trace)
    assert (row.prompt_tokens, row.prompt_reused) == (1_200, 599)
