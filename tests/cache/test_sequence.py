"""A sequence as an object: whatever is appended, forked and freed, each text's tokens stand in its own slots."""

from __future__ import annotations

from typing import Any

from cache.world import make_kv_cache
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.cache.kv_cache import CachedSequence

BLOCK = 4


class Memory(dict[int, int]):
    """A token in each slot."""

    def copy_blocks(self, copies: Any) -> None:
        for source, target in copies:
            for place in range(BLOCK):
                self[target * BLOCK + place] = self.get(source * BLOCK + place, -1)

    def compute(self, sequence: CachedSequence, text: list[int]) -> None:
        for slot, token in zip(sequence.slots, text[sequence.num_computed :], strict=True):
            self[slot] = token
        sequence.computed()

    def read(self, sequence: CachedSequence) -> list[int]:
        blocks = sequence.block_ids
        return [self[blocks[place // BLOCK] * BLOCK + place % BLOCK] for place in range(len(sequence))]


@given(st.data())
def test_each_sequence_reads_its_own_tokens(data: st.DataObject) -> None:
    kv_cache, memory = make_kv_cache(block_size=BLOCK, request_blocks=256), Memory()
    running: list[tuple[CachedSequence, list[int]]] = []
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["new", "append", "fork", "free"])) if running else "new"
        number = data.draw(st.integers(0, len(running) - 1)) if running else 0
        if action == "new":
            text = data.draw(tokens)
            sequence = kv_cache.sequence(text)
            memory.copy_blocks(sequence.copies)
            running.append((sequence, text))
        elif action == "append":
            sequence, text = running[number]
            added = data.draw(tokens)
            memory.copy_blocks(sequence.append(*added))
            text += added
        elif action == "fork":
            sequence, text = running[number]
            running.append((sequence.fork(), [*text]))
        else:
            running.pop(number)[0].free()
            continue
        memory.compute(*running[-1 if action in ("new", "fork") else number])
        for sequence, text in running:
            assert memory.read(sequence) == text
            assert sequence.num_computed == len(sequence) and not sequence.slots
    for sequence, _ in running:
        sequence.free()
        sequence.free()
    kv_cache.check_invariants()


def test_a_cached_beginning_is_shared() -> None:
    kv_cache = make_kv_cache(block_size=BLOCK)
    first = kv_cache.sequence([1, 2, 3, 4, 5])
    assert first.num_computed == 0 and len(first.slots) == 5
    first.computed()
    second = kv_cache.sequence([1, 2, 3, 4, 6])
    assert second.num_computed == 4 and second.block_ids[0] == first.block_ids[0]
    assert len(second.slots) == 1 and second.slots[0] not in range(first.block_ids[0] * BLOCK, BLOCK)
