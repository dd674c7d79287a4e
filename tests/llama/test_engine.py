"""The llama.cpp engine against llama.cpp itself, and against a dense forward of the same weights."""

from __future__ import annotations

import statistics
import threading
from itertools import chain, permutations
from pathlib import Path

import pytest
import torch
from support.engine_conformance import ask, params
from support.engines import dense_logits
from support.gguf import save_gguf
from support.llama_engine import difference, documents, llama_engine, llama_reader, logits_of, reader_file

from kvmosaic.assembly import bundled_reader
from kvmosaic.errors import InvalidConfig, InvalidRepair, NotMovable, RequestTooLarge, UnsupportedModel
from kvmosaic.llama import runner
from kvmosaic.llama.library import LlamaContext, Rows
from kvmosaic.llama.model import load_llama
from kvmosaic.llama.self_check import check_llama
from kvmosaic.llama.state import relabelled
from kvmosaic.model import load_model
from kvmosaic.prompt import Prompt

QUESTION = [5, 300, 11, 700, 9]


@pytest.mark.parametrize("cache", ["f32", "f16", "q8_0"])
def test_order_of_documents_changes_no_bit_in_shared_positions(cache: str) -> None:
    engine = llama_engine(llama_reader(kv_cache_dtype=cache))
    system, chunks = list(range(2, 12)), documents(1, 3)
    logits_of(engine, Prompt.from_tokens(system, chunks, QUESTION))
    found = [logits_of(engine, Prompt.from_tokens(system, list(order), QUESTION)) for order in permutations(chunks)]
    assert all(torch.equal(each, found[0]) for each in found[1:])


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_composing_adds_no_error_to_what_llama_cpp_rounds(strategy: str) -> None:
    """Medians over prompts, beside ordinary prompts of the same length."""
    reader = load_model(bundled_reader(), dtype="float32")
    ordinary, composed = [], []
    for seed in range(6):
        chunks = documents(seed)
        for found, prompt in (
            (ordinary, Prompt.plain([*range(2, 12), *chain(*chunks), *QUESTION])),
            (composed, Prompt.from_tokens(list(range(2, 12)), chunks, QUESTION)),
        ):
            engine = llama_engine(llama_reader())
            cold, warm = (logits_of(engine, prompt, strategy) for _ in range(2))
            expected = dense_logits(reader, engine.arrange(prompt, strategy), [0])[0]
            found.append(max(difference(cold, expected), difference(warm, expected)))
    assert statistics.median(composed) <= 2 * statistics.median(ordinary), (composed, ordinary)


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
@pytest.mark.parametrize("num_sequences", [5, 64])
def test_documents_that_share_cells_count_each(strategy: str, num_sequences: int) -> None:
    """The same document twice, and two versions of one that share their beginning."""
    reader = load_model(bundled_reader(), dtype="float32")
    one, two, other = documents(1, 3, 24)
    for chunks in ([one, two, one], [one, two, one[:16] + other[:9]]):
        engine = llama_engine(llama_reader(), num_sequences=num_sequences)
        prompt = Prompt.from_tokens([5, 6, 7], chunks, QUESTION)
        cold, warm = (logits_of(engine, prompt, strategy) for _ in range(2))
        expected = dense_logits(reader, engine.arrange(prompt, strategy), [0])[0]
        assert max(difference(cold, expected), difference(warm, expected)) < 0.01


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_cells_are_allocated_when_they_are_needed(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llama_engine(llama_reader())
    monkeypatch.setattr(runner, "_FIRST_CELLS", 8)
    grown = llama_engine(llama_reader(), num_sequences=8)
    sizes = []
    for prompt in (
        Prompt.plain(QUESTION),
        *(Prompt.from_tokens(list(range(2, 12)), documents(seed, 3), QUESTION) for seed in (1, 2, 1)),
    ):
        found, expected = (logits_of(engine, prompt, strategy) for engine in (grown, whole))
        assert difference(found, expected) < 0.02
        sizes.append(grown.runner.num_cells)  # type: ignore[attr-defined]
    assert 8 == sizes[0] < sizes[1] < sizes[2] == sizes[3] < whole.runner.num_cells  # type: ignore[attr-defined]


def test_ordinary_prompts_get_the_tokens_of_llama_cpp_itself() -> None:
    model = llama_reader("Q8_0", "f16")
    tokens = documents(3, 1, 50)[0]
    context = model.file.context(num_cells=256, num_sequences=1, num_threads=1)
    expected: list[int] = []
    logits = context.forward([Rows(tokens, 0, 0, 1)])
    for number in range(16):
        expected.append(int(logits[-1].argmax()))
        logits = context.forward([Rows(expected[-1:], len(tokens) + number, 0, 1)])
    context.close()
    engine = llama_engine(model)
    assert list(ask(engine, Prompt.plain(tokens), params(16)).outputs[0].token_ids) == expected


@pytest.mark.parametrize(("kind", "cache"), [("F16", "f16"), ("Q8_0", "f16"), ("Q4_1", "f16"), ("Q8_0", "bf16")])
def test_kinds_of_weights_and_caches_pass_the_self_check(kind: str, cache: str) -> None:
    check = check_llama(llama_reader(kind, cache), num_threads=2)
    assert check.passed and check.is_moved, check


def test_the_self_check_finds_keys_that_are_not_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaContext, "shifted", lambda self, states: [relabelled(*each) for each in states])
    check = check_llama(llama_reader(), num_threads=1)
    assert not check.passed and "moved document" in check.reason


@pytest.mark.parametrize("cache", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("level", [1, 2])
def test_answers_after_sleep_are_those_before(cache: str, level: int) -> None:
    engine = llama_engine(llama_reader(kv_cache_dtype=cache))
    prompt = Prompt.from_tokens(list(range(2, 12)), documents(5), QUESTION)
    before = logits_of(engine, prompt, "sequential")
    engine.sleep(level)
    while not engine.is_asleep:
        engine.step()
    engine.wake()
    after = logits_of(engine, prompt, "sequential")
    assert difference(after, before) < 0.02


@pytest.mark.parametrize("cache", ["f32", "f16", "bf16", "q8_0"])
def test_chunks_are_read_and_written_byte_for_byte(cache: str) -> None:
    engine = llama_engine(llama_reader(kv_cache_dtype=cache))
    ask(engine, Prompt.from_tokens(list(range(2, 12)), documents(5, 1), QUESTION))
    storage = engine.runner.storages["chunk_cache"]
    (chunk,) = engine.kv_cache.chunks()
    read = storage.read_chunk(chunk.block_ids, chunk.num_tokens)
    free = range(100, 100 + len(chunk.block_ids))
    storage.write_chunk(free, read)
    again = storage.read_chunk(free, chunk.num_tokens)
    for pair, other in zip(read, again, strict=True):
        for tensor, same in zip(pair, other, strict=True):
            assert (tensor is None) == (same is None)
            if tensor is not None and same is not None:
                assert torch.equal(tensor.view(torch.uint8), same.view(torch.uint8))
    engine.close()


def test_invariants_are_checked_between_what_threads_of_tiers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llama_engine(llama_reader())
    ask(engine, Prompt.from_tokens(list(range(2, 12)), documents(5, 1), QUESTION))
    (chunk,) = engine.kv_cache.chunks()
    untag = LlamaContext.untag
    failures: list[AssertionError] = []
    checkers: list[threading.Thread] = []

    def check() -> None:
        try:
            engine.runner.check_invariants()
        except AssertionError as error:
            failures.append(error)

    def checked(self: LlamaContext, *args: int) -> None:
        """Amid a read, whose sequence belongs to nobody for a moment."""
        checkers.append(threading.Thread(target=check))
        checkers[-1].start()
        checkers[-1].join(0.2)
        untag(self, *args)

    monkeypatch.setattr(LlamaContext, "untag", checked)
    reader = threading.Thread(target=engine.runner.storages["chunk_cache"].read_chunk, args=(chunk.block_ids, 4))
    reader.start()
    for thread in (reader, *checkers):
        thread.join()
    assert not failures


@pytest.mark.parametrize("is_at_rest", [False, True])
def test_keys_of_documents_at_the_same_positions_are_told_apart(is_at_rest: bool) -> None:
    engine = llama_engine(llama_reader())
    ask(engine, Prompt.from_tokens([2, 3], documents(5, 2, 20), QUESTION), position_strategy="shared")
    storage, chunks = engine.runner.storages["chunk_cache"], engine.kv_cache.chunks()
    if is_at_rest:
        engine.runner.sleep((), [block for chunk in chunks for block in chunk.block_ids])
        engine.runner.wake()
    alone = [storage.read_chunk(chunk.block_ids, chunk.num_tokens)[0][0] for chunk in chunks]
    runs = [
        (block * 4, min(4, chunk.num_tokens - 4 * number))
        for chunk in chunks
        for number, block in enumerate(chunk.block_ids)
    ]
    assert torch.equal(storage.get_kv(0, runs)[0], torch.cat(alone))


def test_what_llama_cpp_cannot_do_is_refused_with_its_reason() -> None:
    engine = llama_engine(llama_reader())
    prompt = Prompt.from_tokens([2, 3], documents(1, 2), QUESTION)
    with pytest.raises(NotMovable, match="one position per token"):
        engine.add_request(prompt, params(window_tokens=64, sink_tokens=4))
    for policy in ("query(0.1)", "deviation(0.1)"):
        with pytest.raises(InvalidRepair, match="does not give its attention"):
            engine.add_request(prompt, params(repair=policy))
    ask(engine, prompt, params(repair="first(4)"), position_strategy="sequential")


def test_documents_beyond_the_cells_wait_in_host_memory_and_too_many_at_once_are_refused() -> None:
    engine = llama_engine(llama_reader(), blocks=(32, 128), max_cells=32 * 4 + 100, max_moved=100)
    chunks = [chunk[:30] for chunk in documents(8, 12)]
    prompts = [Prompt.from_tokens([2, 3], chunks[first : first + 3], QUESTION) for first in range(0, 12, 3)]
    first = [ask(engine, prompt, params(4)).outputs[0].token_ids for prompt in prompts]
    again = [ask(engine, prompt, params(4)) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in again] == first
    assert all(output.reuse.reused_tokens >= 90 for output in again)
    with pytest.raises(RequestTooLarge, match="have 124 tokens, and this engine reads at most 100 cached tokens"):
        engine.add_request(
            Prompt.from_tokens([2, 3], [chunks[0] + chunks[1], chunks[2] + chunks[3] + [5, 6, 7, 8]], [9]), params(1)
        )


def test_models_and_settings_that_cannot_run_are_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(reader_file().read_bytes()[:5000])
    with pytest.raises(UnsupportedModel):
        load_llama(damaged)
    for key, value in {"block_count": 0, "attention.layer_norm_rms_epsilon": -1.0}.items():  # llama.cpp would abort
        file = save_gguf(tmp_path / "number.gguf", metadata={f"llama.{key}": value})
        with pytest.raises(UnsupportedModel, match=rf"damaged: its llama\.{key} is {value:g}; download it again"):
            load_llama(file)
    with pytest.raises(InvalidConfig, match="f16"):
        load_llama(reader_file(), kv_cache_dtype="int3")
    with pytest.raises(InvalidConfig, match="between 1 and 4096"):
        load_llama(reader_file(), max_positions=5000)
