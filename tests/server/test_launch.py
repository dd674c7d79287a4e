from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.programs import make_certificate
from support.server import ServeCommand, metric, wait_until
from typer.testing import CliRunner, Result

from kvmosaic import server as server_package
from kvmosaic.cli import app
from kvmosaic.errors import InvalidConfig, pip_install
from kvmosaic.server.process.listener import listen
from kvmosaic.server.settings import ServerSettings

LONG = {"model": "reader", "prompt": "Once upon a time", "max_tokens": 1_500, "ignore_eos": True, "stream": True}


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """A server of this process sets them up for itself; tests that come later want theirs."""
    names = ("kvmosaic", "uvicorn", "uvicorn.access")
    before = [(each := logging.getLogger(name), each.level, each.propagate, each.handlers[:]) for name in names]
    yield
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.handlers, logger.filters = propagate, handlers, []


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as place:
        yield place.getsockname()[1]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def serve(*arguments: str) -> Result:
    """The command in this process, when it ends before it has loaded anything."""
    return CliRunner().invoke(app, ["serve", *arguments])


@pytest.mark.slow
def test_files_and_folders_are_stored_and_computed_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    (folder / "old").mkdir(parents=True)
    (folder / "ferry.md").write_text("The ferry goes to Oak Island.")
    (folder / "old" / "mill.txt").write_text("The mill grinds oats.")
    for name in ("a.md", "b.md"):
        (folder / name).write_text(" ")
    with ServeCommand(str(folder), KVMOSAIC_DOCUMENTS_DIR=str(tmp_path / "store")) as server:
        server.until_ready()
        assert "files      2 stored, 2 refused\n" in server.log
        assert "refused: a.md and 1 more: it has no text" in server.log
        server.until(r"computed +2 of 2 documents \([0-9]+ tokens\)")
        ids = [each["id"] for each in httpx.get(f"{server.url}/v1/documents", timeout=60).json()["data"]]
        assert sorted(ids) == ["ferry.md", "old/mill.txt"] and num_chunks(server) == 2
        server.stop()
        assert server.wait() == 0
    again = [str(folder), str(folder / "ferry.md")]
    with ServeCommand(*again, KVMOSAIC_DOCUMENTS_DIR=str(tmp_path / "store")) as server:
        server.until_ready()
        assert "files      2 stored, 1 replaced, 2 refused\n" in server.log, (
            "of several, a folder's files have its name in front"
        )


@pytest.mark.slow
def test_a_folder_is_served_apart_from_the_documents_of_other_servers(tmp_path: Path) -> None:
    one, other, home = tmp_path / "one", tmp_path / "other", {"XDG_DATA_HOME": str(tmp_path / "home")}
    for folder, names in ((one, ("readme", "ferry")), (other, ("readme", "mill", "tower"))):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.md").write_text(f"The {name} of {folder.name} is old.")

    def stored(folder: Path) -> tuple[str, dict[str, str]]:
        command = ServeCommand(str(folder), **home)
        del command._environment["KVMOSAIC_DOCUMENTS_DIR"]
        with command as server:
            server.until_ready()
            server.until("computed +[0-9]")
            listed = httpx.get(f"{server.url}/v1/documents", timeout=60).json()["data"]
            texts = {each["id"]: httpx.get(f"{server.url}/v1/documents/{each['id']}").json()["text"] for each in listed}
            server.stop()
            assert server.wait() == 0
            return server.log, texts

    assert stored(one)[1].keys() == {"readme.md", "ferry.md"}
    log, texts = stored(other)
    assert texts["readme.md"] == "The readme of other is old." and len(texts) == 3
    assert "documents  3 stored, all fit" in log and "computed   3 of 3 documents" in log
    (one / "ferry.md").unlink()
    log, texts = stored(one)
    assert texts == {"readme.md": "The readme of one is old."} and "files      1 unchanged, 1 deleted" in log


@pytest.mark.slow
def test_a_server_is_ready_once_its_folder_is_stored(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.md").write_text(f"The number of this text is {number}. " * 50)
    with ServeCommand(str(tmp_path)) as server:
        url = server.until(r"loading +reader, at (http\S+)")[1]
        wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200, 300)
        documents = httpx.get(f"{url}/v1/documents?limit=200", timeout=60).json()["data"]
        assert len(documents) == 200
        server.stop()
        assert server.wait() == 0


def test_files_that_cannot_be_stored_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    told = serve("reader", str(tmp_path / "missing"))
    assert told.exit_code == 2 and "DOCUMENTS: there is no file or folder" in told.output
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: 0123456789abcdef0, tenant: a}\n- {key: 0123456789abcdef1, tenant: b}\n")
    told = serve("reader", str(tmp_path), "--keys-file", str(keys))
    assert "this server has several tenants; give each its own: kvmosaic documents sync" in told.output


def test_chunks_of_an_expired_document_are_dropped_though_nothing_is_asked() -> None:
    with ServeCommand() as server:
        server.until_ready()
        body = {"text": "The ferry goes to Oak Island.", "ttl_seconds": 1}
        assert httpx.put(f"{server.url}/v1/documents/ferry", json=body, timeout=60).status_code == 201
        chat = {"messages": [{"role": "user", "content": "Where?"}], "documents": [{"id": "ferry"}], "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).status_code == 200
        assert num_chunks(server) == 1
        wait_until(lambda: num_chunks(server) == 0, 60)


def num_chunks(server: ServeCommand) -> float:
    return metric(server.url, "kvmosaic:chunk_entries")


def test_life_of_a_server_from_its_first_probe_to_an_answer_that_takes_too_long(certificate: tuple[Path, Path]) -> None:
    paths = (
        "--ssl-certfile",
        str(certificate[0]),
        "--ssl-keyfile",
        str(certificate[1]),
        "--root-path",
        "/kv",
        "--drain-seconds",
        "0.2",
    )
    context = ssl.create_default_context(cafile=certificate[0])
    with (
        ServeCommand(*paths, is_fresh=True, KVMOSAIC_SERVED_MODEL_NAME="small,reader") as command,
        httpx.Client(verify=context, timeout=30) as client,
    ):
        url = command.until(r"loading .* at (https\S+/kv)\n")[1].removesuffix("/kv")
        assert client.get(url + "/livez").status_code == 200
        assert client.get(url + "/readyz").json() == {"status": "loading"}
        reply = client.get(url + "/v1/models")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "loading")
        assert int(reply.headers["retry-after"]) >= 1 and reply.headers["x-content-type-options"] == "nosniff"
        command.until_ready()
        assert command.url == url + "/kv"
        engine = r"transformers \S+, \w+ attention, weights float32, cache float32, on cpu"
        assert re.search(rf"model      small, reader: {engine}\n", command.log)
        assert re.search(r"documents  none stored; room for [0-9,]+ tokens, 32 MiB\n", command.log)
        for path in ("/livez", "/readyz", "/health"):
            assert client.get(url + path).status_code == 200
        with client.stream("POST", url + "/v1/completions", json=LONG) as reply:
            lines = reply.iter_lines()
            next(lines)
            command.stop(signal.SIGINT)
            rest = [line for line in lines if line]
        assert '"error"' in rest[-1] or '"error"' in rest[-2]
        assert command.wait() == 0, command.log
    assert "stopping: aborted 1 request\n" in command.log and "Traceback" not in command.log
    assert re.search(r'127.0.0.1:\d+ "POST /kv/v1/completions" 200 in [0-9.]+ ms, request \w{32}\n', command.log)
    assert '/kv/readyz"' not in command.log, "probes come every few seconds: a line for each would drown all others"


def test_server_that_is_told_to_stop_while_it_loads_ends_at_once() -> None:
    with ServeCommand(is_fresh=True) as command:
        command.until("loading")
        command.stop()
        assert command.wait() == 0, command.log
    assert "ready" not in command.log


def test_answer_under_way_is_finished_and_new_ones_are_refused() -> None:
    with ServeCommand("--drain-seconds", "60") as command:
        command.until_ready()
        with httpx.stream("POST", command.url + "/v1/completions", json=LONG | {"max_tokens": 300}) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            command.stop()
            command.until("stopping: 1 request under way may take 60 s")
            assert httpx.get(command.url + "/livez").status_code == 200
            assert httpx.get(command.url + "/readyz").json() == {"status": "draining"}
            refused = httpx.post(command.url + "/v1/completions", json=LONG)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "service_unavailable"
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"error"' not in "".join(rest)
        assert command.wait() == 0, command.log


def test_second_signal_ends_the_process_at_once() -> None:
    with ServeCommand("--drain-seconds", "3600") as command:
        command.until_ready()
        thread = threading.Thread(target=_read_all, args=(command.url,), daemon=True)
        thread.start()
        wait_until(lambda: metric(command.url, "vllm:num_requests_running") == 1)
        command.stop()
        command.until("stopping: 1 request under way")
        command.stop()
        assert command.wait() == 128 + signal.SIGTERM
        thread.join(60)


def _read_all(url: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(url + "/v1/completions", json=LONG, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere/at/all", "--port", "0"), "nowhere/at/all"),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid port 8000"),
        (("--ssl-certfile", "none.pem", "--ssl-keyfile", "none.pem"), "--ssl-certfile none.pem with --ssl-keyfile"),
        (("--keys-file", "none.yaml"), "cannot read none.yaml: No such file or directory"),
        (("--config", "none.yaml"), "cannot read none.yaml: No such file or directory"),
        (("--device", "quantum", "--port", "0"), "quantum"),
        (("nowhere", "--chunk-tier", "disk:/dev/null/cache?quota=1GiB"), "/dev/null/cache is a file"),
        (("nowhere", "--chunk-tier", "disk:/etc?quota=1GiB"), "/etc"),
        (("nowhere", "--chunk-tier", "redis://:pass-word@cache:port/0"), "its port is no number"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = serve(*arguments)
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith("loading")]
    assert result.exit_code == 2, result.stderr
    assert len(lines) == 1 and lines[0].startswith("kvmosaic: ") and said in lines[0], result.stderr


def test_port_that_is_taken_is_said_before_the_model_is_loaded(taken_port: int) -> None:
    command = (sys.executable, "-m", "kvmosaic", "serve", "nowhere", "--port", str(taken_port))
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert result.stderr == (
        f"kvmosaic: cannot listen on 127.0.0.1 port {taken_port}: Address already in use; "
        "choose another --host or --port\n"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_pieces_of_a_stream_leave_without_waiting_for_each_other(host: str) -> None:
    async def accept(place: socket.socket) -> int:
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            told.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(note, sock=place):
            _, writer = await asyncio.open_connection("127.0.0.1", place.getsockname()[1])
            writer.close()
            return await told

    place = listen(ServerSettings(host=host, port=0))
    assert asyncio.run(accept(place)) != 0


def test_missing_packages_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_package, "_PACKAGES", ("fastapi", "no_such_package"))
    with pytest.raises(
        InvalidConfig, match=rf"the server needs no_such_package; .* {re.escape(pip_install('server'))}"
    ):
        server_package.check_installed()


def test_a_tier_that_does_not_answer_keeps_no_server_from_starting_and_its_password_is_not_said() -> None:
    with ServeCommand("--chunk-tier", "redis://:pass-word@127.0.0.1:1/0", "--chunk-tier", "host:100") as command:
        command.until_ready()
        assert "tiers      redis redis://127.0.0.1:1/0 ▸ host (100 bytes)" in command.log
        assert "is left alone until it answers again" in command.log
        body = {"model": "reader", "prompt": "a", "max_tokens": 1}
        assert httpx.post(command.url + "/v1/completions", json=body, timeout=60).status_code == 200
        command.stop()
        assert command.wait() == 0 and "pass-word" not in command.log


STORING = """
import asyncio, os, signal
from kvmosaic.server.launch import launch
from kvmosaic.server.settings import ServerSettings

async def fill(services):
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(3_600)

launch(ServerSettings(documents=(".",), documents_dir="none", port=0, dtype="float32"), fill=fill)
"""


@pytest.mark.slow
def test_server_that_is_told_to_stop_while_it_stores_its_folder_ends_at_once() -> None:
    ended = subprocess.run([sys.executable, "-c", STORING], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "ready" not in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
