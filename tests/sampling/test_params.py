import math

import pytest

from kvmosaic.errors import InvalidSampling
from kvmosaic.sampling import SamplingParams


def test_defaults_change_nothing():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.stop_strings, params.stop_ids, params.max_tokens) == ((), frozenset(), 256)
    assert not params.is_greedy
    assert not params.has_penalties


def test_stops_are_stored_as_tuples_without_repeats():
    params = SamplingParams(stop="end", stop_token_ids=[3, 3, 5])
    assert (params.stop, params.stop_token_ids) == (("end",), (3, 5))
    assert SamplingParams(stop=["a", "b", "a"]).stop_strings == ("a", "b")
    assert hash(params) == hash(SamplingParams(stop=["end"], stop_token_ids=(3, 5)))
    assert SamplingParams(logit_bias={7: -1}) == SamplingParams(logit_bias=[(7, -1)])


def test_temperature_zero_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n must be a whole number between 1 and 256, got 0"),
        ({"n": True}, "n must be a whole number"),
        ({"n": 10**9}, "n must be a whole number between 1 and 256"),
        ({"temperature": -0.1}, r"temperature must be a number between 0 and 100, got -0.1 \(0 is greedy"),
        ({"temperature": math.nan}, "temperature must be a number"),
        ({"temperature": "hot"}, "temperature must be a number between 0 and 100, got 'hot'"),
        ({"top_p": 0}, r"top_p must be a number above 0 and at most 1, got 0 \(1 keeps all"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"top_k": -2}, "top_k must be a whole number between -1"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"min_p": 2}, "min_p must be a number between 0 and 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number between 0.01 and 100"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be a number between 0.01 and 100"),
        ({"presence_penalty": 3}, "presence_penalty must be a number between -2 and 2"),
        ({"frequency_penalty": -3}, "frequency_penalty must be a number between -2 and 2"),
        ({"logit_bias": 7}, "logit_bias must map token ids to numbers, got 7"),
        ({"logit_bias": {-1: 1}}, "a token id of logit_bias must be a whole number between 0"),
        ({"logit_bias": {5: 101}}, r"logit_bias of token 5 must be a number between -100 and 100, got 101"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias has 1025 token ids; at most 1024"),
        ({"seed": 2**63}, "seed must be a whole number"),
        ({"seed": 1.0}, "seed must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be a whole number between 1"),
        ({"window_tokens": 0}, "window_tokens must be a whole number between 1 and 134217728, got 0"),
        ({"window_tokens": 2**27 + 1}, "window_tokens must be a whole number between 1 and 134217728"),
        ({"window_tokens": 8, "sink_tokens": -1}, "sink_tokens must be a whole number between 0 and 134217728"),
        ({"sink_tokens": 4}, "sink_tokens is 4 and there is no window_tokens; .* leave sink_tokens out"),
        ({"min_tokens": 300}, "min_tokens is 300, above max_tokens 256; lower"),
        ({"min_tokens": -1}, "min_tokens must be"),
        ({"logprobs": 1001}, "logprobs must be a whole number between 0 and 1000"),
        ({"stop": 7}, "stop must be a text or a list of texts, got 7"),
        ({"stop": [""]}, "a stop text must have 1 to 4096 characters, got ''"),
        ({"stop": ["a", 7]}, "a stop text must have 1 to 4096 characters, got 7"),
        ({"stop": [str(i) for i in range(200)]}, "stop has 200 texts; at most 128"),
        ({"stop": "x" * 5000}, "a stop text must have"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list of token ids, got 7"),
        ({"stop_token_ids": ["a"]}, "a stop token id must be a whole number"),
        ({"stop_token_ids": [-1]}, "a stop token id must be a whole number"),
        ({"stop_token_ids": range(5000)}, "stop_token_ids has 5000 ids; at most 4096"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ],
)
def test_a_setting_outside_its_range_is_named_with_value_and_limits(settings, message):
    with pytest.raises(InvalidSampling, match=message):
        SamplingParams(**settings)


def test_names_of_a_mapping_are_checked():
    assert SamplingParams.from_dict({"temperature": 0, "stop": ["a"]}) == SamplingParams(temperature=0, stop="a")
    with pytest.raises(
        InvalidSampling, match="unknown sampling parameters best_of, tempratur; known are n, temperature"
    ):
        SamplingParams.from_dict({"tempratur": 0, "best_of": 2})
