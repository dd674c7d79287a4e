"""Chunks outlive the process that computed them: the Python face with tiers, on the bundled reader and real places."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import pytest
from support.cpu_time import least_cpu_seconds
from support.families import build
from support.server import loaded_reader

from kvmosaic import LLM, ChunkCacheConfig, Prompt, SamplingParams, TierConfig
from kvmosaic.entries import Checksum
from kvmosaic.errors import EngineAsleep, InvalidConfig
from kvmosaic.model import LoadedModel
from kvmosaic.tiers import Deadline, Tier, open_tiers

GREEDY = SamplingParams(temperature=0, max_tokens=8, repair="first(8)")
"""The documents are alike, and would be read in full."""
DOCUMENTS = [
    {"id": f"ferry {number}", "text": f"Ferry {number} goes to Oak Island at {number} o'clock and is painted green."}
    for number in range(1, 7)
]
MESSAGES = [{"role": "user", "content": "When does ferry 3 go?"}]


def open_llm(*tiers: str, capacity: int | str = "64MiB", **options: object) -> LLM:
    config = TierConfig(
        chunk_tier=tiers, **{"chunk_loading": "always", **options}
    )  # however fast this machine computes
    return LLM(tier_config=config, chunk_cache_config=ChunkCacheConfig(chunk_cache_size=capacity), self_check=False)


def ask(llm: LLM, documents: list[dict[str, str]] = DOCUMENTS):
    return llm.chat(MESSAGES, GREEDY, documents=documents)[0]


def loaded(llm: LLM) -> int:
    return llm.get_chunk_cache_stats().loaded_chunks


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_another_process_answers_from_the_same_folder(tmp_path, codec) -> None:
    url = f"disk:{tmp_path}?quota=1GiB"
    with open_llm(url, chunk_codec=codec) as first:
        expected = ask(first)
    with open_llm(url, chunk_codec=codec) as second:
        found = ask(second, DOCUMENTS[::-1])
        notes = [segment.note for segment in found.reuse.segments if segment.kind == "chunk"]
        assert set(notes) == {"loaded from disk" if codec == "none" else f"loaded from disk, {codec}"}
        again = [segment.note for segment in ask(second).reuse.segments if segment.kind == "chunk"]
        assert set(again) == {"" if codec == "none" else f"stored as {codec}"}, "what was lost stays lost"
        assert loaded(second) == 6 and second.get_chunk_cache_stats().computed_tokens == 0
    assert found.outputs[0].text == expected.outputs[0].text


def test_what_an_earlier_version_stored_otherwise_is_computed_again(tmp_path) -> None:
    url = f"disk:{tmp_path}?quota=1GiB"
    with open_llm(url) as first:
        expected = ask(first)
    for path in tmp_path.rglob("*.safetensors"):
        entry = bytearray(path.read_bytes().replace(b'"codec":"none"', b'"codec":"int4"'))
        Checksum().close(entry)
        path.write_bytes(entry)
    with open_llm(url) as second:
        assert ask(second).outputs[0].text == expected.outputs[0].text
        assert loaded(second) == 0 and second.engine.offloader.tiered_store.stats.invalid == 6
    with open_llm(url) as third:
        ask(third)
        assert loaded(third) == 6, "it was stored again"


def test_chunks_with_keys_of_another_hash_are_found_in_the_same_folder(tmp_path) -> None:
    config = ChunkCacheConfig(chunk_cache_size="64MiB", hash_algorithm="xxh3_128")
    tiers = TierConfig((f"disk:{tmp_path}?quota=1GiB",), chunk_loading="always")
    with LLM(chunk_cache_config=config, tier_config=tiers, self_check=False) as first:
        expected = ask(first)
        assert {len(chunk.key) for chunk in first.chunks.entries()} == {16}
    with LLM(chunk_cache_config=config, tier_config=tiers, self_check=False) as second:
        found = ask(second)
        assert loaded(second) == 6 and found.outputs[0].text == expected.outputs[0].text
    with open_llm() as slow:
        assert ask(slow).outputs[0].text == expected.outputs[0].text


def test_a_small_device_with_a_host_and_a_disk_answers_as_a_large_one(tmp_path) -> None:
    chance = random.Random(0)
    documents = [{"id": str(n), "text": f"House {n} has {chance.randrange(99)} doors. " * 6} for n in range(12)]
    token = loaded_reader("auto").bytes_per_token()
    tiers, capacity = (f"host:{340 * token}", f"disk:{tmp_path}?quota=1GiB"), 264 * token
    with open_llm(*tiers, capacity=capacity) as small, open_llm() as large:
        for _ in range(10):
            chosen = chance.sample(documents, 4)
            assert ask(small, chosen).outputs[0].text == ask(large, chosen).outputs[0].text
        small.engine.check_invariants()
        assert small.get_chunk_cache_stats().evictions > 0 and loaded(small) > 0


def test_ten_thousand_chunks_on_disk_are_ready_at_once_and_only_the_question_is_computed(tmp_path) -> None:
    url = f"disk:{tmp_path}?quota=1GiB"
    with open_llm(url) as first:
        ask(first)
    for number in range(10_000):
        name = number.to_bytes(32, "little").hex()
        folder = tmp_path / name[:2]
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.safetensors").write_bytes(b"x" * 64)
    with open_llm() as plain:  # the model's files are in memory by now
        ask(plain)
    opened: list[Tier] = []
    assert least_cpu_seconds(lambda: opened.extend(open_tiers([url])), tries=1) < 1.0
    [tier] = opened
    assert tier.stat().num_entries == 10_006
    tier.close()
    with open_llm(url) as second:
        reuse = ask(second).reuse
        assert all(segment.computed_tokens == 0 for segment in reuse.segments if segment.kind == "chunk")
        assert loaded(second) == 6


def test_novel_orders_without_end_neither_grow_nor_slow_down(tmp_path) -> None:
    chance = random.Random(1)
    model = LoadedModel.from_module(build("llama"))
    documents = [[chance.randrange(3, 128) for _ in range(64)] for _ in range(12)]
    url = f"disk:{tmp_path}?quota=1GiB"
    config = ChunkCacheConfig(chunk_cache_size="2MiB")
    tiers = TierConfig((url,), chunk_loading="always")
    with LLM(model, tier_config=tiers, chunk_cache_config=config, self_check=False) as llm:
        offloader = llm.engine.offloader
        assert offloader is not None
        seconds, controls, sizes = [], [], []
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        for number in range(500):
            chosen = chance.sample(documents, 6)
            prompt = Prompt.from_tokens([5, 6, 7], chosen, [chance.randrange(3, 128) for _ in range(4)])
            begin = time.thread_time()
            llm.generate(prompt, one)
            middle = time.thread_time()
            llm.generate(Prompt.plain([chance.randrange(3, 128) for _ in range(8)]), one)
            seconds.append(middle - begin)
            controls.append(time.thread_time() - middle)
            if number % 100 == 50:
                assert offloader.tiered_store.flush(10)
                sizes.append(offloader.tiered_store.tier_stats()[0].num_bytes)
        assert len(set(sizes)) == 1, "bytes stored do not grow"
        # by prompts without documents at the same moments: a machine whose clock changes slows both
        first, last = (
            statistics.median(seconds[part]) / statistics.median(controls[part])
            for part in (slice(20, 120), slice(-100, None))
        )
        assert last <= 1.25 * first, "what grows with every prompt would double"


def test_a_secret_keeps_others_out(tmp_path) -> None:
    url = f"disk:{tmp_path}?quota=1GiB"
    with open_llm(url, chunk_secret="correct horse") as first:
        ask(first)
    with open_llm(url, chunk_secret="battery staple") as second:
        ask(second)
        assert loaded(second) == 0 and second.engine.offloader.tiered_store.stats.invalid == 6
    with open_llm(url) as third:
        ask(third)
        assert loaded(third) == 0
    with open_llm(url, chunk_secret="correct horse") as fourth:
        ask(fourth)
        assert loaded(fourth) == 6, "nobody has put them aside"


def test_deleted_documents_are_gone_from_the_disk(tmp_path) -> None:
    with open_llm(f"disk:{tmp_path}?quota=1GiB") as llm:
        ask(llm)
        assert llm.engine.offloader.tiered_store.flush(10)
        assert len(list(tmp_path.rglob("*.safetensors"))) == 6
        llm.chunks.delete("ferry 2")
        assert llm.engine.offloader.tiered_store.flush(10)
        assert len(list(tmp_path.rglob("*.safetensors"))) == 5


def test_sleep_and_wake_keep_the_answer_and_refuse_meanwhile(tmp_path) -> None:
    with open_llm("host:64MiB") as llm:
        expected = ask(llm)
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(EngineAsleep, match="wake it first"):
                ask(llm)
            llm.wake()
            assert ask(llm).outputs[0].text == expected.outputs[0].text


def test_cold_chunks_move_to_the_tiers_and_come_back(tmp_path) -> None:
    with open_llm("host:64MiB") as llm:
        expected = ask(llm)
        assert llm.sleep_cold_chunks(min_accesses=5, idle_seconds=0) == 6
        assert llm.get_chunk_cache_stats().cached_chunks == 0
        assert ask(llm).outputs[0].text == expected.outputs[0].text and loaded(llm) == 6
    with open_llm() as llm, pytest.raises(InvalidConfig, match="there are none"):
        llm.sleep_cold_chunks()


@pytest.mark.parametrize(
    ("tiers", "options", "words"),
    [
        (("disk",), {}, "begins with its kind"),
        (("tape:/dev/st0",), {}, "no tier of kind 'tape'"),
        ((3,), {}, "a tier is a URL"),
        (("host:1MiB",) * 9, {}, "at most 8"),
        (("host:1MiB",), {"chunk_codec": "int4"}, "'none' or 'int8'"),
        (("host:1MiB",), {"chunk_loading": "never"}, "'auto' or 'always'"),
        (("host:1MiB",), {"chunk_secret": "short"}, "8 to 1024"),
        (("host:1MiB",), {"chunk_pending": "much"}, "is not a size"),
    ],
)
def test_wrong_settings_are_named(tiers, options, words) -> None:
    with pytest.raises(InvalidConfig, match=words):
        open_llm(*tiers, **options)


def test_what_cannot_be_is_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    missing = str(tmp_path / "no model")
    with pytest.raises(InvalidConfig, match=r"needs a quota: disk:/x\?quota="):
        LLM(missing, tier_config=TierConfig(("disk:/x",)))
    with pytest.raises(InvalidConfig, match="switched off; leave out one of the two"):
        LLM(missing, tier_config=TierConfig(("host:1MiB",)), enable_chunk_cache=False)
    with pytest.raises(InvalidConfig, match="must be a TierConfig, got str; write TierConfig"):
        LLM(missing, tier_config="host:1MiB")


def test_a_tier_of_ones_own_may_be_given(tmp_path) -> None:
    from support.tiers import TroubledTier

    own = TroubledTier("own")
    with LLM(tier_config=TierConfig((own,)), self_check=False) as llm:
        ask(llm)
    assert len(own.entries) == 6 and own.is_closed
    assert own.exists_many(list(own.entries), Deadline()) == set(own.entries)


def test_a_host_tier_takes_its_memory_from_where_it_is_told() -> None:
    """On a GPU that is pinned memory, which cannot be had here."""
    from kvmosaic.tiers import open_tiers

    taken: list[int] = []

    def allocate(count: int) -> memoryview:
        taken.append(count)
        return memoryview(bytearray(count))

    tier, _ = open_tiers(["host:1MiB", "memory:"], allocate=allocate)
    key = bytes(32)
    tier.put_many({key: b"entry"}, Deadline())
    assert taken == [5] and bytes(tier.get_many([key], Deadline())[key]) == b"entry"


def test_a_folder_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidConfig, match="file"):
        open_llm(f"disk:{tmp_path / 'file'}?quota=1GiB")
