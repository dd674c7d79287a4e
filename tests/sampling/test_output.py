import json

import pytest

from kvmosaic.sampling import CompletionOutput, RequestMetrics, RequestOutput, ReuseReport, SegmentReuse

REPORT = ReuseReport(
    (
        SegmentReuse("system", 20, "reused", reused_tokens=20, num_blocks=2, milliseconds=0.1),
        SegmentReuse(
            "chunk", 100, "moved", name="report", distance=-64, reused_tokens=100, num_blocks=7, milliseconds=0.25
        ),
        SegmentReuse(
            "chunk", 50, "computed", name="new", num_blocks=4, milliseconds=12.5, note="without system prompt"
        ),
        SegmentReuse("question", 30, "partly reused", reused_tokens=16, num_blocks=2, milliseconds=3.0),
    ),
    time_to_first_token=0.0421,
    composition="documents do not see each other",
)


def test_totals_are_sums_over_segments():
    assert REPORT.num_tokens == 200
    assert REPORT.reused_tokens == 136
    assert REPORT.moved_tokens == 100
    assert REPORT.computed_tokens == 64 == sum(segment.computed_tokens for segment in REPORT.segments)
    assert REPORT.reused_fraction == pytest.approx(0.68)
    assert ReuseReport().reused_fraction == 0


def test_a_report_reads_as_a_table():
    lines = str(REPORT).splitlines()
    assert [line.split() for line in lines[:4]] == [
        "system 20 tokens reused 0.10 ms".split(),
        "chunk 'report' 100 tokens moved by -64 0.25 ms".split(),
        "chunk 'new' 50 tokens computed 12.50 ms (without system prompt)".split(),
        "question 30 tokens partly reused (16 of 30) 3.00 ms".split(),
    ]
    assert lines[4] == (
        "200 tokens: 136 reused (68%; 100 of them moved), 64 computed, first token after 0.042 s; "
        "documents do not see each other"
    )
    assert len({line.index(" tokens") for line in lines[:4]}) == 1


def test_a_report_can_be_written_as_json():
    read = json.loads(json.dumps(REPORT.to_dict()))
    assert read["moved_tokens"] == 100
    assert read["segments"][1]["distance"] == -64
    assert read["segments"][3]["computed_tokens"] == 14


def test_outputs_have_the_field_names_of_vllm():
    completion = CompletionOutput(0, "text", (1, 2))
    metrics = RequestMetrics(10.0, 10.5, 11.0, 13.0)
    output = RequestOutput("7", "prompt", (1,), (completion,), True, REPORT, metrics)
    for name in ("request_id", "prompt", "prompt_token_ids", "outputs", "finished", "metrics", "num_cached_tokens"):
        assert hasattr(output, name)
    for name in ("index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason"):
        assert hasattr(completion, name)
    assert output.num_cached_tokens == 136
    assert (metrics.time_in_queue, metrics.time_to_first_token, metrics.total_time) == (0.5, 1.0, 3.0)
    assert RequestMetrics(10.0).time_to_first_token is None
