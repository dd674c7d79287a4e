"""Kinds of weights and caches: files that llama.cpp quantized, beside a dense forward of their dequantized weights."""

from __future__ import annotations

import statistics
from functools import cache
from itertools import chain, permutations

import pytest
import torch
from support.engine_conformance import DOCUMENTS, SYSTEM, Reference, ask, each_case, params, run_case
from support.engine_conformance import QUESTION as ASKED
from support.engines import dense_logits
from support.llama_engine import RecordingLlamaRunner, documents, llama_engine, llama_reader, reader_file
from support.llama_quantize import KINDS

from kvmosaic.llama.self_check import check_llama
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.prompt import Prompt

QUESTION = [5, 300, 11, 700, 9]
SETTINGS = [("F16", "f16", 1), ("Q8_0", "q8_0", 2), ("Q4_K_M", "f16", 2), ("Q4_K_M", "q8_0", 1)]
"""Kind of weights, kind of cache, threads."""


@cache
def dequantized(kind: str) -> LoadedModel:
    return load_model(reader_file(kind), dtype="float32")


def answer(
    kind: str, cache_type: str, num_threads: int, prompt: Prompt, strategy: str = "shared"
) -> list[torch.Tensor]:
    """Differences of log probabilities [steps, V] from the dense forward, cold and warm."""
    engine = llama_engine(llama_reader(kind, cache_type), num_threads=num_threads)
    runner = engine.runner
    assert isinstance(runner, RecordingLlamaRunner)
    found = []
    for _ in range(2):
        output = ask(engine, prompt, params(2), position_strategy=strategy).outputs[0]
        logits = torch.cat([each for each in runner.logits if len(each)])
        runner.logits.clear()
        expected = dense_logits(dequantized(kind), engine.arrange(prompt, strategy), output.token_ids)
        found.append(logits.log_softmax(-1) - expected.log_softmax(-1))
    engine.close()
    return found


@cache
def ordinary_differences(kind: str, cache_type: str, num_threads: int) -> list[torch.Tensor]:
    """Of ordinary prompts in llama.cpp: what its arithmetic and the types of its cache round."""
    prompts = [Prompt.plain([*range(2, 12), *chain(*documents(seed)), *QUESTION]) for seed in range(4)]
    return [each for prompt in prompts for each in answer(kind, cache_type, num_threads, prompt)]


@cache
def tolerance(kind: str, cache_type: str, num_threads: int) -> float:
    """Twice the largest difference of ordinary prompts with the suite's tokens, and at most 0.3."""
    pairs = [(0, 1), (2, 3), (3, 0), (1, 2)]
    prompts = [Prompt.plain([*SYSTEM, *DOCUMENTS[one], *DOCUMENTS[other], *ASKED]) for one, other in pairs]
    found = [each for prompt in prompts for each in answer(kind, cache_type, num_threads, prompt)]
    return min(0.3, 2 * max(float(each.abs().max()) for each in found))


def median(differences: list[torch.Tensor]) -> float:
    """Of their root mean squares."""
    return statistics.median(float(each.pow(2).mean().sqrt()) for each in differences)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_composed_prompts_are_as_near_as_ordinary_ones(setting: tuple[str, str, int], strategy: str) -> None:
    prompts = [Prompt.from_tokens(list(range(2, 12)), documents(seed), QUESTION) for seed in range(4)]
    found = median([each for prompt in prompts for each in answer(*setting, prompt, strategy)])
    assert found <= 2 * median(ordinary_differences(*setting)), (found, median(ordinary_differences(*setting)))


@pytest.mark.parametrize(("case", "setting"), each_case(SETTINGS), ids=str)
def test_every_kind_does_what_an_engine_must(case: str, setting: tuple[str, str, int]) -> None:
    kind, cache_type, num_threads = setting
    engine = llama_engine(llama_reader(kind, cache_type), num_threads=num_threads)
    run_case(case, engine, Reference(dequantized(kind), tolerance(*setting)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_every_kind_passes_the_self_check(kind: str, cache_type: str) -> None:
    for num_threads in (1, 2):
        check = check_llama(llama_reader(kind, cache_type), num_threads=num_threads)
        assert check.passed and check.is_moved, check


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_order_of_documents_changes_no_bit(setting: tuple[str, str, int]) -> None:
    kind, cache_type, num_threads = setting
    engine = llama_engine(llama_reader(kind, cache_type), num_threads=num_threads)
    runner = engine.runner
    assert isinstance(runner, RecordingLlamaRunner)
    system, chunks = list(range(2, 12)), documents(1, 3)
    found = []
    for order in [tuple(chunks), *permutations(chunks)]:
        runner.logits.clear()
        ask(engine, Prompt.from_tokens(system, list(order), QUESTION), params(1))
        found.append(next(logits for logits in reversed(runner.logits) if len(logits))[-1])
    assert all(torch.equal(each, found[1]) for each in found[2:])
