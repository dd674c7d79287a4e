from __future__ import annotations

import logging

import pytest
from transformers import GenerationConfig

from kvmosaic.sampling import SamplingParams, default_sampling


def test_nothing_said_changes_nothing():
    assert default_sampling({}) == SamplingParams()
    assert default_sampling(GenerationConfig().to_dict()) == SamplingParams()


def test_what_is_said_counts():
    said = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    told = {name: value for name, value in said.items() if name != "do_sample"}
    assert default_sampling({**said, "max_new_tokens": 3, "eos_token_id": 2}) == SamplingParams(**told)


def test_only_an_explicit_false_means_greedy():
    assert default_sampling({"do_sample": False, "temperature": 0.6, "top_p": 0.9}).temperature == 0
    assert default_sampling({"do_sample": None, "temperature": 0.6}).temperature == 0.6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "warm"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", 2.5),
        ("top_k", True),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
    ],
)
def test_values_out_of_bounds_are_left_out_with_a_line_in_the_log(name, value, caplog):
    with caplog.at_level(logging.WARNING, "kvmosaic"):
        assert default_sampling({name: value, "presence_penalty": 1}) == SamplingParams()
    (line,) = caplog.messages
    assert "generation_config.json" in line and f"{name} must be" in line
