"""`kvmosaic vllm serve`: vLLM's command line, with ours where the user has given nothing."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from kvmosaic.cli import app
from kvmosaic.errors import InvalidConfig
from kvmosaic.vllm.front import command
from kvmosaic.vllm.front.command import serving
from kvmosaic.vllm.settings import document_cache, is_composing_required, tier_config

MIDDLEWARE = "kvmosaic.vllm.ComposedDocuments"
CONNECTOR = '{"kv_connector": "kvmosaic", "kv_role": "kv_both"}'


def shown(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["vllm", "serve", *arguments, "--show"])
    assert result.exit_code == 0, result.output
    return shlex.split(result.stdout)


def test_options_of_vllm_stay_in_their_order_and_ours_come_behind() -> None:
    given = ["--max-model-len", "2048", "some/model", "-tp", "2", "--middleware", "a.B", "-O3"]
    words = shown(*given)
    assert words[: 2 + len(given)] == ["vllm", "serve", *given]
    added = words[2 + len(given) :]
    assert added[::2] == ["--kv-transfer-config", "--middleware", "--enable-prefix-caching"]
    assert json.loads(added[1]) == {"kv_connector": "kvmosaic", "kv_role": "kv_both"}
    assert added[3] == MIDDLEWARE


@pytest.mark.parametrize(
    "own",
    [
        ["--kv-transfer-config", CONNECTOR],
        [f"--kv-transfer-config={CONNECTOR}"],
        ["--kv_transfer_config", CONNECTOR],
        ["--kv-transfer-config.kv_connector", "kvmosaic"],
        ["--kv-transfer-config.kv_connector=kvmosaic", "--kv-transfer-config.kv_role=kv_both"],
        ["--middleware", MIDDLEWARE],
        ["--middleware", "kvmosaic.vllm.front.middleware.ComposedDocuments"],
        ["--enable-prefix-caching"],
    ],
)
def test_what_the_user_gives_is_not_given_again(own: list[str]) -> None:
    name = own[0].replace("_", "-").partition("=")[0].partition(".")[0]
    arguments = serving(["model", *own], {}).arguments
    given = sum(argument.replace("_", "-").startswith(name) for argument in own)
    assert sum(argument.replace("_", "-").startswith(name) for argument in arguments) == given


def test_a_front_end_without_middleware_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    assert shown("m")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(InvalidConfig, match="runs no middleware"):
        serving(["m"], {})


def test_our_choices_become_variables() -> None:
    assert shown("m", "--repair", "first(16)", "--position-strategy", "shared", "--preamble", "all")[:3] == [
        "KVMOSAIC_POSITION_STRATEGY=shared", "KVMOSAIC_PREAMBLE=all", "KVMOSAIC_REPAIR=first(16)",
    ]  # fmt: skip


def test_composing_is_required_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown("m", "--require-composing")[0] == "KVMOSAIC_REQUIRE_COMPOSING=1"
    assert shown("m")[0] == "vllm"
    for extra, value, is_required in (({}, "true", True), ({"require_composing": False}, "1", False), ({}, "0", False)):
        assert is_composing_required(extra, {"KVMOSAIC_REQUIRE_COMPOSING": value}) is is_required
    assert is_composing_required({"require_composing": True}, {})
    with pytest.raises(InvalidConfig, match="'yes'"):
        is_composing_required({"require_composing": "yes"}, {})
    monkeypatch.setenv("KVMOSAIC_REQUIRE_COMPOSING", "maybe")
    with pytest.raises(InvalidConfig, match="'maybe'; give 1 or 0"):
        serving(["m"], {})


@pytest.mark.parametrize(
    ("arguments", "choices"),
    [
        ([], {}),
        (["m"], {"repair": "5"}),
        (["m"], {"position_strategy": "absolute"}),
        (["m", "--no-enable-prefix-caching"], {}),
        (["m", "--kv-transfer-config", '{"kv_connector": "OffloadingConnector"}'], {}),
        (["kvmosaic", "--kv-transfer-config={}"], {}),
    ],
)
def test_what_cannot_work_is_told_before_vllm_starts(arguments: list[str], choices: dict[str, str]) -> None:
    with pytest.raises(InvalidConfig):
        serving(arguments, choices)


def test_how_documents_are_read_is_a_variable_of_every_process() -> None:
    assert shown("m", "--document-reads", "in-place")[0] == "KVMOSAIC_DOCUMENT_READS=in-place"
    with pytest.raises(InvalidConfig, match="choose 'copy' or 'in-place'"):
        serving(["m"], {"document_reads": "zero-copy"})


@pytest.mark.parametrize("own", [[], ["--enforce-eager"], ["-O2"], ["-cc.mode=3"], ["--compilation_config", "{}"]])
def test_documents_read_in_place_need_piecewise_graphs_unless_graphs_are_chosen(own: list[str]) -> None:
    added = serving(["m", *own], {"document_reads": "in-place"}).arguments
    assert ('{"cudagraph_mode": "PIECEWISE"}' in added) == (not own)
    assert "PIECEWISE" not in str(serving(["m", *own], {"document_reads": "copy"}).arguments)


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        (None, 50),
        ("0", 0),
        (0, 0),
        ("none", 0),
        (0.25, 25),
        ("25%", 25),
        (1, 100),
        ("320 tokens", 20),
        ("1KiB", 2),
        (2048, 4),
        ("1TiB", 100),
    ],
)
def test_the_bound_of_the_document_pool_is_a_fraction_tokens_or_bytes(size: object, blocks: int) -> None:
    extra = {} if size is None else {"document_cache_size": size}
    config = document_cache(extra, {})
    assert config.max_blocks(num_blocks=100, block_size=16, block_bytes=512) == blocks
    assert config.policy.name == "priority"


@pytest.mark.parametrize("size", ["1.5", "-1", "200%", "some", "", "0.5GiBs", True])
def test_a_bound_that_is_none_is_refused_with_examples(size: object) -> None:
    with pytest.raises(InvalidConfig, match=r"document_cache_size is .*(such as 0.5, '100000 tokens'|at most 1)"):
        document_cache({"document_cache_size": size}, {})


def test_the_document_pool_is_set_by_flags() -> None:
    assert shown("m", "--document-cache-size", "0.3", "--document-eviction", "lru")[:2] == [
        "KVMOSAIC_DOCUMENT_CACHE_SIZE=0.3", "KVMOSAIC_DOCUMENT_EVICTION=lru",
    ]  # fmt: skip
    with pytest.raises(InvalidConfig, match="'fifo'; choose 'lru'"):
        serving(["m"], {"document_eviction": "fifo"})
    environ = {"KVMOSAIC_DOCUMENT_CACHE_SIZE": "0.3", "KVMOSAIC_DOCUMENT_EVICTION": "lfu"}
    assert document_cache({"document_cache_size": "0.1"}, environ).fraction == 0.1, "the connector's own comes first"
    assert document_cache({}, environ).policy.name == "lfu"


def test_variables_that_cannot_be_are_told_before_vllm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOSAIC_REPAIR", "abc")
    with pytest.raises(InvalidConfig, match="'abc'"):
        serving(["m"], {})
    serving(["m"], {"repair": "first(2)"})  # the flag comes first


def test_tiers_become_a_configuration_and_passwords_variables_that_are_not_shown() -> None:
    said = shown(
        *("m", "--chunk-tier", "host:1GiB", "--chunk-tier", "redis://:hidden-word@cache:6379/0"),
        *("--chunk-loading", "always"),
    )
    assert "hidden-word" not in " ".join(said)
    launch = serving(["m"], {}, ["host:1GiB", "redis://:hidden-word@cache:6379/0"], "always")
    assert launch.variables == {"KVMOSAIC_VLLM_TIER_2": "redis://:hidden-word@cache:6379/0"}
    configuration = json.loads(launch.arguments[launch.arguments.index("--kv-transfer-config") + 1])
    extra = configuration["kv_connector_extra_config"]
    assert extra == {"tiers": ["host:1GiB", "env:KVMOSAIC_VLLM_TIER_2"], "loading": "always"}
    config = tier_config(extra, launch.variables)
    assert config is not None
    assert config.chunk_tier == ("host:1GiB", "redis://:hidden-word@cache:6379/0")


@pytest.mark.parametrize(
    ("arguments", "tiers", "loading"),
    [
        (["m", "--kv-transfer-config", "{}"], ["host:1GiB"], None),
        (["m"], ["host"], None),
        (["m"], ["host:1GiB"], "often"),
        (["m"], [], "always"),
        (["m", "--kv-transfer-config", CONNECTOR], [], "always"),
    ],
)
def test_tiers_that_cannot_be_are_told_before_vllm_starts(
    arguments: list[str], tiers: list[str], loading: str | None
) -> None:
    with pytest.raises(InvalidConfig):
        serving(arguments, {}, tiers, loading)


def test_without_vllm_there_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["vllm", "serve", "m"])
    assert result.exit_code == 2 and "pip install" in result.stderr


def test_vllm_takes_the_place_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[Any] = []
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execve", lambda *given: run.append(given))
    assert CliRunner().invoke(app, ["vllm", "serve", "m", "--repair", "first(2)"]).exit_code == 0
    [(program, arguments, variables)] = run
    assert program == sys.executable
    assert arguments[1:5] == ("-m", "vllm.entrypoints.cli.main", "serve", "m")
    assert variables["KVMOSAIC_REPAIR"] == "first(2)" and variables["PATH"] == os.environ["PATH"]
