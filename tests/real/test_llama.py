"""SmolLM2 in llama.cpp, in files as `llama-quantize` writes them: beside a dense forward of the dequantized weights."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain, permutations
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, dequantize
from support.engine_conformance import ask, params, run
from support.engines import dense_logits
from support.real.prompts import DOCUMENTS, PLAIN, QUESTIONS, parts

from kvmosaic.llama.interface import is_installed

if not is_installed():
    pytest.skip("llama.cpp is not installed", allow_module_level=True)

from support.gguf import hf_name
from support.llama_engine import difference, llama_engine, logits_of
from support.llama_quantize import quantize

from kvmosaic import LLM, ChunkCacheConfig, SamplingParams, TierConfig
from kvmosaic.engine import Engine
from kvmosaic.llama.library import Rows
from kvmosaic.llama.model import LlamaModel, load_llama
from kvmosaic.llama.self_check import check_llama
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

SETTINGS = [("F16", "f16", 1), ("Q8_0", "q8_0", 2), ("Q4_K_M", "f16", 2)]
"""Kind of weights, kind of cache, threads."""
ROUNDING = {"F16": 0.05, "Q8_0": 0.5, "Q4_K_M": 0.5}
"""Largest difference of log probabilities; llama.cpp also rounds what it multiplies with weights of few bits."""


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def setting(request, model_file, tmp_path_factory) -> tuple[str, LlamaModel, int]:
    kind, cache_type, num_threads = request.param
    file = quantize(model_file, tmp_path_factory.mktemp("llama") / f"{kind}.gguf", kind)
    return kind, load_llama(file, kv_cache_dtype=cache_type), num_threads


def opened(model: LlamaModel, num_threads: int, **options: object) -> Engine:
    return llama_engine(
        model, blocks=(64, 64), block_size=16, max_moved=1024, num_threads=num_threads, max_rows=512, **options
    )


def prompt_of(model: LlamaModel, number: int, order: tuple[int, ...] = (2, 0, 1, 3)) -> Prompt:
    system, chunks, question = parts(model.tokenizer, QUESTIONS[number], [DOCUMENTS[index] for index in order])
    return Prompt.from_tokens(system, chunks, question)


@pytest.fixture(scope="module")
def dequantized(setting, loaded) -> LoadedModel:
    """transformers' model with the weights of the file."""
    module, config = deepcopy(loaded.module), loaded.config
    state = {}
    for tensor in GGUFReader(setting[1].file.path).tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in tensor.shape[::-1]])
        name = hf_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            numbers = numbers.reshape(heads, -1, 2, numbers.shape[1]).swapaxes(1, 2).reshape(numbers.shape)
        state[name] = torch.from_numpy(numbers.copy())
    missing = module.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and missing.missing_keys in ([], ["lm_head.weight"])
    return LoadedModel.from_module(module, loaded.tokenizer)


def test_composed_prompts_are_as_near_to_a_dense_forward_as_ordinary_ones(setting, dequantized) -> None:
    """Root mean square over the logits of two tokens, cold and warm."""
    _, model, num_threads = setting
    prompt = prompt_of(model, 0)
    plain = Prompt.plain(list(chain(*(segment.token_ids or () for segment in prompt.segments))))
    found: dict[str, float] = {}
    for name, asked in (("plain", plain), ("shared", prompt), ("sequential", prompt)):
        strategy = "shared" if name == "plain" else name
        engine = opened(model, num_threads)
        expected: dict[tuple[int, ...], torch.Tensor] = {}
        for _ in ("cold", "warm"):
            engine.runner.logits.clear()
            tokens = ask(engine, asked, params(2), position_strategy=strategy).outputs[0].token_ids
            if tokens not in expected:
                expected[tokens] = dense_logits(dequantized, engine.arrange(asked, strategy), tokens)
            logits = torch.cat([each for each in engine.runner.logits if len(each)])
            found[name] = max(found.get(name, 0.0), difference(logits, expected[tokens]))
        engine.close()
    assert max(found["shared"], found["sequential"]) <= 2 * found["plain"], found


def test_the_self_check_passes(setting) -> None:
    _, model, num_threads = setting
    check = check_llama(model, num_threads=num_threads)
    assert check.passed and check.is_moved, check


def test_order_of_documents_changes_no_bit_in_shared_positions(setting) -> None:
    _, model, num_threads = setting
    engine = opened(model, num_threads)
    logits_of(engine, prompt_of(model, 0))
    found = [logits_of(engine, prompt_of(model, 0, order)) for order in list(permutations(range(4)))[::8]]
    assert all(torch.equal(each, found[0]) for each in found[1:])


def test_ordinary_prompts_get_the_tokens_of_llama_cpp_itself(setting) -> None:
    _, model, num_threads = setting
    engine = opened(model, num_threads)
    for text in PLAIN[:1]:
        tokens = model.tokenizer.encode(text)
        context = model.file.context(
            num_cells=256, num_sequences=1, num_threads=num_threads, cache_type=model.cache_type
        )
        expected: list[int] = []
        logits = context.forward([Rows(tokens, 0, 0, 1)])
        for place in range(len(tokens), len(tokens) + 16):
            expected.append(int(logits[-1].argmax()))
            logits = context.forward([Rows(expected[-1:], place, 0, 1)])
        context.close()
        assert list(ask(engine, Prompt.plain(tokens), params(16)).outputs[0].token_ids) == expected


def test_cached_documents_answer_as_computed_ones(setting, tmp_path: Path) -> None:
    """Cold, warm, after sleep and from a disk tier after the engine was closed: the same first token.

    llama.cpp adds up cells in the order in which they lie, so log probabilities differ by its rounding.
    """
    kind, model, _ = setting
    tiers = TierConfig(chunk_tier=(f"disk:{tmp_path}?quota=1GiB",), chunk_loading="always")
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    documents = [{"id": str(number), "text": text} for number, text in enumerate(DOCUMENTS)]
    chunks = ChunkCacheConfig(chunk_cache_size="64MiB", position_strategy="sequential", repair="none")
    options = {"chunk_cache_config": chunks, "tier_config": tiers, "self_check": False}

    def answer(llm: LLM) -> tuple[dict[int, float], int]:
        """Log probabilities of the likeliest tokens, and reused tokens of documents."""
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=1, logprobs=20), documents=documents)
        assert output.reuse is not None and output.outputs[0].logprobs is not None
        reused = sum(each.reused_tokens for each in output.reuse.segments if each.kind == "chunk")
        return {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}, reused

    with LLM(model, **options) as llm:
        cold, none = answer(llm)
        warm, every = answer(llm)
        assert none == 0 < every
        llm.sleep(level=1)
        llm.wake()
        asleep, _ = answer(llm)
    with LLM(model, **options) as llm:
        loaded, reused = answer(llm)
        assert reused == every and llm.get_chunk_cache_stats().computed_tokens == 0
    likely = sorted(cold, key=cold.__getitem__)[-4:]
    for found in (warm, asleep, loaded):
        assert max(found, key=found.__getitem__) == likely[-1]
        assert max(abs(found[token] - cold[token]) for token in likely) < ROUNDING[kind], (cold, found)


def test_eight_requests_hold_the_keys_of_their_documents_once(setting) -> None:
    _, model, num_threads = setting
    engine = opened(model, num_threads)
    orders = list(permutations(range(4)))[:8]
    added = [engine.add_request(prompt_of(model, index % 3, order), params(2)) for index, order in enumerate(orders)]
    outputs = run(engine, added)
    chunks = list(engine.kv_cache.chunks())
    assert len(chunks) == len(DOCUMENTS)
    assert engine.kv_cache.chunk_pool.num_free == 64 - sum(len(chunk.block_ids) for chunk in chunks)
    reused = [each.reused_tokens for output in outputs for each in output.reuse.segments if each.kind == "chunk"]
    assert len(reused) == 32 and sum(count > 0 for count in reused) == 28
