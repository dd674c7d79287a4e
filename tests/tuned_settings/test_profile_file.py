"""The file of a profile: what is written is read again, and whatever else may lie there is refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.errors import InvalidProfile
from kvmosaic.tuned_settings import MAX_PROFILE_BYTES, Goal, Profile, TaskResult, read_profile, write_profile

PROFILE = Profile(
    model="reader",
    fingerprint="0123456789abcdef" * 4,
    position_strategy="sequential",
    chunk_context="system",
    repair="query(0.15)",
    goal=Goal(loss=0.02, max_work=0.5),
    date="2026-03-31",
    seed=7,
    work=0.21,
    tasks=(TaskResult("two-hop", 50, 0.92, 0.96), TaskResult("story", 50, 0.9, 0.9)),
)
shares = st.floats(0, 1)
maybe = st.none() | shares
ADAPTERS = st.fixed_dictionaries(
    {
        "adapter": st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=40),
        "adapter_digest": st.text("0123456789abcdef", min_size=64, max_size=64),
    }
)
profiles = st.builds(
    Profile,
    model=st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=40),
    fingerprint=st.text("0123456789abcdef", min_size=64, max_size=64),
    position_strategy=st.sampled_from(["shared", "sequential"]),
    chunk_context=st.sampled_from(["system", "none"]),
    repair=st.sampled_from(["none", "first(16)", "deviation(0.15)", "names", "full"]),
    goal=st.builds(Goal, maybe, st.floats(0, 100), st.booleans(), maybe, maybe),
    date=st.dates().map(str),
    seed=st.integers(-(2**63), 2**63 - 1),
    work=st.floats(0, 100),
    tasks=st.lists(
        st.builds(TaskResult, st.text("abc-", min_size=1), st.integers(1, 10**7), maybe, maybe, maybe, maybe, maybe),
        min_size=1,
        max_size=4,
    ).map(tuple),
).flatmap(lambda profile: st.just(profile) | ADAPTERS.map(lambda fields: replace(profile, **fields)))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def changed(place: str, value: Any) -> dict[str, Any]:
    """The fields of a good profile with another value somewhere; `...` leaves it out."""
    content = json.loads(json.dumps(PROFILE.to_dict()))
    *outer, name = place.split("/")
    inner: Any = content
    for key in outer:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is ...:
        del inner[name]
    else:
        inner[name] = value
    return content


def test_what_was_reached_is_told_with_and_without_answers() -> None:
    near = TaskResult("own", 40, None, None, divergence=0.0123, agreement=0.965)
    assert PROFILE.reached == "97.8% of full attention on two-hop, story"
    unlabelled = replace(PROFILE, tasks=(near,))
    assert unlabelled.reached == "divergence 0.012 nats, 96.5% of the greedy tokens on own" and unlabelled.ratio is None


@given(profiles)
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    write_profile(PROFILE, path)
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert [each.name for each in path.parent.iterdir()] == ["profile.json"]


@given(anything)
def test_whatever_json_lies_there_is_a_profile_or_refused(content: Any) -> None:
    with pytest.raises(InvalidProfile):
        Profile.from_dict(content)


@given(st.sampled_from(sorted(PROFILE.to_dict())), anything)
def test_one_wrong_field_is_noticed(name: str, value: Any) -> None:
    content = {**PROFILE.to_dict(), name: value}
    try:
        read = Profile.from_dict(content)
    except InvalidProfile as error:
        assert name in str(error)
    else:
        assert read.to_dict() == content


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("kvmosaic_profile", 3, "its format kvmosaic_profile is 3, and this version reads 5; tune again"),
        ("kvmosaic_profile", ..., "its format kvmosaic_profile is None"),
        ("adapter", ["mine"], "adapter: Input should be a valid string, got ['mine']"),
        ("adapter_digest", "0" * 63, "adapter_digest: String should match pattern"),
        ("repair", "most", "repair: repair is 'most'; choose one of none"),
        ("repair", "query(2)", "query(fraction) computes this share"),
        ("position_strategy", "absolute", "position_strategy: it must be sequential or shared"),
        ("fingerprint", ..., "there is no 'fingerprint'"),
        ("fingerprint", "٣" * 64, "String should match pattern"),
        ("model", "\x1b[2J", "it must be printable characters"),
        ("goal", [], "goal: Input should be"),
        ("goal/loss", 1.5, "goal.loss: Input should be less than or equal to 1, got 1.5"),
        ("goal/is_reached", 1, "goal.is_reached: Input should be a valid boolean, got 1"),
        ("goal/looss", 0.1, "goal: 'looss' is unknown"),
        ("seed", True, "seed: Input should be a valid integer, got True"),
        ("seed", 2**63, "seed: Input should be less than"),
        ("date", "yesterday", "String should match pattern"),
        ("tasks", [], "at least 1 item"),
        ("tasks/1/accuracy", -0.1, "tasks[1].accuracy: Input should be greater than or equal to 0, got -0.1"),
        ("tasks/0/cases", 0, "tasks[0].cases: Input should be greater than or equal to 1, got 0"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, place: str, value: Any, told: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(changed(place, value)))
    with pytest.raises(InvalidProfile) as raised:
        read_profile(path)
    assert str(raised.value).startswith(f"{path}: ") and told in str(raised.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"a": NaN}', "is not JSON"),
        (b"[" * 60_000, "is not JSON"),
        (b"9" * 60_000, "is not JSON"),
        (b" " * (MAX_PROFILE_BYTES + 1), "has more than 65536 bytes"),
    ],
    ids=["empty", "bytes", "nan", "deep", "digits", "large"],
)
def test_files_that_are_none_are_refused(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(InvalidProfile, match=told):
        read_profile(path)


def test_places_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.json", Path("a\0b")):
        with pytest.raises(InvalidProfile):
            read_profile(path)
    for path in (tmp_path / "missing" / "profile.json", tmp_path):
        with pytest.raises(InvalidProfile, match="name another file with --profile FILE"):
            write_profile(PROFILE, path)
    assert list(tmp_path.iterdir()) == []


def test_share_of_full_attention_is_that_of_the_means() -> None:
    assert PROFILE.ratio == pytest.approx(0.91 / 0.93)
    assert TaskResult("order", 5, 0.0, 0.0).ratio == 1.0
