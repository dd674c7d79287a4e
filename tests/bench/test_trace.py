"""`kvmosaic bench --trace`: what a replay saves, simulated and served, on an excerpt of RAGPulse.

The bounds for the whole trace are tested where its folder is named: KVMOSAIC_RAGPULSE=RAGPulse/data.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.server import RunningServer
from typer.testing import CliRunner

from kvmosaic.bench.progress import Watcher
from kvmosaic.bench.results import can_plot
from kvmosaic.bench.trace.command import TraceRun, replay_trace
from kvmosaic.bench.trace.engine_replay import save_tiny_model
from kvmosaic.bench.trace.prompts import PromptWriter
from kvmosaic.bench.trace.replay import FIRST_BLOCK, VARIANTS, Variant
from kvmosaic.bench.trace.report import TraceReport
from kvmosaic.bench.trace.server_replay import ServerReplay
from kvmosaic.bench.trace.simulation import SimulatedCache, clairvoyant, simulate
from kvmosaic.bench.trace.trace import Trace, TraceRequest, read_trace
from kvmosaic.cli import app
from kvmosaic.errors import InvalidTrace, ServerError
from kvmosaic.eviction import POLICIES
from kvmosaic.model import load_model

EXCERPT = Path(__file__).parent / "traces" / "ragpulse"
WHOLE = os.environ.get("KVMOSAIC_RAGPULSE")
POINTS = 2.0
"""How far a served replay may be from the simulation."""


class InterruptedAfter(Watcher):
    """Ctrl-C after so many answers."""

    def __init__(self, count: int) -> None:
        self.left = count

    def answered(self, what: str) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(EXCERPT)


@pytest.fixture(scope="module")
def simulated() -> TraceReport:
    return replay_trace(TraceRun(EXCERPT, cache_shares=(0.2,)), Watcher())


def shares(report: TraceReport, cache: str = "unlimited") -> dict[str, tuple[float, float]]:
    """By variant: shares of documents and of prompts."""
    return {row.variant: (row.document_share, row.prompt_share) for row in report.rows if row.cache == cache}


def test_documents_that_see_the_stable_part_of_the_system_text_are_reused(simulated: TraceReport) -> None:
    found = shares(simulated)
    assert found["prefix"][0] < 0.001 and 0.31 < found["prefix"][1] < 0.33
    assert found["system"][0] < 0.002 and 0.31 < found["system"][1] < 0.33
    assert found["first-block"][0] > 0.55 and found["first-block"][1] > 0.56
    assert found["auto"] == pytest.approx(found["first-block"], abs=0.005)
    assert found["none"][0] > 0.58 and found["none"][1] > 0.57


def test_a_small_cache_keeps_what_is_asked_again(simulated: TraceReport) -> None:
    lru = shares(simulated, "20%, lru")["first-block"]
    assert lru[0] > 0.34 and lru[1] > 0.46
    assert shares(simulated, "20%, clairvoyant")["clairvoyant"][0] > lru[0] + 0.1


@pytest.mark.parametrize("variant", [each for each in VARIANTS if each.name in ("system", "first-block", "none")])
def test_the_cache_finds_what_a_dictionary_of_seen_documents_finds(trace: Trace, variant: Variant) -> None:
    def context(request: TraceRequest) -> tuple[int, ...]:
        if variant.chunk_context == "none":
            return ()
        return tuple(block.id for block in request.system)[: 1 if variant.preamble == "first" else None]

    seen, reused = set(), 0
    for request in trace.requests:
        for block in request.documents:
            reused += block.num_tokens * ((context(request), block.id) in seen)
            seen.add((context(request), block.id))
    row = simulate(trace, PromptWriter(trace), variant, SimulatedCache(), Watcher())
    assert row.document_reused == reused
    assert row.document_tokens == sum(request.num_document_tokens for request in trace.requests)
    assert row.prompt_tokens == sum(request.num_tokens for request in trace.requests)


@pytest.mark.parametrize("eviction", POLICIES)
def test_no_policy_beats_the_one_that_knows_the_future(trace: Trace, eviction: str) -> None:
    cache = SimulatedCache(0.3, eviction)
    row = simulate(trace, PromptWriter(trace), FIRST_BLOCK, cache, Watcher())
    assert 0.3 < row.document_share < clairvoyant(trace, cache).document_share
    assert row.evictions and not row.was_bounded


def test_the_words_of_a_prompt_are_its_tokens(trace: Trace) -> None:
    writer = PromptWriter(trace.first(50), 16)
    words = list(writer.words())
    assert len(set(words)) == len(words) == writer.vocab_size
    for request in trace.requests[:50]:
        texts = writer.texts(request)
        tokens = [
            token for segment in writer.prompt(request, FIRST_BLOCK).segments for token in segment.token_ids or ()
        ]
        assert texts.joined.split() == [words[token] for token in tokens]


def test_a_replay_by_the_engine_agrees_with_the_simulation() -> None:
    report = replay_trace(TraceRun(EXCERPT, requests=120, model="random-tiny"), Watcher())
    assert [row.served.variant for row in report.served] == [variant.name for variant in VARIANTS]
    assert all(abs(points) < POINTS for row in report.served for points in row.points)
    served = {row.served.variant: row.served for row in report.served}
    assert served["auto"].document_share > 0.4 and served["auto"].prompt_share > 0.48
    assert report.options["served_requests"] == 120


def test_a_replay_by_a_server_agrees_with_the_simulation(trace: Trace, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", PromptWriter(trace.first(60), 16))
    with RunningServer(loaded=load_model(folder, dtype="float32"), block_size=4) as server:
        report = replay_trace(TraceRun(EXCERPT, requests=60, url=server.url), Watcher())
    assert len(report.served) == len(VARIANTS)
    for row in report.served:
        documents, prompts = row.points
        assert abs(prompts) < POINTS, row.served.variant
        assert abs(documents) < POINTS or row.served.variant == "prefix"  # a plain prompt has no documents
    assert next(row.served for row in report.served if row.served.variant == "auto").document_share > 0.28


def test_a_trace_without_documents_is_replayed_as_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    rows = ([1, 2], [1, 2, 3], [4], [8, 9, 10], [1, 2, 3, 5], [6, 7], [1, 2])
    lines = ({"timestamp": i, "input_length": 512 * len(row), "hash_ids": row} for i, row in enumerate(rows))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = replay_trace(TraceRun(path, cache_shares=(0.5,), model="random-tiny"), Watcher())
    unlimited, limited = report.rows
    assert unlimited.prompt_tokens == 512 * 17
    assert unlimited.prompt_reused == 512 * (2 + 3 + 2) - 1  # the last token of a prompt is always computed
    assert limited.evictions and limited.prompt_reused < unlimited.prompt_reused
    assert "only prefix caching" in report.notes[0]
    assert len(report.served) == 1 and abs(report.served[0].points[1]) < 10


def test_an_interrupt_keeps_what_was_measured() -> None:
    report = replay_trace(TraceRun(EXCERPT), InterruptedAfter(500))
    assert [(row.variant, row.num_requests, row.is_complete) for row in report.rows] == [
        ("prefix", 400, True),
        ("system", 100, False),
    ]
    assert report.notes == ["Interrupted: what came later was not measured."]
    assert "(first 100)" in report.to_markdown()


def test_an_interrupt_while_a_model_answers_keeps_the_simulation() -> None:
    report = replay_trace(
        TraceRun(EXCERPT, requests=20, model="random-tiny"), InterruptedAfter(len(VARIANTS) * 20 + 25)
    )
    assert len(report.rows) == len(VARIANTS)
    assert [(row.served.variant, row.served.num_requests) for row in report.served] == [("prefix", 20), ("system", 5)]


def test_a_server_that_fails_later_costs_only_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerReplay, "check", lambda self: None)
    report = replay_trace(TraceRun(EXCERPT, requests=10, url="http://127.0.0.1:9"), Watcher())
    assert len(report.rows) == len(VARIANTS) and not report.served
    assert "The server failed" in report.notes[0] and "nothing listens" in report.notes[0]


def test_an_absent_server_is_noticed_before_the_simulation() -> None:
    with pytest.raises(ServerError, match="nothing listens at"):
        replay_trace(TraceRun(EXCERPT, url="http://127.0.0.1:9"), InterruptedAfter(1))


def test_a_document_that_fits_no_cache_of_the_share_is_refused() -> None:
    with pytest.raises(InvalidTrace, match="raise --cache-share"):
        replay_trace(TraceRun(EXCERPT, cache_shares=(0.001,)), Watcher())


def test_the_command_prints_and_writes_its_figures(tmp_path: Path) -> None:
    arguments = ["bench", "--trace", str(EXCERPT), "--requests", "50", "--cache-share", "0.4", "--eviction", "lfu"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "it, up to the first date" in result.output and "40%, lfu" in result.output
    content = json.loads((tmp_path / "trace-ragpulse.json").read_text())
    assert content["trace"]["requests"] == 50 and len(content["rows"]) == len(VARIANTS) + 2
    assert content["rows"][0]["curve"][-1][0] == 50
    command = "kvmosaic bench --trace ragpulse --requests 50 --cache-share 0.4 --eviction lfu"
    assert content["options"]["command"] == command
    assert str(EXCERPT.parent) not in (tmp_path / "trace-ragpulse.json").read_text()
    assert command in (tmp_path / "trace-ragpulse.md").read_text()
    assert len(list(tmp_path.glob("*.png"))) == int(can_plot())
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(as_json.stdout)["rows"][0]["prompt_share"] == content["rows"][0]["prompt_share"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "no/such/trace"), "there is no file 'trace'"),
        (("--requests", "5"), "--requests needs a trace; name one with --trace"),
        (("--cache-share", "0.2"), "--cache-share needs a trace"),
        (("--url", "http://127.0.0.1:9"), "--url needs a trace"),
        (("--trace", str(EXCERPT), "--quick"), "--quick does not go with --trace"),
        (("--trace", str(EXCERPT), "--documents", "4"), "--documents does not go with --trace"),
        (("--trace", str(EXCERPT), "--eviction", "fifo"), "fifo"),
        (("reader", "--trace", str(EXCERPT), "--url", "http://127.0.0.1:9"), "leave MODEL or --url out"),
        (("--trace", str(EXCERPT), "--requests", "2", "--url", "nowhere"), "--url nowhere is no address"),
        (("no/model", "--trace", str(EXCERPT), "--requests", "2"), "there is no model 'no/model'"),
    ],
)
def test_wrong_arguments_are_one_message(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.skipif(not WHOLE, reason="KVMOSAIC_RAGPULSE does not name the folder of RAGPulse's data")
def test_the_whole_trace_is_reused_as_it_should_be() -> None:
    assert WHOLE is not None
    report = replay_trace(TraceRun(Path(WHOLE), cache_shares=(0.2,)), Watcher())
    found: dict[str, Any] = shares(report)
    assert found["prefix"][0] < 0.001 and found["prefix"][1] == pytest.approx(0.315, abs=0.005)
    assert found["system"][0] < 0.005 and found["system"][1] == pytest.approx(0.317, abs=0.005)
    for variant in ("first-block", "auto"):
        assert found[variant][0] >= 0.85 and found[variant][1] >= 0.65
    assert found["none"][0] >= 0.90 and found["none"][1] >= 0.70
    assert shares(report, "20%, lru")["first-block"][0] >= 0.60
