"""What the scheduler plans for chunk prompts with tiers, step by step, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvmosaic.vllm.operations import FetchReport, FingerprintReport, Operations
from kvmosaic.vllm.scheduler.chunk_prompts import ChunkPrompt
from kvmosaic.vllm.scheduler.tier_side import Tiering

BLOCK = 4
PROMPT = ChunkPrompt.of((1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11), BLOCK)  # 5 seen, 6 of the chunk, 1 of padding
FULL = ChunkPrompt.of((1, 2, 3, 4, 5), (6, 7, 8), BLOCK)  # no padding


class Blocks:
    """The block pool: what is cached, under whatever names."""

    def __init__(self) -> None:
        self.table = object()
        self.cached = True

    def find(self, hashes: Any) -> Any:
        return tuple(SimpleNamespace(block_id=100 + i) for i in range(len(hashes))) if self.cached else None


class Steps:
    """A scheduler of one chunk prompt at a time, and workers that tell what they are made to."""

    def __init__(self, num_workers: int = 1) -> None:
        self.blocks = Blocks()
        self.num_workers = num_workers
        self.tiering = Tiering(num_workers, BLOCK, 1, 1000, lambda: self.blocks, lambda: 0.0)  # type: ignore[arg-type, return-value]
        self.tiering.on_handshake(dict.fromkeys(range(num_workers), "weights"))
        self.number = 0

    def ask(self, prompt: ChunkPrompt = PROMPT, lora: object = None) -> Any:
        self.number += 1
        request = SimpleNamespace(
            request_id=str(self.number), num_prompt_tokens=len(prompt.token_ids), cache_salt=None, lora_request=lora
        )
        self.tiering.begin(request, prompt)
        return request

    def step(self, *scheduled: Any, is_paused: bool = False) -> Operations:
        done = Operations()
        names = {request.request_id: 1 for request in scheduled}
        self.tiering.operations(done, SimpleNamespace(num_scheduled_tokens=names), is_paused)
        return done

    def admit(self, request: Any, num_external: int) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],))
        self.tiering.on_alloc(request, blocks, num_external)

    def tell(self, done: Operations, *tiers: str) -> None:
        """What each rank found of each fetch: one text for all ranks, or one for each."""
        for fetch, said in zip(done.fetches, tiers, strict=True):
            for rank in range(self.num_workers):
                tier = said.split(",")[rank] if "," in said else said
                self.tiering.on_reports([FetchReport(fetch.number, rank, tier)])

    def compute(self, request: Any) -> Operations:
        """Admits it without anything loaded, finishes it, and gives the next step."""
        self.admit(request, 0)
        self.step(request)
        self.tiering.finished(request.request_id, [b"a", b"b", b"c"])
        return self.step()


def test_what_is_nowhere_is_computed_and_then_stored_in_two_runs():
    steps = Steps()
    request = steps.ask()
    assert steps.tiering.match(request, 0) is None
    steps.tell(steps.step(), "", "")
    assert steps.tiering.match(request, 0) == 0
    stores = steps.compute(request).stores
    assert [(store.run.start, store.run.num_tokens, store.blocks) for store in stores] == [
        (0, 5, (100, 101)),
        (5, 6, (100, 101, 102)),
    ]
    steps.tiering.check_invariants()


def test_what_all_workers_have_is_loaded_but_for_padding():
    steps = Steps(num_workers=2)
    request = steps.ask()
    assert steps.tiering.match(request, 0) is None
    steps.tell(steps.step(), "host", "redis")
    assert steps.tiering.match(request, 4) == 7  # vLLM has a block of four already
    steps.admit(request, 7)
    done = steps.step(request)
    assert [(load.skip, load.start, load.num_tokens, load.blocks) for load in done.loads] == [
        (4, 4, 1, (7, 8, 9)),
        (0, 5, 6, (7, 8, 9)),
    ]
    assert len(done.drops) == 2
    loaded = steps.tiering.finished(request.request_id, [])
    assert loaded is not None
    assert loaded.tier == "redis"
    assert not steps.step().stores
    steps.tiering.check_invariants()


def test_one_token_is_left_to_compute_where_there_is_no_padding():
    steps = Steps()
    request = steps.ask(FULL)
    steps.tiering.match(request, 0)
    steps.tell(steps.step(), "host", "host")
    assert steps.tiering.match(request, 0) == 7
    steps.admit(request, 7)
    assert sum(load.num_tokens for load in steps.step(request).loads) == 7


@pytest.mark.parametrize(("system", "chunk", "matched"), [("host", "host,", 5), ("host,", "host", 0), ("", "host", 0)])
def test_a_run_that_one_worker_lacks_is_computed_with_all_behind_it(system, chunk, matched):
    steps = Steps(num_workers=2)
    request = steps.ask()
    steps.tiering.match(request, 0)
    steps.tell(steps.step(), system, chunk)
    assert steps.tiering.match(request, 0) == matched
    steps.admit(request, matched)
    steps.step(request)
    assert steps.tiering.finished(request.request_id, [b"a", b"b", b"c"]) is None
    assert [store.run.start for store in steps.step().stores] == ([5] if matched else [0, 5])


def test_blocks_that_left_the_cache_before_the_next_step_are_not_stored():
    steps = Steps()
    request = steps.ask()
    steps.tiering.match(request, 0)
    steps.tell(steps.step(), "", "")
    steps.admit(request, 0)
    steps.step(request)
    steps.tiering.finished(request.request_id, [b"a"])
    steps.blocks.cached = False
    assert not steps.step().stores
    steps.blocks.cached = True
    assert not steps.step().stores


def test_a_request_that_goes_while_it_waits_lets_go_of_what_was_fetched():
    steps = Steps()
    request = steps.ask()
    steps.tiering.match(request, 0)
    numbers = [fetch.number for fetch in steps.step().fetches]
    steps.tiering.finished(request.request_id, [])
    done = steps.step()
    assert done.drops == numbers
    assert not done.stores
    steps.tiering.check_invariants()


def test_with_an_adapter_nothing_is_asked_for():
    steps = Steps()
    assert steps.tiering.match(steps.ask(lora=object()), 0) == 0
    assert not steps.step().fetches


@pytest.mark.parametrize("is_told", [False, True])
def test_when_the_prefix_cache_is_forgotten_the_weights_are_looked_at_before_anything_is_used(is_told):
    steps = Steps()
    before = steps.ask()
    steps.tiering.match(before, 0)
    old = steps.step()
    steps.tell(old, "host", "host")
    if is_told:
        steps.tiering.reset()
    else:
        steps.blocks.table = object()
    assert steps.tiering.match(before, 0) is None
    assert steps.step(is_paused=True).fingerprint_round is None
    done = steps.step()
    assert done.fingerprint_round is not None
    steps.tell(old, "host", "host")  # too late: they are not these any more
    assert steps.tiering.match(before, 0) is None
    steps.tiering.on_reports([FingerprintReport(done.fingerprint_round, 0, "other weights")])
    assert steps.tiering.match(before, 0) is None
    new = steps.step()
    assert not {fetch.run.key for fetch in new.fetches} & {fetch.run.key for fetch in old.fetches}
    steps.tell(new, "", "")
    assert steps.tiering.match(before, 0) == 0


def test_weights_that_cannot_be_told_apart_turn_the_tiers_off_until_they_can():
    steps = Steps()
    for fingerprint, expected in (("", 0), ("weights", None)):
        steps.tiering.reset()
        number = steps.step().fingerprint_round
        assert number is not None
        steps.tiering.on_reports([FingerprintReport(number, 0, fingerprint)])
        assert steps.tiering.match(steps.ask(), 0) == expected
        assert bool(steps.step().fetches) is (expected is None)


def test_of_a_text_the_system_text_alone_is_loaded_and_stored():
    prompt = ChunkPrompt.of((1, 2, 3, 4, 5), (6, 7), BLOCK, is_text=True)
    steps = Steps()
    request = steps.ask(prompt)
    assert steps.tiering.match(request, 0) is None
    first = steps.step()
    assert [fetch.run.start for fetch in first.fetches] == [0]
    steps.tell(first, "host")
    assert steps.tiering.match(request, 0) == 5
    steps.admit(request, 5)
    assert [load.num_tokens for load in steps.step(request).loads] == [5]
    assert steps.tiering.finished(request.request_id, [b"a", b"b"]) is None, "the text was computed"
    assert not steps.step().stores
    alone = steps.ask(ChunkPrompt.of((), (6, 7), BLOCK, is_text=True))
    assert steps.tiering.match(alone, 0) == 0
    steps.tiering.check_invariants()
