"""A profile next to a model sets what nobody said; nothing that is wrong with it keeps a model from answering."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import random_adapter
from support.tiny import save_tiny_model

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.errors import InvalidConfig, InvalidProfile
from kvmosaic.model import load_model
from kvmosaic.model.lora import write_adapter
from kvmosaic.repair import DEFAULT_REPAIR
from kvmosaic.tuned_settings import PROFILE_NAME, Goal, Profile, ProfileChoice, TaskResult, write_profile

SMALL = EngineConfig(request_cache_size="1MiB")
FIELDS = ("position_strategy", "chunk_context", "repair")
DEFAULTS = ("auto", "companions", DEFAULT_REPAIR)
MEASURED = ("sequential", "none", "query(0.15)")


pytestmark = pytest.mark.usefixtures("seen_by_caplog")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def measured(folder: Path) -> Profile:
    with opened(folder) as llm:
        fingerprint = llm.model.fingerprint
    return Profile(
        "tiny", fingerprint, *MEASURED, Goal(0.02, 1.0), "2026-03-31", 0, 0.2, (TaskResult("story", 50, 0.9, 1),)
    )


@pytest.fixture
def profile(folder: Path, measured: Profile) -> Iterator[Path]:
    """The profile next to the model, there for one test."""
    path = folder / PROFILE_NAME
    write_profile(measured, path)
    yield path
    path.unlink(missing_ok=True)


def opened(folder: Path, profile: ProfileChoice = True, dtype: str = "float32", **said: str) -> LLM:
    config = ChunkCacheConfig(chunk_cache_size="1MiB", **said)
    return LLM(folder, dtype=dtype, chunk_cache_config=config, engine_config=SMALL, profile=profile, self_check=False)


def settings_of(llm: LLM) -> tuple[str, ...]:
    """What requests are answered with, as the engine has it."""
    llm.close()
    assert llm.engine.chunk_config == llm.chunk_cache_config
    return tuple(getattr(llm.engine.chunk_config, name) for name in FIELDS)


def test_a_model_without_a_profile_is_as_ever(folder: Path) -> None:
    llm = opened(folder)
    assert settings_of(llm) == DEFAULTS
    assert (llm.profile, llm.profile_note) == (None, "")


def test_the_profile_next_to_a_model_sets_what_nobody_said(
    folder: Path, profile: Path, measured: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvmosaic"):
        llm = opened(folder)
    assert settings_of(llm) == MEASURED
    assert llm.profile == measured and llm.chunk_cache_config.chunk_cache_size == "1MiB"
    assert [record.getMessage() for record in caplog.records] == [llm.profile_note]
    assert llm.profile_note == (
        "kvmosaic_profile.json of 2026-03-31 is followed: sequential positions, documents saw: none, "
        "repair query(0.15); 90.0% of full attention on story"
    )


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("values", [DEFAULTS, MEASURED])
def test_what_the_caller_says_counts_also_when_it_is_the_default(
    folder: Path, profile: Path, name: str, values: tuple[str, ...]
) -> None:
    said = dict(zip(FIELDS, values, strict=True))[name]
    llm = opened(folder, **{name: said})
    expected = {**dict(zip(FIELDS, MEASURED, strict=True)), name: said}
    assert settings_of(llm) == tuple(expected.values())
    overruled = f"except for {name}={said!r}, which was asked for, so that what was measured does not hold"
    assert (overruled in llm.profile_note) == (values is DEFAULTS)


def test_false_turns_it_off_and_a_path_names_another_file(
    folder: Path, profile: Path, measured: Profile, tmp_path: Path
) -> None:
    assert settings_of(opened(folder, profile=False)) == DEFAULTS
    other = tmp_path / "other.json"
    write_profile(replace(measured, repair="first(4)"), other)
    for named in (other, str(other)):
        assert settings_of(opened(folder, profile=named)) == (*MEASURED[:2], "first(4)")


def test_a_model_that_is_loaded_already_has_no_folder_but_may_be_given_a_file(folder: Path, profile: Path) -> None:
    loaded = opened(folder, profile=False).model
    options = {
        "chunk_cache_config": ChunkCacheConfig(chunk_cache_size="1MiB"),
        "engine_config": SMALL,
        "self_check": False,
    }
    assert settings_of(LLM(loaded, **options)) == DEFAULTS
    assert settings_of(LLM(loaded, **options, profile=profile)) == MEASURED


def test_without_the_chunk_cache_there_is_nothing_to_follow(folder: Path, profile: Path) -> None:
    llm = LLM(folder, enable_chunk_cache=False, engine_config=SMALL)
    assert settings_of(llm) == DEFAULTS and llm.profile is None


@pytest.mark.parametrize("content", ["", "[]", '{"kvmosaic_profile": 2}', "x" * 70_000, None])
def test_a_file_next_to_the_model_that_is_no_profile_is_passed_over_with_a_warning(
    folder: Path, profile: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if content is None:
        profile.unlink()
        profile.mkdir()
    else:
        profile.write_text(content)
    try:
        llm = opened(folder)
        assert settings_of(llm) == DEFAULTS and llm.profile is None
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", llm.profile_note)]
        assert llm.profile_note.startswith("the model's profile is not followed: ") and str(profile) in caplog.text
        with pytest.raises(InvalidProfile):
            opened(folder, profile=profile)
    finally:
        if content is None:
            profile.rmdir()


def test_the_profile_of_another_model_is_passed_over_with_a_warning(
    folder: Path, profile: Path, measured: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    llm = opened(folder, dtype="float64")
    assert settings_of(llm) == DEFAULTS and llm.profile is None
    assert "was made for another model or dtype (tiny, " in caplog.text and "tune again" in caplog.text
    with pytest.raises(InvalidProfile, match="another model"):
        opened(folder, profile=profile, dtype="float64")


def test_what_is_wrong_with_a_named_file_is_told_before_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidProfile, match="there is no file"):
        LLM(tmp_path / "no-model", profile=tmp_path / "missing.json")
    for wrong in ("", 1, None, ["a"]):
        with pytest.raises(InvalidConfig, match="profile must be True, False or the path of a file"):
            LLM(tmp_path / "no-model", profile=wrong)


@given(st.sets(st.sampled_from(FIELDS)), st.sampled_from([DEFAULTS, MEASURED]))
def test_a_config_knows_which_of_its_fields_somebody_said_also_when_it_is_changed(
    names: set[str], values: tuple[str, ...]
) -> None:
    said = {name: value for name, value in zip(FIELDS, values, strict=True) if name in names}
    config = replace(ChunkCacheConfig(**said), chunk_cache_size="1MiB")
    assert {name for name in FIELDS if config.says(name)} == names
    defaults = dict(zip(FIELDS, DEFAULTS, strict=True))
    assert config == ChunkCacheConfig(chunk_cache_size="1MiB", **{**defaults, **said})


@pytest.fixture
def with_adapter(folder: Path, measured: Profile) -> Iterator[Profile]:
    """The profile next to the model, measured with an adapter in a folder beside it; both there for one test."""
    adapter = random_adapter(load_model(folder, dtype="float32").module)
    write_adapter(adapter, folder / "adapters" / "mine", "tiny")
    profile = replace(measured, adapter="adapters/mine", adapter_digest=adapter.digest)
    write_profile(profile, folder / PROFILE_NAME)
    yield profile
    shutil.rmtree(folder / "adapters")
    (folder / PROFILE_NAME).unlink()


def answer(llm: LLM) -> object:
    """Greedy tokens and their log-probabilities over a document."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    prompt = Prompt.from_tokens((5, 6), [(7, 8, 9, 10)], (11, 12))
    return llm.generate(prompt, params, position_strategy="sequential")[0].outputs[0]


def test_a_profile_with_an_adapter_has_prompts_with_documents_computed_by_it(
    folder: Path, with_adapter: Profile
) -> None:
    with opened(folder) as followed, opened(folder, False) as base:
        named = LLM(folder, dtype="float32", adapter=folder / "adapters" / "mine", profile=False, self_check=False)
        assert followed.profile == with_adapter and "adapter adapters/mine" in followed.profile_note
        settings = {"chunk_cache_config": followed.chunk_cache_config, "engine_config": SMALL}
        with named, LLM(folder, dtype="float32", adapter=folder / "adapters" / "mine", **settings) as same:
            assert answer(followed) == answer(same) != answer(base)
            assert same.profile == with_adapter, "the same adapter, given by name"
    assert settings_of(followed) == MEASURED


def test_a_profile_is_not_followed_with_another_adapter_than_its_own(
    folder: Path, with_adapter: Profile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = random_adapter(load_model(folder, dtype="float32").module, seed=1)
    write_adapter(other, tmp_path / "other", "tiny")
    with LLM(folder, dtype="float32", adapter=tmp_path / "other", engine_config=SMALL, self_check=False) as llm:
        assert llm.profile is None and other.digest[:12] in llm.profile_note
    write_adapter(other, folder / "adapters" / "mine", "tiny")
    with opened(folder) as changed, opened(folder, False) as base:
        assert changed.profile is None and "tune again" in changed.profile_note
        assert answer(changed) == answer(base), "an adapter that nobody measured computes nothing"
    with pytest.raises(InvalidProfile, match="was made with the adapter"):
        opened(folder, profile=folder / PROFILE_NAME)
    shutil.rmtree(folder / "adapters" / "mine")
    with opened(folder) as missing:
        assert missing.profile is None and "which is not there" in missing.profile_note
    (folder / "adapters").mkdir(exist_ok=True)


def test_an_adapter_is_not_used_where_its_profile_is_for_another_type(folder: Path, with_adapter: Profile) -> None:
    with opened(folder, dtype="float64") as llm, opened(folder, False, dtype="float64") as base:
        assert llm.profile is None and answer(llm) == answer(base)


def test_the_adapter_of_a_profile_is_not_merged(folder: Path, with_adapter: Profile) -> None:
    with pytest.raises(InvalidConfig, match="measured beside the weights"):
        LLM(folder, dtype="float32", merge_adapter=True, engine_config=SMALL)


def test_a_profile_of_a_base_model_is_not_followed_with_an_adapter(folder: Path, profile: Path, tmp_path: Path) -> None:
    write_adapter(random_adapter(load_model(folder, dtype="float32").module), tmp_path / "mine", "tiny")
    with LLM(folder, dtype="float32", adapter=tmp_path / "mine", engine_config=SMALL, self_check=False) as llm:
        assert llm.profile is None and "made with no adapter" in llm.profile_note
