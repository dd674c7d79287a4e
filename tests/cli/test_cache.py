"""`kvmosaic cache` on real tiers: what is shown and found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.redis import RedisServer
from typer.testing import CliRunner, Result

from kvmosaic import LLM, ChunkCacheConfig, TierConfig
from kvmosaic.cli import app
from kvmosaic.errors import TierUnavailable
from kvmosaic.tiers import Deadline, open_tier
from kvmosaic.tiers.disk.tier import DiskTier

SYSTEM = "Answer."
TEXTS = {"ferry": "The ferry goes to Oak Island.", "kiln": "The kiln of Brackwater burns lime.", "mill": "Oats."}


def run(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=dict(environment))


def fields(result: Result) -> dict:
    return json.loads(result.stdout)


def fill(model: Path, url: str, **options: object) -> None:
    tiers, cache = TierConfig(chunk_tier=(url,), **options), ChunkCacheConfig(chunk_context="system")  # one copy each
    with LLM(str(model), tier_config=tiers, chunk_cache_config=replace(cache, chunk_cache_size="8MiB")) as llm:
        llm.warm([{"id": name, "text": text} for name, text in TEXTS.items()], system=SYSTEM)


@pytest.fixture(scope="module")
def filled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three entries, not to be changed."""
    folder = tmp_path_factory.mktemp("filled") / "tier"
    fill(tiny_model, f"disk:{folder}?quota=1GiB")
    return folder


@pytest.fixture
def tier(filled: Path, tmp_path: Path) -> Path:
    """The same, to be changed. The last use of each file is another one."""
    folder = tmp_path / "tier"
    subprocess.run(["cp", "-a", str(filled), str(folder)], check=True)
    for age, path in enumerate(files(folder)):
        os.utime(path, (time.time() - age * 86_400 - 60,) * 2)
    return folder


def files(folder: Path) -> list[Path]:
    """The files of the entries."""
    return sorted(folder.glob("??/*.safetensors"))


def listed(url: str) -> list[dict]:
    return [json.loads(line) for line in run("cache", "ls", url, "--json").stdout.splitlines()]


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_looking_needs_no_torch(filled: Path) -> None:
    code = (
        "import sys; from kvmosaic.cli import app\n"
        "for command in ('ls', 'verify'):\n"
        f"    try: app(['cache', command, 'disk:{filled}'])\n"
        "    except SystemExit as done: assert done.code in (0, None), done.code\n"
        "print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    output = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "set()"


def test_ls_shows_every_entry_and_changes_nothing(tier: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in files(tier)}
    result = run("cache", "ls", f"disk:{tier}", COLUMNS="120")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["key", "names", "tokens", "size", "codec", "model", "tenant", "age"]
    assert {line.split()[1] for line in lines[1:]} == set(TEXTS)
    assert [line.split()[0] for line in lines[1:]] == [path.stem[:12] for path in files(tier)]  # the last used first
    assert run("cache", "verify", f"disk:{tier}").exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in files(tier)} == before


def test_ls_takes_a_limit_and_a_name(tier: Path) -> None:
    result = run("cache", "ls", f"disk:{tier}", "--limit", "1", "--json")
    entry = fields(result)
    assert entry["key"] == files(tier)[0].stem
    assert entry["tokens"] == len(TEXTS[entry["names"][0]]) and entry["bytes"] == files(tier)[0].stat().st_size
    assert (entry["codec"], entry["dtype"], entry["tenant"]) == ("none", "float32", "")
    named = run("cache", "ls", f"disk:{tier}", "--name", "KIL", "--json")
    assert fields(named)["names"] == ["kiln"]
    assert "no entry" in run("cache", "ls", f"disk:{tier}", "--name", "nobody").stdout
    shown = run("cache", "ls", f"disk:{tier}", "--limit", "2")
    assert "2 of 3 entries, " in shown.stderr
    assert "--name is empty" in run("cache", "ls", f"disk:{tier}", "--name", " ").stderr


def test_ls_shows_what_cannot_be_read(tier: Path) -> None:
    files(tier)[0].write_bytes(b"not an entry")
    assert sorted("problem" in each for each in listed(f"disk:{tier}")) == [False, False, True]


def test_names_in_a_list_cannot_steer_the_terminal(tiny_model: Path, tmp_path: Path) -> None:
    config = TierConfig(chunk_tier=(f"disk:{tmp_path}/tier?quota=1GiB",))
    with LLM(str(tiny_model), tier_config=config, self_check=False) as llm:
        llm.warm([{"id": "\x1b[2Jboo [red]", "text": "Text."}], system=SYSTEM)
    result = run("cache", "ls", f"disk:{tmp_path}/tier", COLUMNS="120")
    assert "\x1b" not in result.stdout and "[2Jboo [red]" in result.stdout


def test_a_small_quota_in_the_url_removes_nothing_when_one_only_looks(tier: Path) -> None:
    for command in ("ls", "verify"):
        assert run("cache", command, f"disk:{tier}?quota=1KiB").exit_code == 0
    assert len(files(tier)) == 3


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("host:4GiB", "a host tier is memory of one process"),
        ("memory:///", "a memory tier is memory of one process"),
        ("disk:/no/such/folder", "there is no folder /no/such/folder"),
        ("file:///no/such/folder", "there is no folder /no/such/folder"),
        ("nonsense", "named by a URL"),
    ],
)
def test_places_without_entries_are_one_message(url: str, said: str) -> None:
    result = run("cache", "ls", url)
    assert result.exit_code == 2 and said in result.stderr
    assert not Path("/no/such").exists()


def test_verify_finds_damage_and_puts_it_aside(tier: Path) -> None:
    damaged = files(tier)[1]
    flip(damaged, damaged.stat().st_size - 100)
    result = run("cache", "verify", f"disk:{tier}", "--json")
    assert result.exit_code == 1
    assert list(fields(result)["damaged"]) == [damaged.stem] and fields(result)["good"] == 2
    assert damaged.exists() and f"damaged {damaged.stem}: the checksum" in result.stderr
    result = run("cache", "verify", f"disk:{tier}", "--quarantine")
    assert result.exit_code == 1 and "1 damaged and put aside" in result.stdout
    assert not damaged.exists() and len(list((tier / "quarantine").iterdir())) == 1
    assert run("cache", "verify", f"disk:{tier}").exit_code == 0


def test_verify_finds_swapped_and_cut_entries(tier: Path) -> None:
    first, second, third = files(tier)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    third.write_bytes(third.read_bytes()[:-64])
    result = run("cache", "verify", f"disk:{tier}", "--json")
    assert result.exit_code == 1 and set(fields(result)["damaged"]) == {path.stem for path in files(tier)}


def test_one_spot_that_cannot_be_read_is_damage_and_not_the_end(tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, peek = bytes.fromhex(files(tier)[0].stem), DiskTier.peek

    def failing(self: DiskTier, key: bytes, *rest: object) -> object:
        if key == bad:
            raise TierUnavailable("Input/output error")
        return peek(self, key, *rest)

    monkeypatch.setattr(DiskTier, "peek", failing)
    result = run("cache", "verify", f"disk:{tier}", "--json")
    assert list(fields(result)["damaged"]) == [bad.hex()] and fields(result)["good"] == 2


def test_secrets_come_from_the_environment(tiny_model: Path, tmp_path: Path) -> None:
    url = f"disk:{tmp_path}/tier"
    fill(tiny_model, f"{url}?quota=1GiB", chunk_secret="a long secret")
    assert fields(run("cache", "verify", url, "--json", KVMOSAIC_CHUNK_SECRET="a long secret"))["good"] == 3
    assert fields(run("cache", "verify", url, "--json", "--secret-env", "MINE", MINE="a long secret"))["good"] == 3
    for environment in ({}, {"KVMOSAIC_CHUNK_SECRET": "another secret"}):
        result = run("cache", "verify", url, "--json", **environment)
        assert result.exit_code == 0 and len(fields(result)["foreign"]) == 3
        assert result.stderr.startswith("3 foreign: the entry is sealed with")
    result = run("cache", "verify", url, "--secret-env", "NOWHERE")
    assert result.exit_code == 2 and "'NOWHERE' with the secret of the tier is not set" in result.stderr
    assert "a long secret" not in run("cache", "verify", url, KVMOSAIC_CHUNK_SECRET="short").output
    assert len(run("cache", "ls", url, "--json").stdout.splitlines()) == 3


@pytest.mark.parametrize("scheme", ["redis", "file"])
def test_other_kinds_of_tiers_are_listed_and_verified(
    scheme: str, tier: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"file://{tmp_path}/other"
    if scheme == "redis":
        (tmp_path / "redis").mkdir()
        server = RedisServer(tmp_path / "redis")
        request.addfinalizer(server.close)
        url = server.url
    other = open_tier(url)
    other.put_many({bytes.fromhex(path.stem): path.read_bytes() for path in files(tier)}, Deadline(5.0))
    other.close()
    assert {entry["names"][0] for entry in listed(url)} == set(TEXTS)
    assert fields(run("cache", "verify", url, "--json"))["good"] == 3


@pytest.mark.parametrize("secret", ["", "short"])
def test_a_secret_that_is_none_is_named_with_its_variable(tier: Path, secret: str) -> None:
    result = run("cache", "verify", f"disk:{tier}", KVMOSAIC_CHUNK_SECRET=secret)
    assert result.exit_code == 2
    assert f"KVMOSAIC_CHUNK_SECRET has {len(secret)} characters; give it 8 to 1024" in result.stderr


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_run_and_check_use_tiers(tiny_model: Path, documents: Path, tmp_path: Path) -> None:
    tiers = ("--chunk-tier", f"disk:{tmp_path}/tier?quota=1GiB", "--chunk-codec", "int8")
    asked = ("run", tiny_model, "--documents", documents, "-q", "Where?", "--max-tokens", "2", "--json")
    asked = (*asked, "--chunk-context", "system")
    first = run(*asked, *tiers, KVMOSAIC_CHUNK_SECRET="a long secret")
    assert first.exit_code == 0, first.output
    assert len(files(tmp_path / "tier")) == 3
    assert fields(run("cache", "ls", f"disk:{tmp_path}/tier", "--limit", "1", "--json"))["codec"] == "int8"
    verified = run("cache", "verify", f"disk:{tmp_path}/tier", "--json", KVMOSAIC_CHUNK_SECRET="a long secret")
    assert fields(verified)["good"] == 3
    result = run("check", tiny_model, *tiers, COLUMNS="200")
    assert result.exit_code == 0 and "came back" in result.stdout and len(files(tmp_path / "tier")) == 3
    result = run("check", tiny_model, "--chunk-tier", "redis://localhost:1/0")
    assert result.exit_code == 1 and "fails" in result.stdout
    assert "no tier of kind" in run("check", tiny_model, "--chunk-tier", "tape:0").stderr


def test_entries_that_grew_are_damaged_and_not_read_into_memory(tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    start = DiskTier.peek

    def counting(self: DiskTier, key: bytes, num_bytes: int, deadline: Deadline) -> object:
        found = start(self, key, num_bytes, deadline)
        read.append(0 if found is None else len(found))
        return found

    monkeypatch.setattr(DiskTier, "peek", counting)
    grown = files(tier)[0]
    os.truncate(grown, 2**34)
    result = run("cache", "verify", f"disk:{tier}", "--json")
    assert list(fields(result)["damaged"]) == [grown.stem] and fields(result)["good"] == 2
    assert max(read) <= 2**24
