"""Models with sliding windows and with layers that do not rotate: beside a dense forward in transformers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.engine_conformance import Reference, ask, each_case, params, run, run_case
from support.engines import build_engine, dense_logits
from support.gguf_families import FAMILIES, WINDOW, family_file, family_model
from support.llama_engine import RecordingLlamaRunner, llama_engine

from kvmosaic.engine import Engine
from kvmosaic.errors import InvalidConfig, InvalidPrompt
from kvmosaic.llama.library import ShiftFaults
from kvmosaic.llama.model import LlamaModel, load_llama
from kvmosaic.llama.self_check import check_llama
from kvmosaic.prompt import Prompt, Segment, SegmentKind

NEAR = 0.004
"""Allowed root mean square of differences, as a share of the logits' deviation; a wrong key is ten times more."""
WINDOWED = ["gemma2", "gemma3", "cohere2"]


@cache
def model(family: str, cache_type: str = "f32") -> LlamaModel:
    return load_llama(family_file(family), kv_cache_dtype=cache_type)


def some_tokens(chance: random.Random, most: int) -> list[int]:
    return [chance.randrange(3, 128) for _ in range(chance.randint(1, most))]


def some_prompt(chance: random.Random, kind: str) -> Prompt:
    """A system text, one to three documents of up to five windows and a question."""
    documents = [some_tokens(chance, 5 * WINDOW) for _ in range(chance.randint(1, 3))]
    prompt = Prompt.from_tokens(some_tokens(chance, 12), documents, some_tokens(chance, 8))
    system, *chunks, question = prompt.segments
    texts = [Segment(SegmentKind.TEXT, tuple(some_tokens(chance, 5))) for _ in chunks]
    if kind == "preamble":
        return replace(prompt, segments=(system, texts[0], *chunks, question))
    if kind == "glue":
        between = [segment for pair in zip(texts, chunks, strict=True) for segment in pair]
        return replace(prompt, segments=(system, *between, question))
    if kind == "absolute":
        place = system.num_tokens + chance.randrange(WINDOW - 2)
        chunks = [replace(chunks[0], position_offset=place)]
        return replace(prompt, segments=(system, *chunks, question))
    return prompt


def difference(engine: Engine, prompt: Prompt, family: str, repair: str = "none", **placing: str) -> float:
    """Of all logits of an answer from a dense forward in transformers."""
    runner = engine.runner
    assert isinstance(runner, RecordingLlamaRunner)
    runner.logits.clear()
    request = engine.add_request(prompt, params(3, repair=repair), **placing)
    (output,) = run(engine, [request])
    expected = dense_logits(family_model(family), request.layout, output.outputs[0].token_ids)
    found = torch.cat([logits for logits in runner.logits if len(logits)])[-len(expected) :]
    return float((found - expected).pow(2).mean().sqrt() / expected.std())


@pytest.mark.parametrize(("case", "family"), each_case(FAMILIES))
def test_every_family_does_what_an_engine_must(case: str, family: str) -> None:
    run_case(case, llama_engine(model(family)), Reference(family_model(family), 0.05))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["plain", "preamble", "glue", "absolute"])
def test_prompts_of_every_kind_equal_the_dense_forward(family: str, kind: str) -> None:
    """Cold and warm, in forwards of few and of many rows, with and without repair."""
    chance = random.Random(kind)
    for number in range(6):
        prompt = some_prompt(chance, kind)
        strategy = "absolute" if kind == "absolute" else ("shared", "sequential")[number % 2]
        context = "none" if number == 5 and kind != "absolute" else "system"
        repair = ("none", "first(3)", "full" if strategy == "sequential" else "none")[number % 3]
        engine = llama_engine(model(family), num_sequences=(24, 64)[number % 2], max_rows=(5, 64)[number // 3])
        for _ in range(2):
            found = difference(engine, prompt, family, repair, position_strategy=strategy, chunk_context=context)
            assert found < NEAR, (number, found)


@pytest.mark.parametrize("family", WINDOWED)
def test_no_cell_outside_a_window_is_lost_when_the_memory_is_full(family: str) -> None:
    """llama.cpp takes cells for free that have left the window of the one sequence that sees them."""
    chance = random.Random(1)
    engine = llama_engine(model(family), blocks=(40, 48), max_moved=64)
    first = Prompt.from_tokens([5, 6, 7], [[8, *range(20, 20 + 4 * WINDOW)]], [9, 8])
    prompts = [Prompt.from_tokens([5, 6, 7], [some_tokens(chance, 30) for _ in range(2)], [9]) for _ in range(12)]
    for strategy in ("shared", "sequential"):
        for number, prompt in enumerate(prompts):
            assert difference(engine, prompt, family, position_strategy=strategy) < NEAR, number
            assert difference(engine, first, family, position_strategy=strategy) < NEAR, number


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("level", [1, 2])
def test_long_documents_are_saved_whole(family: str, level: int) -> None:
    engine = llama_engine(model(family))
    prompt = Prompt.from_tokens([5, 6, 7], [list(range(20, 20 + 5 * WINDOW)), list(range(60, 90))], [9, 8])
    assert difference(engine, prompt, family, position_strategy="sequential") < NEAR
    (chunk, _) = engine.kv_cache.chunks()
    storage = engine.runner.storages["chunk_cache"]
    read = storage.read_chunk(chunk.block_ids, chunk.num_tokens)
    storage.write_chunk(chunk.block_ids, read)
    again = storage.read_chunk(chunk.block_ids, chunk.num_tokens)
    assert all(torch.equal(key, same) for (key, _), (same, _) in zip(read, again, strict=True))
    assert difference(engine, prompt, family, position_strategy="sequential") < NEAR
    engine.sleep(level)
    while not engine.is_asleep:
        engine.step()
    engine.wake()
    assert difference(engine, prompt, family, position_strategy="sequential") < NEAR


@pytest.mark.parametrize("family", WINDOWED)
def test_get_kv_knows_the_layers_that_llama_cpp_keeps_apart(family: str) -> None:
    prompt = Prompt.from_tokens([5, 6, 7], [list(range(20, 20 + 2 * WINDOW))], [9, 8])
    found = []
    for engine in (llama_engine(model(family)), build_engine(family_model(family))):
        ask(engine, prompt, params(1))
        (chunk,) = engine.kv_cache.chunks()
        storage, runs = engine.runner.storages["chunk_cache"], [(4 * block, 4) for block in chunk.block_ids]
        found.append([storage.get_kv(layer, runs) for layer in range(3)])
    for (key, value), (same_key, same_value) in zip(*found, strict=True):
        assert torch.allclose(key, same_key, atol=0.01) and torch.allclose(value, same_value, atol=0.01)


def test_get_kv_is_refused_where_llama_cpp_does_not_tell_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    gemma = model("gemma3")
    monkeypatch.setattr(gemma.file, "window_layers", ())
    engine = llama_engine(gemma)
    ask(engine, Prompt.plain([5, 6, 7]), params(1))
    with pytest.raises(InvalidConfig, match="did not say which they are when it loaded the model; take engine='tran"):
        engine.runner.storages["request"].get_kv(0, [(0, 1)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache_type", ["f32", "f16", "bf16"])
def test_every_family_passes_the_self_check(family: str, cache_type: str) -> None:
    check = check_llama(model(family, cache_type), num_threads=1)
    assert check.passed and check.is_moved, check


def test_heads_that_cannot_be_quantized_are_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidConfig, match=r"blocks of 32 numbers.* have 16; take kv_cache_dtype='f16'"):
        model("gemma3", "q8_0")


@pytest.mark.parametrize("family", ["cohere2", "smollm3"])
def test_keys_without_rotation_keep_theirs_when_they_move(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp rotates them, too; the self-check finds what that does."""
    monkeypatch.setattr(ShiftFaults, "mended", lambda self, moved, before: moved)
    check = check_llama(model(family), num_threads=1)
    assert not check.passed and "a moved document" in check.reason


def test_a_gap_of_a_window_is_refused_before_anything_runs() -> None:
    """llama.cpp refuses rows after a gap, and the token before it cannot stand in where no window reaches it."""
    engine = llama_engine(model("gemma3"))
    system, chunk, question = Prompt.from_tokens([5, 6, 7], [[8, 9]], [10]).segments
    for place, is_allowed in ((3 + WINDOW - 2, True), (3 + WINDOW - 1, False)):
        prompt = Prompt((system, replace(chunk, position_offset=place), question))
        if is_allowed:
            assert difference(engine, prompt, "gemma3", position_strategy="absolute") < NEAR
        else:
            with pytest.raises(InvalidPrompt, match="7 positions are left empty, and this model allows 6 "):
                engine.add_request(prompt, params(), position_strategy="absolute")


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("strategy", ["shared", pytest.param("sequential", marks=pytest.mark.slow)])
def test_prompts_of_more_parts_than_sequences_are_read(family: str, strategy: str) -> None:
    engine = llama_engine(model(family), blocks=(600, 600), num_sequences=20)
    chunks = [[number + 3, *range(20, 20 + 2 * WINDOW)] for number in range(12)]
    plain = Prompt.plain([number % 100 + 3 for number in range(20 * WINDOW)])
    for prompt in (Prompt.from_tokens([5], chunks, [9]), plain):
        assert difference(engine, prompt, family, position_strategy=strategy) < NEAR
        assert difference(engine, prompt, family, position_strategy=strategy) < NEAR


def test_order_of_documents_changes_no_bit_with_windows() -> None:
    engine = llama_engine(model("gemma3"))
    runner = engine.runner
    assert isinstance(runner, RecordingLlamaRunner)
    chunks = [list(range(20, 50)), list(range(30, 52)), list(range(70, 110))]
    found = []
    for order in [(0, 1, 2), (0, 1, 2), (2, 1, 0), (1, 0, 2)]:
        runner.logits.clear()
        ask(engine, Prompt.from_tokens([5, 6], [chunks[number] for number in order], [9, 8]), params(1))
        found.append(next(logits for logits in reversed(runner.logits) if len(logits))[-1])
    assert all(torch.equal(each, found[1]) for each in found[2:])
