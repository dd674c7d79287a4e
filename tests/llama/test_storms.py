"""Storms of prompts, aborts, evictions, sleep and failing tiers over llama.cpp, with few sequences and small pools."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine.test_edits_storm import prompts_of_edits
from engine.test_offloader_attacks import MEBIBYTE, Truth, flat, prompts, storm, with_tiers
from llama.test_families import WINDOWED, model, some_prompt
from support.engine_conformance import Reference, ask, params, run
from support.gguf_families import family_model
from support.llama_engine import llama_engine, llama_reader
from support.tiers import TroubledTier

from kvmosaic.engine import Engine
from kvmosaic.engine.request import Request
from kvmosaic.errors import RequestTooLarge
from kvmosaic.llama import cells, runner
from kvmosaic.prompt import Prompt

ROUNDING = 0.1
"""Maximum difference of keys and values of about 10: llama.cpp's sums depend on what else is in a forward."""
TIE = 0.1
"""Tokens whose log probabilities differ by less are equally likely, but for rounding."""


class LlamaTruth(Truth):
    """What every chunk must be, but for rounding."""

    def check_answer(self, found: tuple[int, ...], prompt: Prompt, strategy: str) -> None:
        right = self.ask(prompt, strategy)
        differing = [number for number, pair in enumerate(zip(found, right, strict=False)) if pair[0] != pair[1]]
        if not differing:
            return
        first = differing[0]
        greedy = params(first + 1, logprobs=20)
        likely = ask(self._engine, prompt, greedy, position_strategy=strategy).outputs[0].logprobs
        assert likely is not None
        best = max(each.logprob for each in likely[first].values())
        assert likely[first][found[first]].logprob > best - TIE, (found, right)

    def check(self, engine: Engine) -> None:
        storage = engine.runner.storages["chunk_cache"]
        for chunk in engine.kv_cache.chunks():
            if chunk.is_ready:
                found = flat(storage.read_chunk(chunk.block_ids, chunk.num_tokens))
                for one, other in zip(found, self._chunks[chunk.key], strict=True):
                    assert (one - other).abs().max() < ROUNDING, f"wrong keys or values in {chunk.key.hex()}"


@pytest.fixture(autouse=True)
def cells_rest_soon_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "IDLE_ROWS", 16)
    monkeypatch.setattr(runner, "_FIRST_CELLS", 16)


@pytest.mark.parametrize("seed", range(4))
def test_no_storm_makes_a_wrong_chunk_or_leaks_anything(seed: int) -> None:
    model = llama_reader()
    asked = prompts_of_edits(seed, 20) if seed % 2 else prompts(seed, 25)
    truth = LlamaTruth(llama_engine(model, blocks=(512, 1024), max_moved=4096, num_sequences=255))
    for prompt, strategy in asked:
        truth.ask(prompt, strategy)
    chance = random.Random(seed + 100)
    host, disk = TroubledTier("host", is_persistent=False), TroubledTier("disk")
    for _ in range(2):
        engine = llama_engine(
            model,
            blocks=(30, 26),
            max_moved=chance.choice([64, 512]),
            max_cells=chance.choice([None, 250]),
            num_sequences=chance.choice([5, 16, 64]),
            max_rows=chance.choice([8, 64]),
            prefix_caching=chance.random() < 0.7,
            engine_options={
                "max_num_batched_tokens": chance.choice([8, 64]),
                "max_num_seqs": chance.choice([3, 8]),
            },
        )
        offloader = with_tiers(engine, host, disk, staged=chance.choice([1, 20_000, MEBIBYTE]))
        storm(engine, offloader, truth, asked, chance, (host, disk))
    assert host.entries or disk.entries


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("seed", range(3))
def test_no_storm_of_windows_finds_no_room(family: str, seed: int) -> None:
    """Few cells, and fewer sequences than one prompt has windows: whatever is admitted is answered, and right."""
    chance, reference = random.Random(seed), Reference(family_model(family), 0.05)
    engine = llama_engine(
        model(family),
        blocks=(60, 60),
        max_moved=(64, 240)[seed % 2],
        max_cells=400,
        num_sequences=(5, 8, 16)[seed],
        max_rows=chance.choice([5, 64]),
        engine_options={"max_num_batched_tokens": chance.choice([4, 64]), "max_num_seqs": chance.choice([3, 8])},
    )
    asked: list[tuple[Request, Prompt, dict[str, Any]]] = []
    while len(asked) < 14 or not all(request.is_finished for request, *_ in asked):
        if len(asked) < 14 and chance.random() < 0.5:
            kind = chance.choice(["plain", "preamble", "glue", "absolute"])
            strategy = "absolute" if kind == "absolute" else chance.choice(["shared", "sequential"])
            context = "system" if kind == "absolute" else chance.choice(["system", "system", "none"])
            placing = {"position_strategy": strategy, "chunk_context": context}
            prompt, tokens = some_prompt(chance, kind), chance.choice([3, 20])
            asked.append((engine.add_request(prompt, params(tokens), **placing), prompt, placing))
        engine.step()
    for request, prompt, placing in asked:
        assert request.error is None
        reference.check(engine, prompt, request.output(), **placing)
    engine.check_invariants()


def test_a_prompt_of_more_tokens_than_cells_is_refused_alone() -> None:
    engine = llama_engine(model("gemma3"), blocks=(60, 60), max_cells=300, num_sequences=8)
    document = list(range(20, 60))
    request = engine.add_request(Prompt.from_tokens([5], [document], [9]), params(8))
    with pytest.raises(RequestTooLarge, match="have 80 tokens, and this engine reads at most 60 cached tokens"):
        engine.add_request(Prompt.from_tokens([5], [document, document], [9]), params(1))
    run(engine, [request])
    assert request.error is None
