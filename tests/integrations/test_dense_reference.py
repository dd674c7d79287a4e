"""The dense reference of `kvmosaic check --vllm`, against transformers' cache with keys rotated by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.real.oracle import Asked, Oracle
from support.weights import randomize
from transformers import LlamaConfig, LlamaForCausalLM

from kvmosaic.layout import dense, repaired
from kvmosaic.vllm.composed_check import DenseReference, DenseRows, distance, load_reference
from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.scheduler.chunk_prompts import repaired_runs

SYSTEM, CHUNKS, QUESTION, ANSWER = (
    range(10, 15),
    (range(20, 27), range(30, 34), range(40, 46)),
    range(50, 54),
    (7, 8, 9),
)
TOKENS = [*SYSTEM, *(token for chunk in CHUNKS for token in chunk), *QUESTION]


@pytest.fixture(scope="module")
def module() -> Any:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, head_dim=8, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    randomize(model, 1)
    return model


def composition(**how: Any) -> Composition:
    return Composition(len(SYSTEM), tuple(len(chunk) for chunk in CHUNKS), **how)


@pytest.mark.parametrize("context", ["system", "none"])
@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_it_is_what_the_cache_of_transformers_gives_with_turned_keys(module: Any, strategy: Any, context: Any) -> None:
    layout = composition(position_strategy=strategy, chunk_context=context).layout([*TOKENS, *ANSWER[:-1]])
    found = DenseReference(module).logprobs(layout, len(ANSWER))
    wanted = Oracle(module, Asked(SYSTEM, CHUNKS, QUESTION, strategy, context)).forced(ANSWER).float().log_softmax(-1)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)


def test_documents_repaired_as_a_whole_are_an_ordinary_prompt(module: Any) -> None:
    layout = composition(repair=100).layout(TOKENS)
    chosen = {index: runs[0] for index, runs in repaired_runs(layout, 100).items()}
    found = DenseReference(module).logprobs(repaired(layout, chosen), 3)
    wanted = module(torch.tensor([TOKENS])).logits[0, -3:].float().log_softmax(-1)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("repair", [0, 3])
def test_rows_without_moved_keys_are_those_of_the_layout(repair: int) -> None:
    layout = composition(position_strategy="shared").layout(TOKENS)
    layout = repaired(layout, {2: range(repair)}) if repair else layout
    rows = DenseRows.of(layout)
    if repair:  # repaired tokens take their documents along
        assert len(rows.token_ids) > len(TOKENS) + repair
        return
    wanted = dense(layout)
    assert rows.token_ids.tolist() == wanted.token_ids.tolist()
    assert rows.positions.tolist() == wanted.positions.tolist()
    assert rows.mask.tolist() == wanted.mask.tolist()


def test_a_distance_is_a_mean_over_the_listed_tokens() -> None:
    assert distance(torch.tensor([[0.0, -1.0], [-3.0, 0.0]]), [{0: -3.0}, {0: -3.0, 1: 4.0}]) == pytest.approx(
        (25 / 3) ** 0.5
    )


def test_a_model_that_cannot_be_loaded_is_a_reason(tmp_path: Any) -> None:
    config = SimpleNamespace(model=str(tmp_path), revision=None, trust_remote_code=False, dtype=torch.bfloat16)
    assert "transformers does not load it" in str(load_reference(config, 10))
    assert "GiB of memory" in str(load_reference(config, 10**15))
