"""Streams of the dashboard that one tenant holds open keep nobody else away, admins least of all."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.server import RunningServer, wait_until

from kvmosaic.server.dashboard.feed import ADMIN_VIEWERS, MAX_VIEWERS

TENANTS = ("hostile", "second", "honest", "boss")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("".join(f"- {{key: {name}-key, tenant: {name}, admin: {name == 'boss'}}}\n" for name in TENANTS))
    with RunningServer(keys_file=Path(keys)) as running:
        yield running


def watch(server: RunningServer, stack: ExitStack, tenant: str) -> tuple[int, bytes]:
    """Opens a stream that is then left alone; the status and the beginning of what came."""
    client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
    client.settimeout(60)
    head = f"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {tenant}-key\r\n\r\n"
    client.sendall(head.encode())
    received = client.recv(2**16)
    while b"\r\n\r\n" not in received or len(received.partition(b"\r\n\r\n")[2]) < 2:
        received += client.recv(2**16)
    return int(received.split()[1]), received


def num_let_in(server: RunningServer, stack: ExitStack, tenant: str, times: int) -> int:
    return sum(watch(server, stack, tenant)[0] == 200 for _ in range(times))


def test_viewers_of_one_tenant_keep_neither_other_tenants_nor_admins_away(server: RunningServer) -> None:
    places = MAX_VIEWERS - ADMIN_VIEWERS
    with ExitStack() as stack:
        assert num_let_in(server, stack, "hostile", MAX_VIEWERS + 2) == places // 2
        status, reply = watch(server, stack, "hostile")
        error = json.loads(reply[reply.index(b"{") :])["error"]
        assert (status, error["code"]) == (429, "too_many_viewers")
        assert error["message"] == (
            f"{places // 2} viewers of 'hostile' look at this dashboard, which is its share of {places}: no more than "
            "it leaves free; close one of them"
        )
        assert num_let_in(server, stack, "second", places) == places // 4
        assert watch(server, stack, "honest")[0] == watch(server, stack, "boss")[0] == 200
    headers = {"Authorization": "Bearer hostile-key"}

    def is_let_in() -> bool:
        with httpx.stream("GET", server.url + "/dashboard/events", headers=headers, timeout=60) as reply:
            return reply.status_code == 200

    wait_until(is_let_in)


def test_an_admin_finds_a_place_when_tenants_hold_all_that_are_theirs(server: RunningServer) -> None:
    with ExitStack() as stack:
        for tenant in 8 * TENANTS[:3]:
            num_let_in(server, stack, tenant, 16)
        assert watch(server, stack, "boss")[0] == 200
