"""Bodies that never end take room from nobody but the tenant who sends them."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.server import RunningServer, wait_until

from kvmosaic.web.request_body import MAX_BODIES

MOST = 2**16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("".join(f"- {{key: {name}-key, tenant: {name}}}\n" for name in ("hostile", "second", "honest")))
    with RunningServer(keys_file=Path(keys), max_body_bytes=MOST) as running:
        yield running


def hold(server: RunningServer, stack: ExitStack, tenant: str, num_bytes: int) -> socket.socket:
    """A body that is sent but for its last byte."""
    client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {tenant}-key\r\n"
        f"Content-Type: application/json\r\nContent-Length: {num_bytes + 1}\r\n\r\n"
    )
    client.sendall(head.encode() + b" " * num_bytes)
    return client


def read(client: socket.socket) -> bytes:
    """All of a reply, to the end of the connection."""
    client.settimeout(60)
    received = b""
    while part := client.recv(2**16):
        received += part
    return received


def num_refused(clients: list[socket.socket]) -> int:
    """How many have had a reply: nobody gets any other one before its body has ended."""
    return len(select.select(clients, [], [], 0)[0])


def test_held_bodies_of_one_tenant_leave_half_of_the_room_to_others(server: RunningServer) -> None:
    with ExitStack() as stack:
        held = [hold(server, stack, "hostile", MOST - 1) for _ in range(2 * MAX_BODIES)]
        wait_until(lambda: num_refused(held) >= len(held) - MAX_BODIES // 2)
        assert b"bodies_full" in read(held[-1])
        second = [hold(server, stack, "second", MOST - 1) for _ in range(2 * MAX_BODIES)]
        wait_until(lambda: num_refused(second) >= 1)
        body = {"prompt": "Where does the ferry go?" + " " * (MOST - 200)}
        headers = {"Authorization": "Bearer honest-key"}
        reply = httpx.post(server.url + "/tokenize", json=body, headers=headers, timeout=60)
        assert reply.json()["error"]["code"] == "context_length_exceeded", reply.text  # it was read to its end
    wait_until(lambda: httpx.get(server.url + "/livez", timeout=60).status_code == 200)


def test_room_is_given_back_when_the_clients_go(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_BODIES):
            hold(server, stack, "hostile", MOST - 1)
    body, headers = {"prompt": "x" * (MOST - 100)}, {"Authorization": "Bearer hostile-key"}
    wait_until(lambda: httpx.post(server.url + "/tokenize", json=body, headers=headers, timeout=60).status_code == 400)


def test_without_a_key_no_body_is_read_at_all(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n")
        client.settimeout(60)
        assert client.recv(2**12).startswith(b"HTTP/1.1 401")
