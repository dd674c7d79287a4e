from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvmosaic.config import ChunkCacheConfig, variable_of
from kvmosaic.errors import InvalidConfig
from kvmosaic.server.config_fields import MAX_FILE_BYTES
from kvmosaic.server.options import panel_of, serve_app
from kvmosaic.server.read import ARGUMENTS, flag_of, read_settings
from kvmosaic.server.settings import ServerSettings, is_variable_only

SECRET = "sk-nobody-may-read-this"
NUMBERS = {
    "port": (0, 65_535),
    "max_model_len": (1, 2**27),
    "drain_seconds": (0, 86_400),
    "max_num_seqs": (1, 65_536),
    "max_num_batched_tokens": (1, 2**20),
    "block_size": (1, 4_096),
    "max_chunks": (1, 10**8),
    "max_section_tokens": (16, 10**7),
    "max_chunk_tokens": (1, 10**7),
    "max_prompt_chunks": (1, 10**6),
    "log_stats_seconds": (0, 86_400),
    "max_waiting": (1, 10**7),
    "num_threads": (1, 1_024),
    "document_ttl": (0, 366 * 86_400),
    "document_version_seconds": (0, 366 * 86_400),
    "max_documents": (1, 10**6),
    "max_documents_bytes": (1, 2**40),
    "max_queue": (0, 10**6),
    "max_queue_per_tenant": (0, 10**6),
    "max_body_bytes": (1_024, 2**30),
    "request_cpu_seconds": (0.001, 1e5),
}


def file(folder: Path, text: str) -> dict[str, str]:
    path = folder / "server.yaml"
    path.write_text(text, encoding="utf-8")
    return {"config": str(path)}


def test_flag_wins_over_variable_over_file_over_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = file(tmp_path, "port: 1\nmax-queue: 2\nmax_num_seqs: 3\n")
    monkeypatch.setenv("KVMOSAIC_PORT", "10")
    monkeypatch.setenv("KVMOSAIC_MAX_QUEUE", "20")
    settings = read_settings({**named, "port": "100"})
    assert (settings.port, settings.max_queue, settings.max_num_seqs) == (100, 20, 3)
    assert settings.block_size == ServerSettings.model_fields["block_size"].default


def test_variable_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVMOSAIC_CONFIG", file(tmp_path, "served_model_name: [a, b]")["config"])
    assert read_settings().model_names == ("a", "b")


def test_variable_holds_several_values_between_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOSAIC_API_KEY", f"{SECRET}, other-key")
    assert [key.get_secret_value() for key in read_settings().api_key] == [SECRET, "other-key"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"port": "99999"}, "--port is '99999'; it must be at most 65535"),
        ({"find_documents": "all"}, "--find-documents is 'all'; choose 'none', or some of auto, agents, patterns"),
        ({"preamble": "Today"}, "--preamble is 'Today'; choose 'auto', 'all'"),
        ({"otlp_traces_endpoint": "localhost:4317"}, "--otlp-traces-endpoint is 'localhost:4317'; it must be the URL"),
        ({"port": "http"}, "--port is 'http'; it must be a whole number"),
        ({"max_num_seqs": "0"}, "--max-num-seqs is '0'; it must be at least 1"),
        ({"chunk_cache_fraction": "1"}, "--chunk-cache-fraction is '1'; it must be below 1"),
        ({"drain_seconds": "nan"}, "--drain-seconds is 'nan'; it must be"),
        ({"dtype": "int8"}, "--dtype is 'int8'; it must be 'auto'"),
        ({"prepack": "yes"}, "--prepack is 'yes'; it must be 'auto', 'always' or 'never'"),
        ({"chunk_cache_size": "much"}, "--chunk-cache-size is 'much'; 'much' is not a size; write"),
        ({"chunk_separator": " "}, "--chunk-separator is ' ';"),
        ({"ssl_keyfile": "key.pem"}, "--ssl-keyfile and --ssl-certfile belong together"),
        ({"served_model_name": [""]}, "--served-model-name is ['']; it must be at most 1000 texts of 1 to 1024"),
    ],
)
def test_message_names_the_flag_the_value_and_the_limit(flags: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_settings(flags)
    assert str(caught.value).startswith(said)


def test_message_names_the_variable_or_the_key_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"server\.yaml: port is 'x'; it must be a whole number$"):
        read_settings(file(tmp_path, "port: x"))
    monkeypatch.setenv("KVMOSAIC_PORT", "x")
    with pytest.raises(InvalidConfig, match=r"^KVMOSAIC_PORT is 'x'; it must be a whole number$"):
        read_settings()


def test_mistyped_names_are_errors_that_name_the_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no setting is called 'max_num_seq'; did you mean 'max_num_seqs'"):
        read_settings(file(tmp_path, "max_num_seq: 3"))
    with pytest.raises(InvalidConfig, match="no setting is called 'config'"):
        read_settings(file(tmp_path, "config: other.yaml"))
    monkeypatch.setenv("KVMOSAIC_MAX_QUEU", "3")
    with pytest.raises(InvalidConfig, match="KVMOSAIC_MAX_QUEU; did you mean 'KVMOSAIC_MAX_QUEUE'"):
        read_settings()


def test_variables_that_are_read_when_a_model_is_loaded_are_no_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOSAIC_ATTENTION", "native")
    monkeypatch.setenv("KVMOSAIC_CPU_ISA", "avx2")
    assert read_settings().dtype == "auto"


@pytest.mark.parametrize("text", ["- a\n- b\n", "text", "{", "\t- :", "!!python/object:os.system {}", "? [a]\n: 1"])
def test_file_that_is_not_a_mapping_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"server\.yaml"):
        read_settings(file(tmp_path, text))


def test_file_that_is_missing_or_huge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"cannot read .*nowhere\.yaml: No such file"):
        read_settings({"config": str(tmp_path / "nowhere.yaml")})
    with pytest.raises(InvalidConfig, match="bytes; a file of settings is smaller"):
        read_settings(file(tmp_path, "#" * (MAX_FILE_BYTES + 1)))


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    named = file(tmp_path, "# nothing\n")
    assert read_settings(named).model_dump(exclude={"config"}) == ServerSettings().model_dump(exclude={"config"})


@pytest.mark.parametrize("bad", [SECRET + "\n", "ключ-" + SECRET, SECRET + " x", "x" * 2_000 + SECRET])
def test_keys_are_never_in_a_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: str) -> None:
    with pytest.raises(InvalidConfig, match="--api-key") as caught:
        read_settings({"api_key": [bad, "\x7f"]})
    assert SECRET not in str(caught.value)
    with pytest.raises(InvalidConfig) as caught:
        read_settings(file(tmp_path, f"api_key: {{a: {SECRET}}}"))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("key", ["short", "x" * 7, "eight ch", "schlüssel"])
def test_key_keeps_to_the_rule_of_the_file_of_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str) -> None:
    rule = "must be 8 to 1024 printable ASCII characters without spaces, since it travels in a header"
    with pytest.raises(InvalidConfig, match=f"^--api-key {rule}$"):
        read_settings({"api_key": [SECRET, key]})
    entry = tmp_path / "keys.yaml"
    entry.write_text(f"- key: '{key}'", encoding="utf-8")
    with pytest.raises(InvalidConfig, match=f"entry 1: key {rule}$"):
        read_settings({"keys_file": entry}).access_keys()
    monkeypatch.setenv("KVMOSAIC_API_KEY", key)
    with pytest.raises(InvalidConfig, match=f"^KVMOSAIC_API_KEY {rule}$"):
        read_settings()


def test_key_of_eight_characters_will_do() -> None:
    assert len(read_settings({"api_key": ["sk-12345"]}).access_keys()) == 1


def test_keys_are_not_printed() -> None:
    settings = read_settings({"api_key": [SECRET]})
    assert SECRET not in repr(settings) + str(settings) + settings.model_dump_json()


@given(st.sampled_from(sorted(NUMBERS)), st.integers(-(2**70), 2**70) | st.floats())
def test_every_number_has_limits(name: str, value: float) -> None:
    low, high = NUMBERS[name]
    kinds = str(ServerSettings.model_fields[name].annotation)
    fits = low <= value <= high and ("float" in kinds or value == int(value))
    if fits:
        assert getattr(read_settings({name: value}), name) == value
    else:
        with pytest.raises(InvalidConfig, match=flag_of(name)):
            read_settings({name: value})


def test_every_numeric_setting_is_among_those_with_limits() -> None:
    numeric = {name for name, field in ServerSettings.model_fields.items() if field.annotation in (int, float)}
    optional = {
        name for name, field in ServerSettings.model_fields.items() if field.annotation in (int | None, float | None)
    }
    assert numeric | optional == {*NUMBERS, "chunk_cache_fraction", "memory_utilization"}


def test_settings_become_those_of_the_cache_and_the_engine() -> None:
    settings = read_settings({"chunk_cache_fraction": "0.5", "chunk_separator": "##", "max_num_seqs": "7"})
    assert settings.llm_config().chunk_cache.chunk_cache_fraction == 0.5
    assert settings.llm_config().chunk_cache.chunk_separator == "##"
    assert settings.llm_config().engine.max_num_seqs == 7
    assert ServerSettings().llm_config().chunk_cache.chunk_separator is None
    assert read_settings({"chunk_separator": ""}).llm_config().chunk_cache.chunk_separator is None
    assert ServerSettings().llm_config().engine.num_threads is None
    assert read_settings({"num_threads": "3"}).llm_config().engine.num_threads == 3


def test_every_setting_of_python_arrives_from_flag_variable_and_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = {
        **{"max_chunks": 7, "max_chunk_tokens": 99, "max_prompt_chunks": 5, "hash_algorithm": "xxh3_128"},
        **{
            "verify_tokens": False,
            "log_stats_seconds": 2.5,
            "companions": "prose",
            "memory_utilization": 0.5,
        },
    }

    def arrived() -> list[object]:
        config = read_settings(given).llm_config()
        return [getattr(config.chunk_cache, name) for name in wanted] + [config.engine.max_waiting]

    given: dict[str, object] = {**wanted, "max_waiting": 3}
    assert arrived() == [*wanted.values(), 3]
    given = file(tmp_path, "".join(f"{name}: {value}\n" for name, value in given.items()))
    assert arrived() == [*wanted.values(), 3]
    given = {}
    for name, value in {**wanted, "max_waiting": 3}.items():
        monkeypatch.setenv(variable_of(name), str(value))
    assert arrived() == [*wanted.values(), 3]
    assert read_settings({"log_stats_seconds": "0"}).llm_config().chunk_cache.log_stats_seconds is None


def test_an_empty_separator_switches_one_off_that_was_configured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = file(tmp_path, "chunk_separator: '##'")
    assert read_settings(flags).chunk_separator == "##"
    assert read_settings({**flags, "chunk_separator": ""}).chunk_separator is None
    monkeypatch.setenv("KVMOSAIC_CHUNK_SEPARATOR", "")
    assert read_settings(flags).chunk_separator is None


def test_tiers_are_urls_in_order_with_their_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    urls = ["host:1GiB", f"disk:{tmp_path}?quota=1GiB", "redis://user:pass-word@cache:6379/0"]
    monkeypatch.setenv("KVMOSAIC_CHUNK_SECRET", SECRET)
    config = read_settings({"chunk_tier": urls, "chunk_codec": "int8", "chunk_pending": "1MiB"}).llm_config().tiers
    assert config.chunk_tier == tuple(urls)
    assert (config.chunk_codec, config.chunk_secret, config.chunk_pending) == ("int8", SECRET, "1MiB")
    listed = "".join(f"\n- '{url}'" for url in urls)
    assert read_settings(file(tmp_path, f"chunk_tier:{listed}")).tier_urls == tuple(urls)
    monkeypatch.setenv("KVMOSAIC_CHUNK_TIER", ",".join(urls))
    assert read_settings().tier_urls == tuple(urls)
    monkeypatch.delenv("KVMOSAIC_CHUNK_TIER")
    assert read_settings().llm_config().tiers.chunk_tier == ()


def test_secret_of_the_tiers_is_a_variable_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="'chunk_secret' is no setting of a file; set the variable KVMOSAIC_C"):
        read_settings(file(tmp_path, f"chunk_secret: {SECRET}"))
    result = CliRunner().invoke(serve_app(lambda settings, read: None), ["--chunk-secret", SECRET])
    assert result.exit_code == 2 and "No such option" in result.output
    monkeypatch.setenv("KVMOSAIC_CHUNK_SECRET", "short")
    with pytest.raises(InvalidConfig, match=r"^KVMOSAIC_CHUNK_SECRET must be a text of 8 to 1024 characters"):
        read_settings()


def test_passwords_and_the_secret_of_tiers_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOSAIC_CHUNK_SECRET", SECRET)
    settings = read_settings({"chunk_tier": [f"redis://user:{SECRET}@cache:6379/0"]})
    assert SECRET not in repr(settings) + str(settings) + settings.model_dump_json()
    for url in (f"redis://user:{SECRET}@cache:x/0", f"carrier-pigeon://{SECRET}", f"s3://{SECRET}@b/p?{SECRET}=1"):
        try:
            read_settings({"chunk_tier": [url]})
        except InvalidConfig as error:
            assert str(error).startswith("--chunk-tier: ") and SECRET not in str(error)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"chunk_tier": ["disk:/var/cache/kvmosaic"]}, "--chunk-tier: a disk tier needs a quota"),
        (
            {"chunk_tier": ["tape:/dev/st0"]},
            "--chunk-tier: there is no tier of kind 'tape'; write one such as host:4GiB",
        ),
        ({"chunk_tier": ["host:much"]}, "--chunk-tier: 'much' is not a size"),
        ({"chunk_tier": ["host:1GiB"] * 9}, "--chunk-tier: 9 tiers are too many; give at most 8"),
        ({"chunk_codec": "int2"}, "--chunk-codec is 'int2'; it must be 'none' or 'int8'"),
        ({"chunk_pending": "0"}, "--chunk-pending is '0'; a size must be"),
        ({"chunk_staged": "2PiB"}, "--chunk-staged is '2PiB'; '2PiB' is not a size"),
        ({"chunk_tier": ["host:1GiB"], "enable_chunk_cache": False}, "--chunk-tier needs the chunk cache"),
    ],
)
def test_tiers_that_cannot_be_are_refused_in_words_of_the_flag(flags: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_settings(flags)
    assert str(caught.value).startswith(said)


def test_every_setting_is_an_option_and_is_passed_on() -> None:
    seen: list[ServerSettings] = []
    arguments = ["folder", "--port", "1", "--no-enable-chunk-cache", "--served-model-name", "a,b"]
    arguments += ["--served-model-name", "c", "--chunk-cache-fraction", "0.25"]
    result = CliRunner().invoke(serve_app(lambda settings, read: seen.append(settings)), arguments)
    assert result.exit_code == 0, result.output
    assert (seen[0].model, seen[0].port, seen[0].enable_chunk_cache) == ("folder", 1, False)
    assert seen[0].model_names == ("a,b", "c") and seen[0].chunk_cache_fraction == 0.25


def test_documents_in_sections_have_two_names_of_a_flag() -> None:
    for flag in ("--long-chunks", "--long-documents"):
        seen: list[ServerSettings] = []
        arguments = [flag, "sections", "--max-section-tokens", "300"]
        assert (
            CliRunner().invoke(serve_app(lambda settings, read, to=seen: to.append(settings)), arguments).exit_code == 0
        )
        assert (seen[0].long_chunks, seen[0].max_section_tokens) == ("sections", 300)


def test_help_lists_every_setting_in_its_group_without_torch_and_fastapi() -> None:
    code = (
        "import sys; from kvmosaic.cli import app\n"
        "try: app(['serve', '--help-all'])\n"
        "except SystemExit as done: print(done.code, set(sys.modules) & {'torch', 'transformers', 'fastapi'})"
    )
    result = subprocess.run(
        (sys.executable, "-c", code), capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert result.stdout.splitlines()[-1] == "0 set()"
    for name, field in ServerSettings.model_fields.items():
        is_flag = name not in ARGUMENTS and not is_variable_only(field)
        assert (f" {flag_of(name)} " in result.stdout) == is_flag, name
        assert f"─ {panel_of(field)} ─" in result.stdout


def test_documentation_lists_every_setting_as_it_is() -> None:
    text = (Path(__file__).parents[2] / "docs" / "server" / "running.md").read_text(encoding="utf-8")
    for name, field in ServerSettings.model_fields.items():
        label = variable_of(name) if is_variable_only(field) else flag_of(name)
        row = f"| `{label}` | {default_text(field.default)} | {field.description} |"
        assert row in text, f"run python scripts/settings_tables.py, which writes this row:\n{row}"


def default_text(default: object) -> str:
    if default in (None, (), ""):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def test_what_is_not_said_of_documents_is_left_to_the_profile_of_the_model() -> None:
    fields = ("position_strategy", "chunk_context", "repair")
    config = read_settings().llm_config().chunk_cache
    assert (config, [name for name in fields if config.says(name)]) == (ChunkCacheConfig(chunk_separator=None), [])
    said = {"position_strategy": "shared", "chunk_context": "system", "repair": "none"}
    assert all(read_settings(said).llm_config().chunk_cache.says(name) for name in fields)
    assert read_settings({"repair": "query(0.15)"}).llm_config().chunk_cache.repair == "query(0.15)"


@pytest.mark.parametrize(("text", "choice"), [("auto", True), ("none", False), ("a/none", "a/none")])
def test_profile_is_that_of_the_model_or_none_or_a_file(text: str, choice: object) -> None:
    assert read_settings({"profile": text}).llm_config().model.profile == choice
    assert read_settings().llm_config().model.profile is True


def test_repair_that_does_not_exist_is_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidConfig, match=r"^--repair is 'most'; choose one of none, first\(k\)"):
        read_settings({"repair": "most"})
    with pytest.raises(InvalidConfig, match=r"^--profile is ' '; it must be auto, none or the path of a file"):
        read_settings({"profile": " "})
