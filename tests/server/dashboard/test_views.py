from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.sampling import ReuseReport, SegmentReuse
from kvmosaic.sampling.reuse import RepairUse
from kvmosaic.server.dashboard.views import MAX_SEGMENTS, encode_runs, record_view
from kvmosaic.server.metrics.request_log import RequestRecord


def record(segments: tuple[SegmentReuse, ...], repair: RepairUse | None = None) -> RequestRecord:
    return RequestRecord(
        request_id="one",
        route="/v1/chat/completions",
        tenant="default",
        time=1.0,
        num_prompt_tokens=7,
        num_answer_tokens=1,
        finish_reasons=("stop",),
        status="complete",
        reuse=ReuseReport(segments, 0.25, repair=repair),
        metrics=None,
        inter_token_seconds=(),
        estimated_uncached_ttft=0.5,
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=60))
def test_runs_are_the_states_again(parts: list[tuple[int, int]]) -> None:
    states = b"".join(bytes([state]) * count for state, count in parts)
    runs = encode_runs(states)
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    assert b"".join(bytes([state]) * count for state, count in pairs) == states
    assert all(one[0] != other[0] for one, other in pairwise(pairs))


@given(st.integers(1, 3 * MAX_SEGMENTS))
def test_no_token_is_lost_when_many_segments_are_summed_up(count: int) -> None:
    segments = tuple(
        SegmentReuse(
            "chunk", 3 + index % 5, "reused" if index % 2 else "computed", reused_tokens=(3 + index % 5) * (index % 2)
        )
        for index in range(count)
    )
    view = record_view(1, record(segments))
    assert len(view["segments"]) == min(count, MAX_SEGMENTS)
    assert sum(segment["num_tokens"] for segment in view["segments"]) == view["num_tokens"]
    assert sum(segment["reused_tokens"] for segment in view["segments"]) == view["reused_tokens"]


def test_stored_documents_go_by_their_ids() -> None:
    segment = SegmentReuse("chunk", 4, "computed", name="fenbury [stored 12]")
    assert record_view(1, record((segment,)))["segments"][0]["name"] == "fenbury"


def test_segments_say_why_they_were_missed() -> None:
    segments = (SegmentReuse("chunk", 4, "computed", miss="evicted"), SegmentReuse("question", 3, "computed"))
    assert [each["miss"] for each in record_view(1, record(segments))["segments"]] == ["evicted", None]


def test_older_records_come_without_segments() -> None:
    view = record_view(5, record((SegmentReuse("chunk", 4, "computed"),)), with_segments=False)
    assert view["segments"] == []
    assert (view["number"], view["num_tokens"], view["ttft"], view["uncached_ttft"]) == (5, 4, 0.25, 0.5)


def test_what_was_repaired_is_told_with_the_request() -> None:
    view = record_view(1, record((), RepairUse("first(16)", 200, 32, 32, 0.17, 2.5)))
    assert view["repair"] == {
        "policy": "first(16)",
        "repaired_tokens": 32,
        "document_tokens": 200,
        "milliseconds": 2.5,
    }
    assert record_view(1, record(()))["repair"] is None
