"""What the plugin counts, and the shelf of reports in the front end."""

import json

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.metrics import catalogue
from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.report import ChunkOutcome, ComposedReport, ReportShelf
from kvmosaic.vllm.report_counters import (
    FAMILIES,
    MAX_REASONS,
    ReportCounters,
    merged,
    summary,
)

SHAPE = Composition(system=6, chunks=(4, 8, 5, 2), repair=3)
OUTCOMES = (ChunkOutcome("computed"), ChunkOutcome("awaited"), ChunkOutcome("cached", "disk"), ChunkOutcome("cached"))
LAYOUT = SHAPE.layout(range(30))
REPORT = ComposedReport(LAYOUT, SHAPE.repair, OUTCOMES)


def totals(data: dict) -> dict[str, float]:
    return summary(data)


def test_a_composed_request_is_counted_by_chunks_and_by_tokens() -> None:
    tally = ReportCounters()
    tally.composed(REPORT)
    data = tally.take()
    assert data is not None
    assert totals(data) == {
        **{"composed_requests": 1, "chunk_lookups": 4, "chunk_hits": 3, "chunk_misses": 1, "chunk_waits": 1},
        **{"chunk_loads": 1, "chunk_loaded_tokens": 5, "repaired_tokens[computed]": 3 + 3 + 2},
        **{"chunk_tokens[computed]": 4 + 3 + 3 + 2, "chunk_tokens[moved]": 5 + 2},
    }
    assert json.loads(json.dumps(data)) == data


def test_chunks_of_a_prompt_that_was_composed_before_are_not_repaired_again() -> None:
    assert ComposedReport(LAYOUT, SHAPE.repair, OUTCOMES, prefix_tokens=18).repaired_tokens == 3 + 2


def test_what_is_taken_is_counted_once() -> None:
    tally = ReportCounters()
    assert tally.take() is None
    tally.moved(512, 0.25)
    taken = tally.take()
    assert taken is not None
    assert totals(taken) == {"moved_tokens": 512, "move_seconds": 0.25}
    assert tally.take() is None


def test_reasons_cannot_grow_without_end() -> None:
    tally = ReportCounters()
    for number in range(3 * MAX_REASONS):
        tally.bypassed(f"reason-{number}")
    data = tally.take()
    assert data is not None
    reasons = data["counts"]["kvmosaic:bypassed_requests"]
    assert len(reasons) == MAX_REASONS + 1
    assert sum(reasons.values()) == 3 * MAX_REASONS


payloads = st.lists(st.sampled_from(["composed", "bypassed", "moved", "chunk_prompts"]), max_size=6)


def filled(what: list[str]) -> dict:
    tally = ReportCounters()
    for name in what:
        {
            "composed": lambda: tally.composed(REPORT),
            "bypassed": lambda: tally.bypassed("windows"),
            "moved": lambda: tally.moved(64, 0.5),
            "chunk_prompts": lambda: tally.chunk_prompts(2, 1),
        }[name]()
    return tally.take() or {}


@given(payloads, payloads)
def test_merging_is_counting_both_and_changes_neither(first: list[str], second: list[str]) -> None:
    one, other = filled(first), filled(second)
    assert totals(merged(one, other)) == totals(filled(first + second))
    assert (one, other) == (filled(first), filled(second))


def test_a_gauge_has_its_later_value() -> None:
    tally = ReportCounters()
    tally.chunk_prompts(3, 3)
    first = tally.take() or {}
    tally.chunk_prompts(0, 0)
    assert totals(merged(first, tally.take() or {})) == {"chunk_prompts": 3, "chunk_prompts_running": 0}
    tally.chunk_prompts(0, 0)
    assert tally.take() is None, "a gauge that stays is not sent again"


def test_a_name_of_our_own_server_means_the_same_here() -> None:
    own = {family.name: family for family in catalogue()}
    shared = [family for family in FAMILIES if family.name in own]
    assert shared
    assert all(own[family.name] == family for family in shared)


def report(num_segments: int = 1) -> dict:
    return {"segments": [{}] * num_segments}


def test_a_report_is_found_by_the_id_that_the_front_end_knows_and_only_once() -> None:
    documents = ReportShelf()
    documents.put("chatcmpl-7-1a2b3c4d", report())
    assert documents.take("chatcmpl") is None
    assert documents.take("chatcmpl-7") == report()
    assert documents.take("chatcmpl-7") is None
    documents.put("chatcmpl-7-1a2b3c4d", report(1))
    documents.put("chatcmpl-7-1a2b3c4d", report(2))
    assert documents.take("chatcmpl-7-1a2b3c4d") == report(2)
    assert len(documents) == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 9)), max_size=60))
def test_the_shelf_keeps_its_limits(puts: list[tuple[int, int, int]]) -> None:
    now = 0.0
    documents = ReportShelf(max_reports=5, max_segments=20, max_seconds=30.0, clock=lambda: now)
    kept: dict[str, tuple[float, int]] = {}
    for name, num_segments, seconds in puts:
        now += seconds
        key = f"request-{name}"
        kept.pop(key, None)
        kept[key] = (now, num_segments)
        documents.put(key, report(num_segments))
        while len(kept) > 5 or sum(n for _, n in kept.values()) > 20 or next(iter(kept.values()))[0] < now - 30.0:
            del kept[next(iter(kept))]
        assert len(documents) == len(kept)
    for key, (_, num_segments) in kept.items():
        assert documents.take(key) == report(num_segments)
