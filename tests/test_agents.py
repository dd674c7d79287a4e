"""Histories of agents: what tools returned is computed once, wherever an edit of the history moves it."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from support.families import build
from support.tokenizers import CHATML, make_tokenizer

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, SamplingParams
from kvmosaic.model import LoadedModel
from kvmosaic.sampling import ReuseReport

PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)
SYSTEM = {"role": "system", "content": "You are an agent."}
ASKED = {"role": "user", "content": "Why?"}


@cache
def model() -> LoadedModel:
    tokenizer = make_tokenizer(CHATML)
    module = build("llama", torch.float64, vocab_size=len(tokenizer), max_position_embeddings=32_768)
    return LoadedModel.from_module(module, tokenizer)


def make(find_documents: str = "agents", **options: Any) -> LLM:
    settings = {"find_documents": find_documents, "chunk_cache_size": "32MiB", **options}
    config = ChunkCacheConfig(**settings)
    engine = EngineConfig(request_cache_size="32MiB", max_num_batched_tokens=1024)
    return LLM(model(), chunk_cache_config=config, engine_config=engine, self_check=False)


def result(number: int, seed: int = 0) -> str:
    """About 300 characters that differ from any other's."""
    words = torch.randint(0, 26, (60, 4), generator=torch.Generator().manual_seed(1000 * seed + number)).tolist()
    return " ".join("".join(chr(97 + letter) for letter in word) for word in words)


def turn(number: int, text: str | None = None) -> list[dict[str, Any]]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": f'{{"n": {number}}}'}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": text or result(number)},
    ]


def history(*turns: list[dict[str, Any]], question: str = "Why?") -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": "Go."}, *chain(*turns), {"role": "user", "content": question}]


def asked(llm: LLM, messages: list[dict[str, Any]], **options: Any) -> tuple[ReuseReport, list[dict[int, float]]]:
    (output,) = llm.chat(messages, PARAMS, **options)
    assert output.reuse is not None
    answers = [{token: each.logprob for token, each in place.items()} for place in output.outputs[0].logprobs or ()]
    return output.reuse, answers


def reused_share(report: ReuseReport) -> float:
    """Of the tokens of results."""
    results = [segment for segment in report.segments if segment.kind == "chunk"]
    return sum(segment.reused_tokens for segment in results) / sum(segment.num_tokens for segment in results)


def assert_same(one: list[dict[int, float]], other: list[dict[int, float]]) -> None:
    assert [list(place) for place in one] == [list(place) for place in other]
    for mine, theirs in zip(one, other, strict=True):
        assert all(abs(mine[token] - theirs[token]) <= 1e-9 for token in mine)


TURNS = [turn(number) for number in range(10)]
EDITED = {
    "dropped": history(*TURNS[1:]),
    "summarized": history([{"role": "assistant", "content": "A summary of what was read."}], *TURNS[1:]),
    "swapped": history(*TURNS[:2], TURNS[3], TURNS[2], *TURNS[4:]),
    "cleared": history(turn(0, "(cleared)"), turn(1, "(cleared)"), *TURNS[2:]),
}


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITED)
def test_results_are_reused_after_an_edit_as_if_computed_from_nothing(edit):
    with make() as llm, make() as fresh:
        asked(llm, history(*TURNS))
        report, answers = asked(llm, EDITED[edit])
        assert reused_share(report) == 1
        assert report.computed_tokens <= 0.15 * report.num_tokens
        assert_same(answers, asked(fresh, EDITED[edit])[1])


def test_a_text_that_was_dropped_changes_no_logit_of_what_is_left():
    rest = history(*TURNS[1:4])
    answers = []
    for secret in ("the password is swordfish " * 12, "there is no password here " * 12):
        with make() as llm:
            asked(llm, history(turn(0, secret), *TURNS[1:4]))
            answers.append(asked(llm, rest)[1])
    assert answers[0] == answers[1], "bit by bit"


def test_agents_with_other_questions_over_the_same_files_compute_each_file_once():
    files = [turn(number) for number in range(8)]
    with make() as llm:
        for agent in range(2):
            own = files[agent:] + files[:agent]
            report, _ = asked(llm, history(*own, question=f"Question {agent}?"))
            assert reused_share(report) == (1 if agent else 0)


@pytest.mark.slow
def test_twenty_agents_over_thirty_files_compute_each_file_once():
    files = [turn(number) for number in range(30)]
    with make() as llm:
        for agent in range(20):
            own = files[agent:] + files[:agent]
            report, _ = asked(llm, history(*own, question=f"Question {agent}?"))
            assert reused_share(report) == (1 if agent else 0)


def test_a_history_that_only_grows_computes_what_prefix_caching_computes():
    counts = []
    for how in ("agents", "none"):
        with make(how) as llm:
            reports = [asked(llm, history(*TURNS[:count]))[0] for count in range(1, 5)]
            counts.append(sum(report.computed_tokens for report in reports))
    assert counts[0] <= 1.03 * counts[1]


def test_an_edit_of_a_file_computes_one_part_of_it():
    text = "".join(f"def f{number}():\n    {result(number)[:200]}\n\n" for number in range(12))
    with make(max_section_tokens=512) as llm:
        asked(llm, history(turn(0, text)))
        report, _ = asked(llm, history(turn(0, text.replace(result(6)[95:105], "x = 'new' "))))
        parts = [segment.computed_tokens for segment in report.segments if segment.kind == "chunk"]
        assert sum(bool(tokens) for tokens in parts) == 1 < len(parts)


def test_a_result_whose_parts_are_alike_is_one_document():
    text = "".join(f"2026-11-28 10:00:{number:02} INFO request {number} done\n\n" for number in range(60))
    with make(max_section_tokens=512) as llm:
        for question, share in (("Why?", 0), ("How?", 1)):
            report, _ = asked(llm, history(turn(0, text), question=question))
            assert [segment.kind for segment in report.segments].count("chunk") == 1
            assert reused_share(report) == share


def test_long_blocks_of_a_user_are_reused_under_another_question():
    block = f"<file path='a.txt'>\n{' '.join(result(number) for number in range(4))}\n</file>"
    with make() as llm:
        for question, share in (("Why?", 0), ("How?", 1)):
            report, _ = asked(llm, [SYSTEM, {"role": "user", "content": f"{question}\n{block}\nAnswer."}])
            assert reused_share(report) == share


def test_an_edited_history_that_cost_results_is_told_and_one_that_grows_is_not():
    with make("auto") as llm:
        for count in (3, 5):
            assert asked(llm, history(*TURNS[:count]))[0].advice == ()
        report, _ = asked(llm, history(*TURNS[1:5]))
        assert "tokens of tool results were computed again: a history was edited before them" in report.advice[0]
        assert "find_documents='agents'" in report.advice[0]
        assert llm.engine.advisor.lost["edited_history"] >= 500


def test_another_version_of_a_file_is_text_that_saw_the_first_one_and_costs_no_other_result() -> None:
    """Read apart, the two may be mixed up; read in full, the whole history would be computed after every edit."""
    newer = turn(11, result(1).replace(result(1)[100:120], "changed"))
    llm = make()
    before, _ = asked(llm, history(*TURNS[:3], newer, TURNS[3]))
    assert [segment.kind for segment in before.segments].count("chunk") == 4
    after, _ = asked(llm, history(*TURNS[1:3], newer, TURNS[3]))
    assert reused_share(after) == 1 and after.composition == before.composition


def test_results_of_an_agent_that_calls_a_tool_outlive_newer_documents() -> None:
    """One whose answer was cut is not waited for."""
    llm = make(chunk_cache_size="1536KiB")
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    ends = SamplingParams(temperature=0, max_tokens=1, stop_token_ids=range(len(make_tokenizer(CHATML))))
    for number, params, finish in ((0, ends, "stop"), (1, PARAMS, "length")):
        (output,) = llm.chat(history(TURNS[number]), params, tools=tools)
        assert output.outputs[0].finish_reason == finish
    for seed in range(1, 4):
        llm.chat([ASKED], ends, documents=[result(number, seed) for number in range(3)])
    reports = [asked(llm, history(TURNS[number]), tools=tools)[0] for number in range(2)]
    assert [reused_share(report) for report in reports] == [1, 0]
