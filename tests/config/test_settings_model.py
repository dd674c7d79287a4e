"""One settings model: a field is declared once, and everything that takes or shows it is made from that."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, TierConfig
from kvmosaic.cli import app
from kvmosaic.config import ALL_CONFIGS, LLMConfig, ModelConfig, flag_of, setting_named, settings_of
from kvmosaic.console.options import option
from kvmosaic.errors import InvalidConfig
from kvmosaic.server.settings import ServerSettings

SOURCE = Path(__file__).parents[2] / "src" / "kvmosaic"
SETTINGS = {name: each for config in ALL_CONFIGS for name, each in settings_of(config).items()}
MAX_PARAMETERS = 12
WIDE = {
    *("llm.py:__init__", "llm.py:chat", "llm.py:stream", "vllm/front/python_api.py:chat"),
    "attention/triton/kernel.py:attend_walks",
    "attention/triton/kernel.py:store_rows",
}
"""The faces of the library, which name each choice as vLLM's do; a kernel, whose arguments are pointers and strides."""
OTHER_MEANING = {
    ("bench", "dtype"),  # several dtypes, one after the other
    ("bench", "engine"),  # compared engines
    ("tune", "profile"),  # the file that is written
    ("tune", "repair"),  # the policies that are tried
    ("eval", "repair"),
    ("bench", "eviction"),  # several policies, of simulated caches
    ("bench", "position_strategy"),  # no auto: engines are compared under one layout
    ("demo", "position_strategy"),
    ("warm", "chunk_cache_size"),  # memory for documents under way
    ("serve", "position_strategy"),  # inside vLLM, as are the next three
    ("serve", "chunk_context"),
    ("serve", "repair"),
}


def test_every_setting_has_help_in_sentences_and_bounds_if_it_is_a_number() -> None:
    for name, each in SETTINGS.items():
        assert each.help.endswith("."), f"{name}: write a sentence"
        assert each.panel, name
        if each.kind is int:
            assert each.low is not None and each.high is not None, name
        if each.kind is float:
            assert each.above is not None and (each.high is None) != (each.below is None), name


def test_no_two_settings_have_one_name() -> None:
    assert len(SETTINGS) == sum(len(fields(config)) for config in ALL_CONFIGS)


def test_every_setting_of_python_is_one_of_the_server_and_never_declared_beside_it() -> None:
    shared = set(SETTINGS)
    assert shared <= set(ServerSettings.model_fields)
    assert not shared & set(ServerSettings.__annotations__), "declare a setting in kvmosaic.config only"
    for name in shared:
        assert ServerSettings.model_fields[name].description == SETTINGS[name].flag_help()
    assert all(field.description for field in ServerSettings.model_fields.values())


def test_every_option_of_a_command_that_has_the_name_of_a_setting_has_its_help() -> None:
    seen = set()
    for command, options in commands():
        for each in options:
            if each.name in SETTINGS and (command, each.name) not in OTHER_MEANING:
                assert each.help == option(each.name).help, f"{command} {each.name}: take option({each.name!r})"
                assert flag_of(each.name) in each.opts
                seen.add(each.name)
    assert {"dtype", "num_threads", "chunk_tier", "chunk_cache_size", "chunk_separator", "repair"} <= seen


def test_no_text_of_a_setting_is_written_twice() -> None:
    sources = {path: " ".join(path.read_text("utf-8").split()) for path in SOURCE.rglob("*.py")}
    for name, each in SETTINGS.items():
        start = re.escape(each.help[:40]).replace(r"\ ", r'[" ]+')
        found = [str(path) for path, text in sources.items() if re.search(rf'help=f?"{start}', text)]
        assert len(found) <= 1, f"{name} is explained in {found}"


def test_keyword_arguments_of_the_llm_are_the_fields_of_the_model_configuration() -> None:
    arguments = inspect.signature(LLM).parameters
    for each in fields(ModelConfig):
        assert arguments[each.name].default == each.default, each.name
    assert set(LLMConfig().keywords()) <= set(arguments)


def test_values_by_name_become_configurations() -> None:
    config = LLMConfig.from_values({"max_num_seqs": 3, "log_stats_seconds": 0, "chunk_codec": "int8", "repair": None})
    assert (config.engine.max_num_seqs, config.tiers.chunk_codec) == (3, "int8")
    assert config.chunk_cache.log_stats_seconds is None
    assert not config.chunk_cache.says("repair"), "the model's profile may set it"
    assert config.chunk_cache == ChunkCacheConfig() and config.model == ModelConfig()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ChunkCacheConfig(chunk_cache_fraction=1), "a number above 0 and below 1, got 1"),
        (lambda: ChunkCacheConfig(memory_utilization=1.2), "memory_utilization must be a number above 0 and below 1"),
        (
            lambda: ChunkCacheConfig(memory_utilization=0.5, chunk_cache_fraction=0.25),
            "chunk_cache_fraction=0.25 and memory_utilization=0.5 both set the size of the chunk cache; give one",
        ),
        (lambda: ChunkCacheConfig(log_stats_seconds=0), "a number above 0 and at most 86400, got 0"),
        (lambda: ChunkCacheConfig(long_chunks="cut"), "long_chunks is 'cut'; choose 'error' or 'split' or 'sections'"),
        (lambda: EngineConfig(max_num_seqs=0), "max_num_seqs must be a whole number between 1 and 65536, got 0"),
        (lambda: EngineConfig(swap_space=False), "a size must be a whole number of bytes"),
        (lambda: TierConfig(chunk_secret="short"), "chunk_secret must be a text of 8 to 1024 characters, got 5"),
    ],
)
def test_message_has_the_name_the_value_and_the_limit(build, message) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        build()


def test_secrets_are_not_shown() -> None:
    shown = repr(TierConfig(chunk_tier=("redis://user:hidden@host",), chunk_secret="hidden secret"))
    assert "hidden" not in shown and setting_named("chunk_secret").is_secret


def test_no_function_has_more_than_twelve_parameters() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                if count + bool(given.vararg) + bool(given.kwarg) > MAX_PARAMETERS:
                    found.add(f"{path.relative_to(SOURCE).as_posix()}:{node.name}")
    assert found <= WIDE, "eight arguments mean a dataclass is missing; a command takes option groups"


def commands():
    """The commands with their options, those of groups of commands as well."""
    waiting = list(get_command(app).commands.items())
    while waiting:
        name, command = waiting.pop()
        waiting += list(getattr(command, "commands", {}).items())
        yield name, [each for each in command.params if each.param_type_name == "option"]
