"""Texts without end in the engine: memory, work per step, giving way, several answers, and what is refused."""

from __future__ import annotations

import pytest
import torch
from support.endless import streaming_logits
from support.engines import RecordingRunner, answer, build_engine, token_ids
from support.families import build
from support.loaded import loaded_family, random_prompt

from kvmosaic.engine import Engine, Sequence
from kvmosaic.errors import InvalidSampling, NotMovable, RequestTooLarge
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams


def endless(sinks: int = 3, window: int = 16, max_tokens: int | None = 60, **more: object) -> SamplingParams:
    fields = {"temperature": 0, "ignore_eos": True, "sink_tokens": sinks, "window_tokens": window, **more}
    return SamplingParams(max_tokens=max_tokens, **fields)


def plain(count: int, seed: int = 1) -> Prompt:
    return Prompt.plain(torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


class CountingRunner(RecordingRunner):
    """Notes the runs, the keys and the farthest position of every step."""

    def run(self, spans):  # type: ignore[no-untyped-def]
        self.work, self.steps = getattr(self, "work", []), [*getattr(self, "steps", [])[-50:], spans]
        reads = [read for span in spans for read in span.reads]
        farthest = max(span.position + len(span.token_ids) for span in spans)
        self.work.append((len(reads), sum(read.num_tokens for read in reads), farthest))
        return super().run(spans)


def running(engine: Engine) -> Sequence:
    (sequence,) = engine.scheduler.running
    return sequence


def test_memory_and_work_stay_the_same_for_thousands_of_tokens() -> None:
    sinks, window = 3, 16
    model = LoadedModel.from_module(build("llama", torch.float32, num_hidden_layers=1))
    engine = build_engine(model, blocks=(16, 2), runner=CountingRunner)
    engine.add_request(plain(9), endless(sinks, window, 1_500))
    held: list[int] = []
    while engine.has_unfinished_requests:
        engine.step()
        engine.runner.logits.clear()
        if engine.scheduler.running:
            allocated = running(engine).allocation.last
            held.append(len(allocated.table.block_ids))
            assert len(allocated.tokens) <= 4 * (sinks + window) and len(allocated.entries) <= 5
        assert engine.kv_cache.request_pool.num_used <= 12
    engine.check_invariants()
    assert len(held) > 1_400
    # sinks, and a window that lies in at most 5 blocks of 4
    assert max(held[100:]) <= 6 and max(held) <= 6
    runs, keys, positions = zip(*engine.runner.work, strict=True)
    assert max(keys[50:]) == sinks + window == max(keys)
    assert max(runs[100:]) <= 8
    assert max(positions) <= sinks + window


def test_a_long_prompt_takes_no_more_blocks_than_its_answer() -> None:
    model = loaded_family("llama", torch.float32)
    engine = build_engine(model, blocks=(16, 2), max_batched_tokens=64, runner=CountingRunner)
    request, logits = answer(engine, plain(300), endless(3, 16, 5))
    assert request.output().outputs[0].finish_reason == "length"
    # what is more than two windows back cannot matter in two layers, and is not computed
    computed = sum(len(span.token_ids) for step in engine.runner.steps for span in step)
    assert len(logits) == 5 and computed == 3 + (16 + 15) + 4


def test_what_a_long_prompt_left_out_makes_no_difference() -> None:
    engine = build_engine(loaded_family("llama"), blocks=(40, 2), max_batched_tokens=16)
    prompt = plain(70)
    request, logits = answer(engine, prompt, endless(3, 6, 8))
    written = [*request.token_ids, *token_ids(request)[:-1]]
    expected = streaming_logits(loaded_family("llama"), written, 3, 6)[-8:]
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)


def test_an_answer_that_gave_way_goes_on_with_the_same_tokens() -> None:
    model = loaded_family("llama")
    alone = [token_ids(answer(build_engine(model), plain(5, seed), endless(3, 6, 25))[0]) for seed in (1, 2, 3)]
    engine = build_engine(model, blocks=(8, 2))
    requests = [engine.add_request(plain(5, seed), endless(3, 6, 25)) for seed in (1, 2, 3)]
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
    assert engine.scheduler.num_preemptions > 0
    assert [token_ids(request) for request in requests] == alone


def test_several_answers_roll_on_by_themselves() -> None:
    engine = build_engine(loaded_family("llama"), blocks=(80, 40))
    params = endless(2, 7, 30, n=3, temperature=1.0, seed=5, logprobs=2)
    request, _ = answer(engine, random_prompt(3), params)
    outputs = request.output().outputs
    assert len({output.token_ids for output in outputs}) == 3
    for index, output in enumerate(outputs):
        one = endless(2, 7, 30, temperature=1.0, seed=5 + index, logprobs=2)
        single, _ = answer(build_engine(loaded_family("llama")), random_prompt(3), one)
        assert single.output().outputs[0].token_ids == output.token_ids
        assert output.logprobs is not None and len(output.logprobs) == 30


def test_the_first_tokens_are_shared_with_ordinary_prompts_and_later_ones_with_nobody() -> None:
    engine = build_engine(loaded_family("llama"), blocks=(100, 2))
    prompt = plain(30)
    ordinary = SamplingParams(temperature=0, max_tokens=2)
    answer(engine, prompt, ordinary)
    rolling, _ = answer(engine, prompt, endless(3, 13, 2))
    assert rolling.reuse.segments[0].reused_tokens >= 12
    again, logits = answer(engine, Prompt.plain([*rolling.token_ids, *token_ids(rolling)]), endless(3, 13, 2))
    written = [*again.token_ids, *token_ids(again)[:-1]]
    torch.testing.assert_close(
        logits, streaming_logits(loaded_family("llama"), written, 3, 13)[-2:], atol=1e-10, rtol=0
    )
    longer = Prompt.plain([*rolling.token_ids, *token_ids(rolling)])
    _, fresh_logits = answer(build_engine(loaded_family("llama")), longer, SamplingParams(temperature=0, max_tokens=2))
    _, found_logits = answer(engine, longer, SamplingParams(temperature=0, max_tokens=2))
    torch.testing.assert_close(found_logits, fresh_logits, atol=1e-10, rtol=0)


def test_an_endless_answer_ends_when_it_is_aborted_and_gives_everything_back() -> None:
    engine = build_engine(loaded_family("llama"), blocks=(20, 2), prefix_caching=False)
    request = engine.add_request(plain(5), endless(3, 6, None))
    for _ in range(60):
        engine.step()
    assert not request.is_finished and request.answers[0].num_tokens >= 59
    engine.abort(request.request_id)
    engine.check_invariants()
    assert engine.kv_cache.request_pool.num_used == 0


def test_the_report_says_what_tokens_see() -> None:
    request, _ = answer(build_engine(loaded_family("llama")), random_prompt(1), endless(3, 6, 4))
    assert request.reuse.composition.endswith("the first 3 and the newest 6 tokens")


def test_the_report_says_how_many_tokens_were_not_computed() -> None:
    engine = build_engine(loaded_family("llama"))
    request, _ = answer(engine, plain(60), endless(3, 6, 4))  # 60, without 3 sinks and the 6 + 5 that two layers reach
    assert request.reuse.composition.endswith("; 46 of those between can change nothing and were not computed")


def test_a_model_whose_keys_stay_where_they_are_refuses() -> None:
    engine = build_engine(loaded_family("gpt2"))
    with pytest.raises(NotMovable, match=r"window_tokens=6 moves what stays visible .*learned positions"):
        engine.add_request(plain(5), endless(3, 6))
    with pytest.raises(NotMovable, match="attends in parts of 8 tokens"):
        build_engine(loaded_family("llama4")).add_request(plain(5), endless(3, 6))


def test_a_window_beyond_the_positions_of_the_model_is_refused() -> None:
    engine = build_engine(loaded_family("llama"), engine_options={"max_model_len": 40})
    with pytest.raises(
        InvalidSampling, match="sink_tokens=4 and window_tokens=37 need 41 positions and the model has 40"
    ):
        engine.add_request(plain(5), endless(4, 37))
    before = "after 17 positions of system prompt and documents, .* the model has 23"
    with pytest.raises(InvalidSampling, match=before):
        engine.add_request(random_prompt(1), endless(4, 20))
    engine.add_request(random_prompt(1, question=90), endless(4, 19))


def test_a_window_that_memory_cannot_hold_is_refused() -> None:
    engine = build_engine(loaded_family("llama"), blocks=(10, 2))
    with pytest.raises(RequestTooLarge, match="take up to 27 blocks of 4 tokens and the pool 'request' has 10"):
        engine.add_request(plain(5), endless(3, 38))
