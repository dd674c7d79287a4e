"""`kvmosaic documents` and servers that are no good: each is one line."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support.programs import make_certificate
from support.server import RunningServer
from typer.testing import CliRunner, Result

from kvmosaic.cli import app
from kvmosaic.console.documents.client import ServerDocuments, show_list
from kvmosaic.console.documents.sync import FolderSync, watch_folder


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMOSAIC_API_KEY", raising=False)


def kvmosaic(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    """The one line that is said when something is refused."""
    result = kvmosaic("documents", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr.startswith("kvmosaic: ") and result.stderr.count("\n") == 1
    return result.stderr


@contextmanager
def stranger(
    status: int, body: bytes = b"", certificate: tuple[Path, Path] | None = None, **headers: str
) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every GET alike; its address, and what it was asked."""
    asked: list[str] = []

    class Replies(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers['Authorization']}")
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Replies) as listening:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            listening.socket = context.wrap_socket(listening.socket, server_side=True)
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http{'s' * (certificate is not None)}://127.0.0.1:{listening.server_port}", asked
        finally:
            listening.shutdown()
            thread.join()


def test_keys_that_are_none_or_unknown_are_told_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: alpha-key-1, tenant: alpha}\n")
    with RunningServer(keys_file=keys) as server:
        assert "needs a key; set KVMOSAIC_API_KEY to yours" in refused("ls", "--url", server.url)
        for key, told in (
            ("unknown-key-1", "does not know the API key in KVMOSAIC_API_KEY"),
            ("two words", "the key in KVMOSAIC_API_KEY must be at most"),
            ("with\nheader: new", "the key in KVMOSAIC_API_KEY must be at most"),
        ):
            monkeypatch.setenv("KVMOSAIC_API_KEY", key)
            said = refused("ls", "--url", server.url)
            assert told in said and key not in said


def test_nothing_that_listens_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "nothing listens at" in refused("ls", "--url", f"http://127.0.0.1:{port}")


def test_a_certificate_of_ones_own_is_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate(tmp_path)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with stranger(200, b'{"data": [], "has_more": false}', certificate) as (url, _):
        said = refused("ls", "--url", url)
        assert "self-signed certificate" in said and "SSL_CERT_FILE=certificate.pem" in said
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert kvmosaic("documents", "ls", "--url", url).stdout == "no documents\n"


def test_a_list_on_a_narrow_terminal_has_whole_ids_sizes_and_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ids = ["notes.md", "handbook/sect.using-the-handbook.html", "a/" * 60 + "end.txt"]
    facts = {"version": 12, "bytes": 183_000, "hits": 4567, "updated_at": 1_764_300_000, "title": "A long title " * 9}
    show_list([{"id": each, **facts} for each in ids], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    width = lines[0].index("version") - 1
    assert width > 30 and "".join(line[:width].strip() for line in lines[1:]) == "".join(ids)
    whole = [line for line in lines if "179 KiB" in line]
    assert len(whole) == 3 and all("4,567" in line and "2025-11-28" in line and " A" in line for line in whole)
    show_list([{"id": ids[1], "version": 1, "bytes": 9, "hits": 0, "title": "The handbook"}], as_json=False)
    assert capsys.readouterr().out.splitlines()[1].split() == [ids[1], "9", "B", "–", "The", "handbook"]


def test_a_watched_folder_says_once_that_its_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "note.txt").write_text("The ferry leaves at nine.")
    looks = iter(range(4))

    def sleep(_: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    watch_folder(ServerDocuments(f"http://127.0.0.1:{port}", 1.0), FolderSync(tmp_path), as_json=False)
    assert capsys.readouterr().err.count("nothing listens at") == 1


def test_one_that_never_answers_is_left_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "no answer from" in refused("ls", "--url", url, "--timeout", "0.2")


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (404, b"", "has no /v1/documents: not a kvmosaic server, or an older one"),
        (501, b"<html>", "has no /v1/documents: not a kvmosaic server"),
        (200, b"", "answers, but not as a kvmosaic server does"),
        (200, b'{"data": 1}', "answers, but not as a kvmosaic server does"),
        (200, b"[" * 100_000, "answers, but not as a kvmosaic server does"),
        (503, b"", "cannot do it now: it answers 503 and nothing else (try again later)"),
        (500, b'{"error": {"message": "a\\u001b[31m\\nb"}}', "refuses (500): a\N{REPLACEMENT CHARACTER}[31m b"),
    ],
)
def test_strangers_are_told_apart(status: int, body: bytes, told: str) -> None:
    with stranger(status, body) as (url, asked):
        assert told in refused("ls", "--url", url + "/kv/")
    assert asked == ["/kv/v1/documents?limit=50&search= None"]


def test_a_key_is_not_sent_on_to_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOSAIC_API_KEY", "admin-key-1")
    with stranger(200) as (other, asked), stranger(307, Location=other) as (url, first):
        monkeypatch.setenv("http_proxy", other)
        assert "sends to another address" in refused("ls", "--url", url)
    assert (first, asked) == (["/v1/documents?limit=50&search= Bearer admin-key-1"], [])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--url", "127.0.0.1:8000"), "is no address; give one such as http://127.0.0.1:8000"),
        (("--url", "file:///etc/hosts"), "is no address"),
        (("--url", "http://127.0.0.1:x"), "is no address"),
        (("--url", "http://127.0.0.1/?key=1"), "is no address"),
        (("--url", f"http://{'a' * 70}.test"), "cannot be asked"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: tuple[str, ...], told: str) -> None:
    assert told in refused("ls", *options)


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf"])
def test_seconds_have_limits(seconds: str) -> None:
    assert kvmosaic("documents", "ls", "--timeout", seconds).exit_code == 2


def test_a_password_in_the_address_is_not_shown() -> None:
    assert "hidden" not in refused("ls", "--url", "http://me:hidden@127.0.0.1:x")
