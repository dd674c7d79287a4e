"""`kvmosaic documents`: the documents of a real server, from the command line."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.files import docx_file, pdf_file
from support.server import RunningServer, wait_until
from typer.testing import CliRunner, Result

from kvmosaic.cli import app
from kvmosaic.documents import DocumentDraft


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMOSAIC_API_KEY", raising=False)


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running


@pytest.fixture
def server(own_server: RunningServer) -> Iterator[RunningServer]:
    yield own_server
    documents = own_server.services.documents
    for tenant in own_server.services.tenants:
        for document in documents.documents(tenant.name):
            documents.delete(tenant.name, document.id)


def stored(server: RunningServer) -> list[str]:
    """The ids of all documents, oldest first."""
    documents = server.services.documents
    return [each.id for tenant in server.services.tenants for each in documents.documents(tenant.name)]


def kvmosaic(server: RunningServer, *arguments: str, **given: str) -> Result:
    return CliRunner().invoke(app, ["documents", *arguments, "--server", server.url], **given)  # type: ignore[arg-type]


def counts(result: Result) -> dict[str, object]:
    fields: dict[str, object] = json.loads(result.stdout)
    return fields


@pytest.fixture
def handbook(tmp_path: Path) -> Path:
    folder = tmp_path / "handbook"
    (folder / "sub").mkdir(parents=True)
    (folder / "ferry.md").write_text("# Ferry\nIt leaves at noon.")
    (folder / "sub" / "mill.html").write_text("<h1>Mill</h1><p>It grinds oats.</p>")
    (folder / "report.pdf").write_bytes(pdf_file("The harbour is deep."))
    (folder / "letter.docx").write_bytes(docx_file("Letter", "Dear mayor."))
    (folder / "photo.png").write_bytes(b"\x89PNG\xff")
    (folder / ".hidden.md").write_text("not this")
    return folder


def test_files_are_added_listed_shown_and_deleted(server: RunningServer, handbook: Path) -> None:
    added = kvmosaic(server, "add", str(handbook / "ferry.md"), str(handbook / "report.pdf"), "--ttl", "60")
    assert (added.exit_code, added.stdout) == (0, "2 stored\n")
    listed = kvmosaic(server, "ls")
    assert listed.exit_code == 0 and "ferry.md" in listed.stdout and "report.pdf" in listed.stdout
    (line,) = kvmosaic(server, "ls", "--search", "ferry", "--json").stdout.splitlines()
    assert json.loads(line)["ttl_seconds"] == 60
    assert kvmosaic(server, "show", "report.pdf").stdout == "[page 1]\nThe harbour is deep.\n"
    assert json.loads(kvmosaic(server, "show", "ferry.md", "--json").stdout)["title"] == "ferry.md"
    removed = kvmosaic(server, "rm", "ferry.md", "report.pdf")
    assert (removed.exit_code, removed.stdout) == (0, "2 deleted\n")
    assert kvmosaic(server, "ls").stdout == "no documents\n"
    server.call(server.services.documents.create, "default", DocumentDraft("The mill grinds oats."), "mill")
    some = kvmosaic(server, "rm", "ferry.md", "mill")
    assert (some.exit_code, some.stdout, stored(server)) == (1, "1 deleted\n", [])
    assert "there is no document 'ferry.md'" in some.stderr
    missing = kvmosaic(server, "show", "ferry.md")
    assert missing.exit_code == 2 and "there is no document 'ferry.md'" in missing.stderr


def test_lines_of_json_are_documents(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n\n{"id": "b"}\n{"id": "c", "text": "two", "pinned": true}\n')
    added = kvmosaic(server, "add", str(path))
    assert added.exit_code == 1 and added.stdout == "2 stored, 1 refused\n"
    assert f"{path.name}, line 3" in added.stderr and "text" in added.stderr
    piped = kvmosaic(server, "add", "-", "--json", input='{"id": "a", "text": "other"}')
    assert counts(piped)["replaced"] == 1 and stored(server) == ["a", "c"]


def test_one_file_may_get_an_id(server: RunningServer, handbook: Path) -> None:
    assert kvmosaic(server, "add", str(handbook / "ferry.md"), "--id", "docs/日本語").exit_code == 0
    assert stored(server) == ["docs/日本語"]
    several = kvmosaic(server, "add", "a.md", "b.md", "--id", "x")
    assert several.exit_code == 2 and "--id" in several.stderr


def test_unreadable_file_is_refused_and_stops_no_other(server: RunningServer, handbook: Path) -> None:
    added = kvmosaic(server, "add", str(handbook / "photo.png"), "nowhere.md", str(handbook / "ferry.md"))
    assert added.exit_code == 1 and added.stdout == "1 stored, 2 refused\n"
    assert "not UTF-8" in added.stderr and "refused: nowhere.md: it cannot be read" in added.stderr
    folder = kvmosaic(server, "add", str(handbook))
    assert folder.exit_code == 1 and "with kvmosaic documents sync, and --server as here" in folder.stderr


def test_sync_makes_documents_equal_to_a_folder(server: RunningServer, handbook: Path) -> None:
    httpx.put(f"{server.url}/v1/documents/hb%2Fby-hand", json={"text": "not from a file"})
    sync = ("sync", str(handbook), "--prefix", "hb/", "--delete", "--json")
    assert counts(kvmosaic(server, *sync))["stored"] == 4
    names = ["hb/by-hand", "hb/ferry.md", "hb/letter.docx", "hb/report.pdf", "hb/sub/mill.html"]
    assert stored(server) == names
    assert httpx.get(f"{server.url}/v1/documents/hb%2Fsub%2Fmill.html").json()["text"] == "# Mill\n\nIt grinds oats."
    again = counts(kvmosaic(server, *sync))
    assert (again["unchanged"], again["stored"], again["replaced"]) == (4, 0, 0)
    (handbook / "ferry.md").write_text("# Ferry\nIt leaves at one.")
    (handbook / "letter.docx").unlink()
    changed = counts(kvmosaic(server, *sync))
    assert (changed["unchanged"], changed["replaced"], changed["deleted"]) == (2, 1, 1)
    names.remove("hb/letter.docx")
    assert stored(server) == names


def test_sync_without_delete_deletes_nothing(server: RunningServer, handbook: Path) -> None:
    kvmosaic(server, "sync", str(handbook))
    (handbook / "ferry.md").unlink()
    assert counts(kvmosaic(server, "sync", str(handbook), "--json"))["deleted"] == 0
    assert "ferry.md" in stored(server)


def test_emptied_folder_deletes_nothing(server: RunningServer, handbook: Path, tmp_path: Path) -> None:
    kvmosaic(server, "sync", str(handbook))
    (tmp_path / "empty").mkdir()
    result = kvmosaic(server, "sync", str(tmp_path / "empty"), "--delete")
    assert result.exit_code == 2 and "has no file" in result.stderr
    assert len(stored(server)) == 4


def test_interrupted_sync_goes_on_where_it_ended(server: RunningServer, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(1_200):
        (folder / f"{number:04}.md").write_text(f"Ferry number {number}.")
    command = [sys.executable, "-m", "kvmosaic", "documents", "sync", str(folder), "--server", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: stored(server))
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=60)
    before = len(stored(server))
    if process.returncode == 130:  # otherwise it was faster than the signal
        assert "interrupted" in told and 500 <= before < 1_200
    again = counts(kvmosaic(server, "sync", str(folder), "--json"))
    assert (again["unchanged"], again["stored"]) == (before, 1_200 - before)


def test_watched_folder_is_followed_until_ctrl_c(server: RunningServer, handbook: Path) -> None:
    command = [sys.executable, "-m", "kvmosaic", "documents", "sync", str(handbook), "--watch", "--delete"]
    command += ["--server", server.url]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        wait_until(lambda: len(stored(server)) == 4)
        (handbook / "new.txt").write_text("A new one.")
        (handbook / "ferry.md").unlink()
        wait_until(lambda: "new.txt" in stored(server) and "ferry.md" not in stored(server))
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and told.splitlines()[0] == "4 stored, 1 skipped"


def test_terminal_shows_a_progress_bar_and_a_pipe_does_not(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"id": f"no/{n}", "text": f"Ferry {n}."}) + "\n" for n in range(2_000)))
    command = [sys.executable, "-m", "kvmosaic", "documents", "add", str(path), "--server", server.url]
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stderr=terminal, stdout=subprocess.PIPE, env=environment) as process:
        os.close(terminal)
        drawn = b""
        with contextlib.suppress(OSError):  # the end of the terminal
            while part := os.read(controller, 65_536):
                drawn += part
        os.close(controller)
    assert process.returncode == 0 and "2000" in drawn.decode() and "━" in drawn.decode()
    piped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert piped.stderr == "" and piped.stdout == "2,000 replaced\n"


def test_server_that_is_away_is_one_line(handbook: Path) -> None:
    result = CliRunner().invoke(app, ["documents", "ls", "--server", "http://127.0.0.1:1"])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "nothing listens" in result.stderr


def test_key_is_sent_and_a_missing_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with RunningServer(api_key=["right-key-1"]) as server:
        refused = kvmosaic(server, "ls")
        assert refused.exit_code == 2 and "KVMOSAIC_API_KEY to yours" in refused.stderr
        monkeypatch.setenv("KVMOSAIC_API_KEY", "right-key-1")
        assert kvmosaic(server, "ls").stdout == "no documents\n"


@pytest.mark.parametrize("command", ["add", "ls", "show", "rm", "sync"])
def test_help_fits_a_narrow_terminal(command: str) -> None:
    result = CliRunner().invoke(app, ["documents", command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0 and max(map(len, result.stdout.splitlines())) <= 80


def test_sync_deletes_no_document_whose_file_is_still_there(server: RunningServer, handbook: Path) -> None:
    kvmosaic(server, "sync", str(handbook), "--prefix", "h/")
    (handbook / "letter.docx").unlink()
    result = kvmosaic(server, "sync", str(handbook), "--prefix", "h/", "--glob", "**/*.md", "--delete", "--json")
    assert result.exit_code == 0 and counts(result)["deleted"] == 1, result.output
    assert sorted(stored(server)) == ["h/ferry.md", "h/report.pdf", "h/sub/mill.html"]


@pytest.mark.skipif(sys.platform == "darwin", reason="file names there are always UTF-8")
def test_file_whose_name_is_not_utf8_is_refused_and_stops_no_other(server: RunningServer, handbook: Path) -> None:
    Path(os.fsdecode(os.fsencode(handbook) + b"/bad\xff.txt")).write_text("text")
    result = kvmosaic(server, "sync", str(handbook), "--json")
    assert result.exit_code == 1 and counts(result)["stored"] == 4, result.output
    assert ["rename" in reason for reason in counts(result)["refused"].values()] == [True]  # type: ignore[attr-defined]
    assert kvmosaic(server, "sync", str(handbook)).exit_code == 1


def test_stored_documents_are_warmed_by_id_or_all_and_what_is_cached_costs_nothing(server: RunningServer) -> None:
    for name in ("ferry", "mill"):
        put = httpx.put(f"{server.url}/v1/documents/{name}", json={"text": f"The {name} of Fenbury is warmed."})
        assert put.status_code == 201
    assert kvmosaic(server, "warm", "ferry").stdout == "1 computed\n"
    assert kvmosaic(server, "warm").stdout == "1 computed, 1 cached\n"
    assert counts(kvmosaic(server, "warm", "--system", "Be brief.", "--json"))["computed"] == 2
    missing = kvmosaic(server, "warm", "mill", "miln")
    assert missing.exit_code == 1 and missing.stdout == "1 cached, 1 refused\n"
    assert "miln: it is not stored" in missing.stderr


@pytest.mark.slow
def test_a_folder_is_stored_and_warmed_by_one_command(server: RunningServer, tmp_path: Path) -> None:
    for name in ("tower", "bridge"):
        (tmp_path / f"{name}.md").write_text(f"The {name} of Fenbury is synchronized and warmed.")
    (tmp_path / "blank.md").write_text(" ")
    (tmp_path / "empty.md").touch()
    for name in ("a.csv", "b.csv", "photo.png", "LICENSE"):
        (tmp_path / name).write_text("1,2")
    synced = kvmosaic(server, "sync", str(tmp_path), "--warm")
    assert synced.stdout == "2 stored, 2 computed, 1 refused, 5 skipped\n" and "scanned" not in synced.stderr
    assert "skipped: 2 .csv, 1 without a suffix, 1 empty, 1 .png; read are .txt, .md" in synced.stderr
    again = kvmosaic(server, "sync", str(tmp_path), "--warm", "--json")
    assert counts(again)["skipped"] == {".csv": 2, ".png": 1, "without a suffix": 1, "empty": 1}
    assert counts(again)["unchanged"] == counts(again)["cached"] == 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "mill.md").write_text("The mill of another folder.")
    assert kvmosaic(server, "sync", str(other), "--delete").stdout == "1 stored\n", "it deletes its own only"
    (other / "oven.md").write_text("An oven.")
    (other / "mill.md").unlink()
    assert kvmosaic(server, "sync", str(other), "--delete").stdout == "1 stored, 1 deleted\n"
    lonely = kvmosaic(server, "sync", str(tmp_path), "--system", "Be brief.")
    assert lonely.exit_code == 2 and "give --warm, too" in " ".join(lonely.stderr.split())
