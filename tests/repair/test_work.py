"""What repairs cost: token-layers that really go through the model, beside the share of tokens that was asked for."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.engines import GREEDY, build_engine
from support.families import build

from kvmosaic.engine.request_repair import RequestRepair
from kvmosaic.layout import arrange
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.repair import repair_policy

NUM_DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 4, 512, 30
ALL = NUM_DOCUMENTS * DOCUMENT_TOKENS
ONE = replace(GREEDY, max_tokens=1)
SHARES = {
    "first(76)": 3 * 76 / ALL,  # the first document is exact
    "deviation(0.15)": 0.15,
    "query(0.15)": 0.15,
    "combined(0.15)": 0.15,
    "full": 1.0,
}
"""What a policy is asked for, by all tokens of documents."""


def prompt() -> Prompt:
    numbers = torch.Generator().manual_seed(0)
    parts = [DOCUMENT_TOKENS] * NUM_DOCUMENTS + [QUESTION_TOKENS]
    *documents, question = (torch.randint(3, 128, (count,), generator=numbers).tolist() for count in parts)
    return Prompt.from_tokens(None, documents, question)


@cache
def model(num_layers: int) -> LoadedModel:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LoadedModel.from_module(build("llama", torch.float32, num_hidden_layers=num_layers, head_dim=8, **shape))


@contextmanager
def counted(loaded: LoadedModel):
    """Adds up the tokens that go through the layers, each once per layer."""
    counts: list[int] = []
    handles = [
        layer.mlp.register_forward_hook(lambda _, __, output: counts.append(output.shape[-2]))
        for layer in loaded.module.model.layers
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@cache
def work(repair: str, num_layers: int) -> tuple[float, float]:
    """Work of a repair beside cached documents, by what computing all documents costs: counted, and reported."""
    loaded = model(num_layers)
    engine = build_engine(loaded, blocks=(200, 200), block_size=16, max_batched_tokens=1024)
    engine.run([engine.add_warm_up(prompt())])
    with counted(loaded) as counts:
        request = engine.add_request(prompt(), replace(ONE, repair=repair))
        engine.run([request])
    assert request.reuse.repair is not None
    num_counted = sum(counts) - QUESTION_TOKENS * num_layers
    return num_counted / (ALL * num_layers), request.reuse.repair.work_fraction


@pytest.mark.parametrize("repair", SHARES)
def test_the_report_says_what_goes_through_the_model(repair):
    num_counted, reported = work(repair, 32)
    assert num_counted == pytest.approx(reported, rel=1e-12)


@pytest.mark.parametrize("repair", sorted(SHARES.keys() - {"combined(0.15)"}))
def test_a_repair_costs_its_share_of_the_tokens_within_a_fifth(repair):
    num_counted, _ = work(repair, 32)
    assert num_counted == pytest.approx(SHARES[repair], rel=0.2)


def reported_work(repair: str, num_layers: int) -> float:
    """What a report would say: counted once above, it is known for any depth."""
    layout = arrange(prompt())
    sought = RequestRepair(repair_policy(repair), layout, num_layers)
    sought.deviations = {index: [1.0] * DOCUMENT_TOKENS for index in sought.open_chunks}
    sought.shares = {index: torch.ones(DOCUMENT_TOKENS) for index in sought.chunks}
    return sought.use(sought.repaired_layout(), 0, 0.0).work_fraction


def test_both_signals_cost_a_quarter_more_than_the_share_at_32_layers_and_a_fifth_from_49():
    """One layer of all open tokens for the keys, and the question once more for attention."""
    num_counted, _ = work("combined(0.15)", 32)
    tokens = int(0.15 * ALL) + QUESTION_TOKENS + 3 * DOCUMENT_TOKENS / 32
    assert num_counted == pytest.approx(tokens / ALL, rel=1e-12)
    assert 1.25 < num_counted / 0.15 < 1.26
    assert reported_work("combined(0.15)", 32) == pytest.approx(num_counted, rel=1e-12)
    assert reported_work("combined(0.15)", 48) > 1.2 * 0.15 > reported_work("combined(0.15)", 49)


def test_deviation_stays_within_a_fifth_from_25_layers_on():
    assert reported_work("deviation(0.15)", 32) == pytest.approx(work("deviation(0.15)", 32)[1], rel=1e-12)
    assert reported_work("deviation(0.15)", 24) > 1.2 * 0.15 > reported_work("deviation(0.15)", 25)


def test_in_two_layers_measuring_keys_costs_more_than_repairing():
    num_counted, reported = work("deviation(0.15)", 2)
    assert num_counted == pytest.approx(reported, rel=1e-12)
    assert num_counted == pytest.approx((307 + 3 * DOCUMENT_TOKENS / 2) / ALL, rel=1e-12)
    assert num_counted > 3 * 0.15


def test_what_repairs_nothing_costs_nothing():
    loaded = model(2)
    engine = build_engine(loaded, blocks=(200, 200), block_size=16, max_batched_tokens=1024)
    engine.run([engine.add_warm_up(prompt())])
    with counted(loaded) as counts:
        engine.run([engine.add_request(prompt(), replace(ONE, repair="none"))])
    assert sum(counts) == 2 * QUESTION_TOKENS


def test_a_repair_that_is_found_again_costs_only_its_measuring():
    loaded = model(2)
    engine = build_engine(loaded, blocks=(200, 200), block_size=16, max_batched_tokens=1024)
    for repair, measured in (("first(76)", 0), ("query(0.15)", 2 * QUESTION_TOKENS)):
        engine.run([engine.add_request(prompt(), replace(ONE, repair=repair))])
        with counted(loaded) as counts:
            request = engine.add_request(prompt(), replace(ONE, repair=repair))
            engine.run([request])
        assert request.reuse.repair is not None
        assert request.reuse.repair.computed_tokens == 0
        assert request.reuse.repair.work_fraction == pytest.approx(measured / (2 * ALL))
        assert measured < sum(counts) <= measured + 2 * QUESTION_TOKENS
