from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.engine import AnswerDelta, RequestDelta
from kvmosaic.sampling import ReuseReport, SegmentReuse
from kvmosaic.server.generation.usage import UsageTotals


def delta(num_tokens, reuse=None):
    answer = AnswerDelta(0, "", tuple(range(num_tokens)), None, None, None)
    return RequestDelta("r", (answer,), reuse, False, None, 0)


def segment(kind, num_tokens, reused, name=None):
    return SegmentReuse(kind, num_tokens, "reused" if reused else "computed", name, reused_tokens=reused)


segments = st.lists(
    st.tuples(st.sampled_from(["system", "chunk", "question", "plain"]), st.integers(1, 50), st.integers(0, 50)).map(
        lambda drawn: segment(drawn[0], drawn[1], min(drawn[1], drawn[2]))
    ),
    min_size=1,
    max_size=6,
)


@given(st.lists(segments, min_size=1, max_size=3))
def test_details_add_up_and_what_is_cached_is_split_into_exact_prefixes_and_documents(prompts):
    reports = [ReuseReport(tuple(prompt)) for prompt in prompts]
    tally = UsageTotals([report.num_tokens for report in reports], frozenset())
    for index, report in enumerate(reports):
        tally.add(index, delta(2, report))
    usage = tally.usage()
    details = usage.prompt_tokens_details
    assert details.cached_tokens + details.recomputed_tokens == usage.prompt_tokens
    assert usage.prompt_tokens == sum(report.num_tokens for report in reports)
    exact = [one for prompt in prompts for one in prompt if one.kind in ("system", "plain")]
    assert details.cached_tokens - details.composed_tokens == sum(one.reused_tokens for one in exact)
    assert usage.completion_tokens == 2 * len(prompts)
    assert len(tally.report().segments) == sum(map(len, prompts))


def test_details_are_left_out_until_they_are_known():
    tally = UsageTotals([5, 6], frozenset())
    tally.add(0, delta(1, ReuseReport((segment("plain", 5, 0),))))
    assert tally.usage().model_dump(exclude_unset=True) == {
        "prompt_tokens": 11,
        "completion_tokens": 1,
        "total_tokens": 12,
    }


def test_parts_of_a_split_document_keep_its_id():
    tally = UsageTotals([9], frozenset({"a"}))
    names = ["a (1/2)", "a (2/2)", "a (b)", None]
    tally.add(0, delta(1, ReuseReport(tuple(segment("chunk", 2, 0, name) for name in names), 0.5, "composed")))
    report = tally.report()
    assert [document.id for document in report.documents] == ["a", "a", None, None]
    assert [document.name for document in report.documents] == names
    assert (report.time_to_first_token_ms, report.composition) == (500.0, "composed")
