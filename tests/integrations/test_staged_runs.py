"""Runs on their way from tiers to workers, without vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.errors import InvalidConfig
from kvmosaic.vllm.operations import FetchReport, StoredRun
from kvmosaic.vllm.scheduler.chunk_prompts import ChunkPrompt
from kvmosaic.vllm.scheduler.staged_runs import MISS_SECONDS, Staging
from kvmosaic.vllm.scheduler.tier_side import engine_fingerprint, stored_runs
from kvmosaic.vllm.settings import tier_config

PROMPT = ChunkPrompt.of((1, 2, 3), (4, 5, 6, 7), 16)


def run(number: int, num_tokens: int = 4) -> StoredRun:
    return StoredRun("model", bytes([number]), b"root", 0, bytes(4 * num_tokens))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_one_rank_does_not_have_is_used_by_none_and_held_by_none():
    staging = Staging(2, 1000)
    (staged,) = staging.want("a", [run(1)], 1)
    assert staging.on_report(FetchReport(staged.number, 0, "disk")) is None
    staging.fetches.clear()
    assert staging.on_report(FetchReport(staged.number, 1, "")) is staged
    assert staged.is_over
    assert not staged.tier
    assert staging.drops == [staged.number]
    assert staging.num_bytes == 0


def test_a_run_is_asked_for_once_for_all_who_wait_and_kept_until_the_last_has_loaded_it():
    staging = Staging(1, 1000)
    (staged,) = staging.want("a", [run(1)], 1)
    assert staging.want("b", [run(1)], 1) == [staged]
    assert len(staging.fetches) == 1
    staging.fetches.clear()
    staging.on_report(FetchReport(staged.number, 0, "host"))
    staging.release("a")
    assert staging.drops == []
    staging.release("b")
    assert staging.drops == [staged.number]
    assert len(staging) == 0


def test_a_run_that_was_never_sent_for_need_not_be_dropped():
    staging = Staging(1, 1000)
    staging.want("a", [run(1)], 1)
    staging.release("a")
    assert staging.fetches == staging.drops == []


def test_a_miss_is_remembered_for_a_moment_or_until_the_run_is_stored():
    clock = Clock()
    staging = Staging(1, 1000, clock)
    for end in ("stored", "later", "known"):
        (staged,) = staging.want("a", [run(1)], 1)
        if end == "known":
            break
        assert staged is not None
        staging.on_report(FetchReport(staged.number, 0, ""))
        staging.release("a")
        assert staging.want("b", [run(1)], 1) == [None]
        staging.release("b")
        if end == "stored":
            staging.stored([run(1).key])
        else:
            clock.now += MISS_SECONDS + 0.1
    assert staged is not None


def test_beyond_its_bytes_nothing_is_fetched_but_one_prompt_always_is():
    staging = Staging(1, 10)
    assert staging.want("large", [run(1, 8), run(2, 8)], 1) is not None
    assert staging.want("next", [run(3)], 1) is None
    assert staging.want("same", [run(1, 8)], 1) is not None
    staging.release("large")
    assert staging.want("next", [run(3)], 1) is None  # "same" still waits for 8 bytes
    staging.release("same")
    assert staging.want("next", [run(3)], 1) is not None


def test_who_holds_one_run_and_has_no_room_for_another_lets_go_so_that_others_go_on():
    staging = Staging(1, 20)
    assert staging.want("a", [run(1, 8)], 1)
    assert staging.want("b", [run(2, 8)], 1)
    assert staging.want("a", [run(3, 8), run(1, 8)], 1) is None  # what both saw left vLLM's cache meanwhile
    found = staging.want("b", [run(3, 8), run(2, 8)], 1)
    assert found is not None
    assert all(found)
    staging.release("b")
    assert staging.want("a", [run(3, 8), run(1, 8)], 1)
    staging.check_invariants()


def test_one_prompt_alone_gets_more_than_there_is_room_for_in_two_parts_as_well():
    staging = Staging(1, 10)
    assert staging.want("a", [run(1, 8)], 1)
    assert staging.want("a", [run(3, 8), run(1, 8)], 1)


@settings(deadline=None, max_examples=examples(200))
@given(st.data())
def test_whatever_happens_bytes_and_waiters_add_up(data):
    staging, held = Staging(2, 40), {0: set(), 1: set()}  # numbers that each rank was asked for and not told to drop
    sent = []
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["want", "hear", "release", "step", "clear"])):
            case "want":
                keys = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True))
                staging.want(data.draw(st.sampled_from("abcd")), [run(key, 4 + key) for key in keys], 1)
            case "hear" if sent:
                rank, tier = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(["host", ""]))
                staging.on_report(FetchReport(data.draw(st.sampled_from(sent)), rank, tier))
            case "release":
                staging.release(data.draw(st.sampled_from("abcd")))
            case "clear":
                staging.clear()
            case "step":
                for numbers in held.values():
                    numbers.update(fetch.number for fetch in staging.fetches)
                    numbers.difference_update(staging.drops)
                sent += [fetch.number for fetch in staging.fetches]
                staging.fetches, staging.drops = [], []
        staging.check_invariants()
    for waiter in "abcd":
        staging.release(waiter)
    staging.check_invariants()
    assert len(staging) == staging.num_bytes == 0
    assert all(numbers <= set(staging.drops) for numbers in held.values())


def test_runs_are_named_by_all_they_depend_on_and_not_by_the_size_of_a_block():
    system, chunk = stored_runs(PROMPT, "model", "")
    assert (system.start, system.num_tokens, chunk.start, chunk.num_tokens) == (0, 3, 3, 4)
    assert stored_runs(ChunkPrompt.of((1, 2, 3), (4, 5, 6, 7), 32), "model", "") == (system, chunk)
    others = [
        stored_runs(PROMPT, "another", ""),
        stored_runs(PROMPT, "model", "salt"),
        stored_runs(ChunkPrompt.of((1, 2, 9), (4, 5, 6, 7), 16), "model", ""),
        stored_runs(ChunkPrompt.of((1, 2), (3, 4, 5, 6, 7), 16), "model", ""),
        stored_runs(ChunkPrompt.of((), (4, 5, 6, 7), 16), "model", ""),
        stored_runs(ChunkPrompt.of((1, 2, 3), (4, 5, 6, 8), 16), "model", ""),
    ]
    keys = {runs[-1].key for runs in others}
    assert len(keys) == len(others)
    assert chunk.key not in keys
    (alone,) = stored_runs(ChunkPrompt.of((), (1, 2, 3), 16), "model", "")
    assert alone == system  # the system text is stored once, whoever needs it


def test_an_engine_has_a_fingerprint_only_if_all_its_workers_have_one():
    assert engine_fingerprint(["a", ""]) == engine_fingerprint([]) == ""
    assert engine_fingerprint(["a", "b"]) not in (engine_fingerprint(["b", "a"]), engine_fingerprint(["ab"]), "")


def test_urls_with_passwords_come_from_variables_and_so_does_the_secret():
    said = {"tiers": ["host:1MiB", "env:PLACE"], "loading": "always", "staged": "1MiB"}
    config = tier_config(said, {"PLACE": "redis://:pass@host/0 ", "KVMOSAIC_CHUNK_SECRET": "something"})
    assert config is not None
    assert config.chunk_tier == ("host:1MiB", "redis://:pass@host/0")
    assert (config.chunk_loading, config.chunk_staged, config.chunk_secret) == ("always", "1MiB", "something")
    assert tier_config({}, {}) is None
    assert tier_config({"tiers": []}, {}) is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tiers": "host:1MiB"}, "give a list"),
        ({"tiers": [1]}, "give a list"),
        ({"tiers": ["env:NOWHERE"]}, "no variable 'NOWHERE'"),
        ({"tiers": ["host:1MiB"], "codec": "int8"}, "entries must be exact"),
        ({"tiers": ["nonsense"]}, "named by a URL"),
        ({"tiers": ["host:1MiB"], "loading": "often"}, "loading is 'often'"),
        ({"tiers": ["host:1MiB"], "staged": "much"}, "much"),
    ],
)
def test_what_cannot_be_configured_is_refused(said, message):
    with pytest.raises(InvalidConfig, match=message):
        tier_config(said, {})


def test_a_copy_of_a_run_counts_as_the_same():
    staging = Staging(1, 1000)
    (staged,) = staging.want("a", [run(1)], 1)
    assert staging.want("b", [replace(run(1))], 1) == [staged]
