"""Answers of the bundled reader that must have a form."""

import json
from dataclasses import replace

import jsonschema
import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.errors import InvalidSampling
from kvmosaic.sampling import SamplingState, StructuredOutputs, sample

QUESTION = Prompt.from_text(
    "Answer. ## Fenbury was founded in 1642 by König Ärn. It lies on the river Quinan. ## When was it founded?"
)
TOWN = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 12}, "year": {"type": "integer", "maximum": 9999}},
    "required": ["town", "year"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm():
    with LLM(self_check=False) as opened:
        yield opened


def schemas():
    leaves = st.sampled_from(
        [
            {"type": "string", "maxLength": 6},
            {"type": "integer", "minimum": -5, "maximum": 3000},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["red", 7, None, "ä☃"]},
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"anyOf": [{"type": "boolean"}, {"const": "x\n\"y"}]},
        ]
    )  # fmt: skip

    def larger(parts):
        lists = st.builds(
            lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": least + 1},
            parts,
            st.integers(0, 2),
        )
        names = st.dictionaries(st.sampled_from(["a", "town name", "ä", 'q"']), parts, max_size=3)
        objects = st.builds(
            lambda properties, count: {
                "type": "object",
                "properties": properties,
                "required": list(properties)[:count],
                "additionalProperties": False,
            },
            names,
            st.integers(0, 3),
        )
        return lists | objects

    return st.recursive(leaves, larger, max_leaves=4)


@settings(max_examples=12)
@given(schema=schemas(), temperature=st.sampled_from([0, 1]), seed=st.integers(0, 1000))
def test_an_answer_that_ended_is_json_of_its_schema(llm, schema, temperature, seed):
    form = StructuredOutputs(json=schema)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=60, structured_outputs=form)
    (answer,) = llm.generate(QUESTION, params)[0].outputs
    if answer.finish_reason == "length":
        assert len(answer.token_ids) == 60
    else:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), schema)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "pattern", ["(19|16)[0-9]{2}", "Fenbury|Quinan", "K(ö|o)nig Ärn", "☃中[文字]", '[^"]{5}', "(ab){1,3}c?"]
)
def test_answers_match_their_whole_pattern(llm, pattern, temperature):
    params = SamplingParams(temperature=temperature, seed=3, structured_outputs=StructuredOutputs(regex=pattern), n=2)
    for answer in llm.generate(QUESTION, params)[0].outputs:
        assert answer.finish_reason == "stop"
        assert answer.stop_reason is None
        assert regex.fullmatch(pattern, answer.text)


def test_answers_are_one_of_the_choices(llm):
    choice = ("yes", "yes indeed", "no\n", 'say "no"', "中")
    params = SamplingParams(n=8, seed=1, structured_outputs=StructuredOutputs(choice=choice))
    answers = llm.generate(QUESTION, params)[0].outputs
    assert {answer.text for answer in answers} <= set(choice)
    assert {answer.finish_reason for answer in answers} == {"stop"}


@pytest.mark.parametrize("extra", [{"ignore_eos": True}, {"min_tokens": 50}, {"skip_special_tokens": False}])
def test_a_complete_form_ends_the_answer_whatever_else_was_asked(llm, extra):
    form = StructuredOutputs(choice=["no", "not"])
    (answer,) = llm.generate(QUESTION, SamplingParams(structured_outputs=form, max_tokens=60, **extra))[0].outputs
    assert answer.finish_reason == "stop"
    assert answer.text in ("no", "not")


def test_a_form_that_can_go_on_does_so_while_the_end_is_ignored(llm):
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="[a-z ]*"), max_tokens=30, ignore_eos=True)
    (answer,) = llm.generate(QUESTION, params)[0].outputs
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 30)
    params = replace(params, ignore_eos=False, min_tokens=12, max_tokens=200, seed=5)
    (answer,) = llm.generate(QUESTION, params)[0].outputs
    assert len(answer.token_ids) > 12


def test_a_cut_form_ends_by_length_and_one_that_just_fits_by_stop(llm):
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputs(json=TOWN))
    (whole,) = llm.generate(QUESTION, params)[0].outputs
    assert whole.finish_reason == "stop"
    for limit, reason in ((len(whole.token_ids), "stop"), (len(whole.token_ids) - 1, "length")):
        (answer,) = llm.generate(QUESTION, replace(params, max_tokens=limit))[0].outputs
        assert answer.finish_reason == reason
        assert answer.token_ids == whole.token_ids[:limit]


def test_a_stop_text_cuts_a_form(llm):
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputs(json=TOWN), stop=['"year"'])
    (answer,) = llm.generate(QUESTION, params)[0].outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", '"year"')
    assert answer.text.startswith('{"town":"')


def test_streamed_text_is_the_text_of_the_whole(llm):
    params = SamplingParams(temperature=1, seed=7, structured_outputs=StructuredOutputs(json=TOWN), logprobs=1)
    llm.generate(QUESTION, params)  # a prompt that is cached is computed in other parts, and rounds otherwise
    (whole,) = llm.generate(QUESTION, params)[0].outputs
    seen = [output.outputs[0].text for output in llm.stream(QUESTION, params)]
    assert seen[-1] == whole.text
    assert all(whole.text.startswith(text) for text in seen)
    assert len(whole.logprobs) == len(whole.token_ids)


def test_answers_in_a_form_survive_preemption_and_company(llm):
    form = StructuredOutputs(json=TOWN)
    params = [
        SamplingParams(seed=seed, n=2, structured_outputs=form)
        if seed % 2
        else SamplingParams(seed=seed, max_tokens=40, ignore_eos=True)
        for seed in range(6)
    ]
    tight = EngineConfig(request_cache_size=52 * llm.model.bytes_per_token(), max_num_batched_tokens=256)
    config = ChunkCacheConfig(block_size=4)
    with LLM(llm.model, engine_config=tight, chunk_cache_config=config, self_check=False) as small:
        outputs = small.generate([QUESTION] * len(params), params)
        assert small.engine.scheduler.num_preemptions > 0
    for output in outputs[1::2]:
        for answer in output.outputs:
            if answer.finish_reason == "stop":
                jsonschema.validate(json.loads(answer.text), TOWN)
    assert any(answer.finish_reason == "stop" for output in outputs[1::2] for answer in output.outputs)


def test_a_form_that_cannot_be_used_is_refused_before_anything_runs(llm):
    with pytest.raises(InvalidSampling, match="regex cannot be used"):
        llm.generate(QUESTION, SamplingParams(structured_outputs=StructuredOutputs(regex="(")))
    assert not llm.engine.has_unfinished_requests


def test_an_answer_that_cannot_go_on_fails_alone(llm):
    request = llm.engine.add_request(
        llm.encoder.encode(QUESTION), SamplingParams(n=2, structured_outputs=StructuredOutputs(regex="[a-z]+"))
    )
    other = llm.engine.add_request(llm.encoder.encode(QUESTION), SamplingParams(temperature=0, max_tokens=3))
    llm.engine._requests.sequences_of(request)[0].sampling.matcher.fail("made to fail")
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        llm.engine.check_invariants()
    assert isinstance(request.error, InvalidSampling)
    assert other.error is None
    assert other.is_finished


def test_rows_without_a_form_are_sampled_bit_by_bit_as_without_the_others(llm):
    vocabulary = llm.model.vocab_size
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0))
    free = [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.5, logprobs=2)]
    form = llm.engine.grammars.compile(StructuredOutputs(regex="[0-9]+"))
    bound = SamplingState(SamplingParams(seed=3), vocab_size=vocabulary, matcher=form.start())
    alone = sample(logits[:3], [SamplingState(each, vocab_size=vocabulary) for each in free])
    mixed = sample(logits, [*(SamplingState(each, vocab_size=vocabulary) for each in free), bound])
    assert mixed[:3] == alone
    assert llm.model.tokenizer.decode([mixed[3].token_id]).isdigit()


def test_impossible_logits_leave_only_what_is_allowed(llm):
    vocabulary = llm.model.vocab_size
    form = llm.engine.grammars.compile(StructuredOutputs(choice=["7", "8"]))
    for temperature in (0, 1):
        state = SamplingState(SamplingParams(temperature=temperature), vocab_size=vocabulary, matcher=form.start())
        (token,) = sample(torch.full((1, vocabulary), float("-inf")), [state])
        assert llm.model.tokenizer.decode([token.token_id]) in ("7", "8")
        assert token.is_last
