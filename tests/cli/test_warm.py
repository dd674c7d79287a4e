"""`kvmosaic warm`: a folder in tiers, whatever interrupts it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from support.server import RunningServer
from typer.testing import CliRunner, Result

from kvmosaic.cli import app
from kvmosaic.entries.entry import read_file_header

TEXT = "House {0} has {0} doors and {1} windows, and stands in street {2}. " * 4


def run(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=dict(environment))


def write(folder: Path, num_documents: int, text: str = TEXT) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(num_documents):
        (folder / f"house {number:03}.txt").write_text(text.format(number, number * 7, number % 5))
    return folder


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.safetensors"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"disk:{tmp_path}/tier?quota=1GiB"


ONE_COPY = ("--chunk-context", "system")


def warm(model: Path, folder: Path, *options: str | Path, exit_code: int = 0, **environment: str) -> dict:
    result = run("warm", model, folder, "--json", *ONE_COPY, *options, **environment)
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_a_folder_is_computed_once_and_found_by_run(tiny_model: Path, tmp_path: Path, url: str) -> None:
    folder = write(tmp_path / "texts", 5)
    default = ("--chunk-tier", url, "--system", "Answer.", "--chunk-context", "companions")
    done = warm(tiny_model, folder, *default)
    names = sum(len(path.name) + 1 for path in folder.iterdir())  # the titles
    num_tokens = sum(path.stat().st_size for path in folder.iterdir()) - 5 + names  # one per byte; a space is cut
    assert (done["documents"], done["computed"], done["skipped"]) == (5, 5, 0)
    assert done["tokens"] == 2 * num_tokens, "as the first one, and as a later one"
    assert len(files(tmp_path / "tier")) == 10
    assert done["bytes"] == sum(path.stat().st_size for path in files(tmp_path / "tier"))
    again = warm(tiny_model, folder, *default)
    assert (again["computed"], again["skipped"], again["tokens"], again["bytes"]) == (0, 5, 0, 0)
    asked = ("-q", "Where?", "--documents", folder, "--system", "Answer.", "--chunk-tier", url)
    asked = (*asked, "--chunk-loading", "always")
    assert "(10 from tiers)" in run("run", tiny_model, *asked, "--max-tokens", "1").stderr


def test_a_copy_of_the_folder_of_a_disk_tier_is_the_same_tier(tiny_model: Path, tmp_path: Path, url: str) -> None:
    folder, other = write(tmp_path / "texts", 3), f"disk:{tmp_path}/other?quota=1GiB"
    warm(tiny_model, folder, "--chunk-tier", url)
    shutil.copytree(tmp_path / "tier", tmp_path / "other")
    assert warm(tiny_model, folder, "--chunk-tier", other)["skipped"] == 3


@pytest.mark.parametrize("tenant", ["", "team-a"])
def test_a_server_finds_what_was_warmed_for_its_tenants(tmp_path: Path, url: str, tenant: str) -> None:
    folder, keys = write(tmp_path / "texts", 3), tmp_path / "keys.yaml"
    keys.write_text("- {key: key-of-team-a, tenant: team-a}\n- {key: key-of-team-b, tenant: team-b}\n")
    whose = {"keys_file": keys} if tenant else {}
    warm(Path("reader"), folder, "--chunk-tier", url, "--tenant", tenant, "--dtype", "float32")
    body = {
        "model": "reader",
        "messages": [{"role": "user", "content": "Which street?"}],
        "documents": [{"title": path.name, "text": path.read_text().strip()} for path in sorted(folder.iterdir())],
        "max_tokens": 1,
    }
    with RunningServer(chunk_tier=[url], chunk_loading="always", **whose) as server:
        for name, expected in (("team-a", 3), ("team-b", 0)) if tenant else (("", 3),):
            before = server.llm.get_chunk_cache_stats().loaded_chunks
            headers = {"Authorization": f"Bearer key-of-{name}"} if name else {}
            reply = httpx.post(server.url + "/v1/chat/completions", json=body, headers=headers, timeout=60)
            assert reply.status_code == 200, reply.text
            assert server.llm.get_chunk_cache_stats().loaded_chunks == before + expected
            found = [document["tier"] for document in reply.json()["kvmosaic"]["documents"]]
            assert found == ["disk" if expected else None] * 3


def test_a_server_finds_warmed_documents_in_messages(tmp_path: Path, url: str) -> None:
    folder = write(tmp_path / "texts", 2)
    warm(Path("reader"), folder, "--chunk-tier", url, "--dtype", "float32", "--find-documents", "patterns")
    texts = [path.read_text().strip() for path in sorted(folder.iterdir())]
    pasted = "".join(f"<document>{text}</document>\n" for text in texts) + "Which street?"
    body = {"messages": [{"role": "user", "content": pasted}], "max_tokens": 1}
    with RunningServer(chunk_tier=[url], chunk_loading="always", find_documents="document-tags") as server:
        reply = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()
    assert [document["tier"] for document in reply["kvmosaic"]["documents"]] == ["disk"] * 2


def test_only_what_is_new_is_computed(tiny_model: Path, tmp_path: Path, url: str) -> None:
    folder = write(tmp_path / "texts", 4)
    warm(tiny_model, folder, "--chunk-tier", url)
    write(folder, 6)
    (folder / "house 000.txt").write_text("Changed.")
    files(tmp_path / "tier")[0].unlink()
    done = warm(tiny_model, folder, "--chunk-tier", url)
    assert done["computed"] in (3, 4) and done["computed"] + done["skipped"] == 6  # the lost file may be house 0
    assert len(files(tmp_path / "tier")) in (6, 7)


def test_a_small_pool_is_enough_for_a_large_folder(tiny_model: Path, tmp_path: Path, url: str) -> None:
    folder = write(tmp_path / "texts", 40)  # 256 bytes per token and 250 tokens each: 2.5 MiB
    done = warm(tiny_model, folder, "--chunk-tier", url, "--chunk-cache-size", "300KiB")
    assert (done["computed"], done["not_stored"], done["failed"]) == (40, 0, 0)
    assert len(files(tmp_path / "tier")) == 40


def test_long_documents_are_parts_and_equal_ones_are_one(tiny_model: Path, tmp_path: Path, url: str) -> None:
    folder = write(tmp_path / "texts", 1)
    (folder / "long.txt").write_text("".join(f"Kiln {n} burns lime. " for n in range(115)))  # more than 2,048 tokens
    (folder / "copy").mkdir()
    (folder / "copy" / "house 000.txt").write_text((folder / "house 000.txt").read_text())
    done = warm(tiny_model, folder, "--chunk-tier", url, "--long-chunks", "split")
    assert (done["computed"], done["failed"]) == (3, 0) and len(files(tmp_path / "tier")) == 4
    assert warm(tiny_model, folder, "--chunk-tier", url, "--long-chunks", "split")["skipped"] == 3


def test_documents_that_cannot_be_computed_do_not_stop_the_others(tiny_model: Path, tmp_path: Path, url: str) -> None:
    folder = write(tmp_path / "texts", 3)
    (folder / "broken.txt").write_bytes(b"caf\xe9")
    (folder / "blank.txt").write_text(" ")
    (folder / "empty.txt").touch()
    (folder / "huge.txt").write_text("The kiln burns lime. " * 60)  # fits the model, but not into the pool
    (folder / "long.txt").write_text("The kiln burns lime. " * 120)
    small = ("--chunk-cache-size", "200KiB", "--long-chunks", "error")
    result = run("warm", tiny_model, folder, "--chunk-tier", url, *small, "--json")
    done = json.loads(result.stdout)
    assert result.exit_code == 1 and (done["computed"], done["failed"], done["left"]) == (3, 4, 0)
    for name, why in {"broken": "not UTF-8", "blank": "has no text", "huge": "", "long": "2048"}.items():
        assert any(f"not computed: {name}.txt: " in line and why in line for line in result.stderr.splitlines()), why


def test_patterns_choose_files_in_sub_folders(tiny_model: Path, tmp_path: Path, url: str) -> None:
    write(tmp_path / "texts", 1)
    (tmp_path / "texts" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "texts" / "deep" / "er" / "page.html").write_text("A page.")
    (tmp_path / "texts" / ".hidden").mkdir()
    (tmp_path / "texts" / ".hidden" / "page.html").write_text("Hidden.")
    assert warm(tiny_model, tmp_path / "texts", "--chunk-tier", url, "--glob", "**/*.html")["documents"] == 1
    (entry,) = files(tmp_path / "tier")
    assert read_file_header(entry.read_bytes()).header.names == ("deep/er/page.html",)
    for pattern, said in {
        "../*.txt": "leads out of",
        "/*.txt": "leads out of",
        "*.pdf": "no file that matches",
    }.items():
        result = run("warm", tiny_model, tmp_path / "texts", "--chunk-tier", url, "--glob", pattern)
        assert result.exit_code == 2 and said in result.stderr, result.stderr


def test_the_system_text_may_be_a_file(tiny_model: Path, tmp_path: Path, url: str) -> None:
    folder, system = write(tmp_path / "texts", 2), tmp_path / "system.txt"
    system.write_text("Answer from the documents.\n")
    warm(tiny_model, folder, "--chunk-tier", url, "--system-file", system)
    text = ("--system", "Answer from the documents.")
    assert warm(tiny_model, folder, "--chunk-tier", url, *text)["skipped"] == 2
    result = run("warm", tiny_model, folder, "--chunk-tier", url, *text, "--system-file", system)
    assert result.exit_code == 2 and "exclude each other" in result.stderr


def test_every_tier_gets_what_one_has(tiny_model: Path, tmp_path: Path, url: str) -> None:
    folder = write(tmp_path / "texts", 3)
    warm(tiny_model, folder, "--chunk-tier", url)
    write(folder, 4)
    done = warm(tiny_model, folder, "--chunk-tier", url, "--chunk-tier", f"disk:{tmp_path}/other?quota=1GiB")
    assert (done["computed"], done["skipped"], done["not_stored"]) == (1, 3, 0)
    assert [path.read_bytes() for path in files(tmp_path / "other")] == [
        path.read_bytes() for path in files(tmp_path / "tier")
    ]


def test_entries_that_could_not_be_used_are_computed_again(tiny_model: Path, tmp_path: Path, url: str) -> None:
    folder, secret = write(tmp_path / "texts", 2), {"KVMOSAIC_CHUNK_SECRET": "a long secret"}
    assert warm(tiny_model, folder, "--chunk-tier", url, "--chunk-codec", "int8")["computed"] == 2
    assert warm(tiny_model, folder, "--chunk-tier", url, "--chunk-codec", "int8")["skipped"] == 2
    assert warm(tiny_model, folder, "--chunk-tier", url)["computed"] == 2
    assert warm(tiny_model, folder, "--chunk-tier", url, "--chunk-codec", "int8")["skipped"] == 2  # less loss is fine
    assert warm(tiny_model, folder, "--chunk-tier", url, **secret)["computed"] == 2
    assert warm(tiny_model, folder, "--chunk-tier", url, **secret)["skipped"] == 2
    result = run("warm", tiny_model, folder, "--chunk-tier", url)  # forgotten, more likely than meant
    assert result.exit_code == 2 and "KVMOSAIC_CHUNK_SECRET is not set" in result.stderr


@pytest.mark.parametrize("secret", ["", "short"])
def test_a_secret_that_is_none_is_named_with_its_variable(secret: str, tiny_model: Path, notes: Path, url: str) -> None:
    result = run("warm", tiny_model, notes, "--chunk-tier", url, KVMOSAIC_CHUNK_SECRET=secret)
    assert result.exit_code == 2
    assert f"KVMOSAIC_CHUNK_SECRET has {len(secret)} characters; give it 8 to 1024" in result.stderr


def test_damaged_entries_are_computed_again_and_large_ones_not_read(tiny_model: Path, tmp_path: Path, url: str) -> None:
    # headers end far from a multiple of 64, so that the times in them, of any length, change no size
    folder, place = write(tmp_path / "texts", 5, f"{TEXT}Yes."), tmp_path / "tier"
    warm(tiny_model, folder, "--chunk-tier", url)
    good = {path: path.read_bytes() for path in files(place)}
    flipped, grown, cut, swapped, _ = good
    flipped.write_bytes(good[flipped][:-1] + bytes([good[flipped][-1] ^ 1]))
    os.truncate(grown, 2**34)
    cut.write_bytes(good[cut][:-64])
    swapped.write_bytes(good[flipped])
    done = warm(tiny_model, folder, "--chunk-tier", url)
    assert (done["computed"], done["skipped"]) == (4, 1)
    assert warm(tiny_model, folder, "--chunk-tier", url)["skipped"] == 5
    assert {path.stat().st_size for path in good} == {len(data) for data in good.values()}


def test_run_and_check_use_tiers(tiny_model: Path, tmp_path: Path, url: str) -> None:
    tiers, folder = ("--chunk-tier", url, "--chunk-codec", "int8"), write(tmp_path / "texts", 3)
    asked = ("run", tiny_model, "--documents", folder, "-q", "Where?", "--max-tokens", "2", "--json", *ONE_COPY)
    assert run(*asked, *tiers).exit_code == 0
    assert [read_file_header(path.read_bytes()).header.codec for path in files(tmp_path / "tier")] == ["int8"] * 3
    result = run("check", tiny_model, *tiers, COLUMNS="200")
    assert result.exit_code == 0 and "came back" in result.stdout and len(files(tmp_path / "tier")) == 3
    result = run("check", tiny_model, "--chunk-tier", "redis://localhost:1/0")
    assert result.exit_code == 1 and "fails" in result.stdout
    assert "no tier of kind" in run("check", tiny_model, "--chunk-tier", "tape:0").stderr


def test_a_quota_that_is_too_small_is_told(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "texts", 4)
    result = run("warm", tiny_model, folder, "--chunk-tier", f"disk:{tmp_path}/tier?quota=150KiB", *ONE_COPY)
    assert result.exit_code == 1 and "2 of 4 chunks are not in every tier" in result.stderr


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ((), "warmed documents are kept in tiers"),
        (("host:1GiB",), "what a host tier has is gone with this process"),
        (("disk:cache",), "a disk tier needs a quota"),
        (("redis://localhost:1/0",), "fails"),
    ],
)
def test_tiers_that_keep_nothing_are_refused(tiers: tuple[str, ...], said: str, tiny_model: Path, notes: Path) -> None:
    result = run("warm", tiny_model, notes, *(part for tier in tiers for part in ("--chunk-tier", tier)))
    assert result.exit_code == 2 and said in result.stderr
    assert "Traceback" not in result.output


def started(model: Path, folder: Path, url: str) -> subprocess.Popen[str]:
    """The real command, in a process of its own, on one thread."""
    command = [sys.executable, "-m", "kvmosaic", "warm", str(model), str(folder), "--chunk-tier", url, "--json"]
    command += ONE_COPY
    return subprocess.Popen([*command, "--num-threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_files(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while len(files(folder)) < count:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_what_is_interrupted_goes_on_where_it_was(
    kill: signal.Signals, tiny_model: Path, tmp_path: Path, url: str
) -> None:
    # seconds of computing, so that even a busy machine sees the first ones long before the last
    folder, tier = write(tmp_path / "texts", 160, " ".join([TEXT] * 5)), tmp_path / "tier"
    with started(tiny_model, folder, url) as process:
        wait_for_files(tier, 5, process)
        os.kill(process.pid, kill)
        output, notices = process.communicate(timeout=60)
    stored = len(files(tier))
    assert 5 <= stored < 160, "it was done before it was interrupted; give it more to do"
    if kill is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert "the same command goes on where this one stopped" in notices and "Traceback" not in notices
        told = json.loads(output)
        assert told["interrupted"] and told["computed"] == stored and told["left"] == 160 - stored
    done = warm(tiny_model, folder, "--chunk-tier", url)
    assert (done["skipped"], done["computed"], done["not_stored"]) == (stored, 160 - stored, 0)
