"""What chunks in tiers are called, held against a plain list of what was noted."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.cache import Key
from kvmosaic.engine.chunk_offloader import MAX_NAMES, OffloadedKeys


@dataclass
class Noted:
    """What is read of a chunk."""

    key: Key
    names: dict[str, None]
    tenant: str = ""
    salt: str = ""


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


NAMES = st.sampled_from(["a", "b", "a (1/2)", "a (2/2)", "b (1/1)"])
CHUNKS = st.builds(
    lambda number, names: Noted(key(number), dict.fromkeys(names), tenant=f"t{number % 2}", salt=f"s{number % 3}"),
    st.integers(0, 5),
    st.lists(NAMES, max_size=3),
)


@given(st.lists(CHUNKS | st.integers(0, 5).map(key), max_size=30))
def test_names_find_what_was_noted_and_not_discarded(steps: list[Noted | bytes]) -> None:
    kept, plain = OffloadedKeys(), dict[Key, Noted]()
    for step in steps:
        if isinstance(step, bytes):
            kept.discard(Key(step))
            plain.pop(Key(step), None)
        elif step.names:
            kept.note(step)  # type: ignore[arg-type]
            before = plain.get(step.key)
            names = {**(before.names if before else {}), **step.names}
            plain[step.key] = Noted(step.key, names, step.tenant, step.salt)
        kept.check_invariants()
    for tenant in ("t0", "t1"):
        for name in ("a", "b", "a (1/2)", "c"):
            for salt in (None, "s0", "s1"):
                for with_parts in (False, True):
                    expected = {
                        one.key
                        for one in plain.values()
                        if one.tenant == tenant
                        and salt in (None, one.salt)
                        and any(n == name or (with_parts and n.partition(" (")[0] == name) for n in one.names)
                    }
                    assert set(kept.named(name, salt, tenant, with_parts=with_parts)) == expected


def test_the_oldest_keys_are_forgotten() -> None:
    kept = OffloadedKeys(max_keys=2)
    for number in range(3):
        kept.note(Noted(key(number), {"a": None}))  # type: ignore[arg-type]
    kept.check_invariants()
    assert kept.named("a", "", "") == [key(1), key(2)]


def test_the_names_of_one_chunk_are_bounded() -> None:
    kept = OffloadedKeys()
    for number in range(MAX_NAMES + 5):
        kept.note(Noted(key(1), {f"n{number}": None}))  # type: ignore[arg-type]
    kept.check_invariants()
    assert len(kept.names(key(1))) == MAX_NAMES and not kept.named("n0", "", "")
