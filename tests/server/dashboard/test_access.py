from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.screen import Screen
from support.server import RunningServer

KEYS = {"acme": "acme-key-123", "zenith": "zenith-key-123", "boss": "boss-key-123"}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with two tenants and an admin."""
    path: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(
        "".join(f"- {{key: {key}, tenant: {name}, admin: {name == 'boss'}}}\n" for name, key in KEYS.items())
    )
    with RunningServer(keys_file=path) as running:
        yield running


def log_in(screen: Screen, server: RunningServer, tenant: str) -> None:
    screen.forgiven = ("401",)
    screen.open(server.url)
    screen.run("sessionStorage.clear()")
    screen.open(server.url)
    screen.find("#key").send_keys(KEYS[tenant])
    screen.click("#key-form .main")
    screen.until(lambda: screen.text("#connection") == "Live", "the connection")


def test_a_wrong_key_is_refused_and_asked_for_again(locked: RunningServer, screen: Screen) -> None:
    screen.forgiven = ("401",)
    screen.open(locked.url)
    assert screen.text("#model") == "–"
    screen.find("#key").send_keys("a wrong key")
    screen.click("#key-form .main")
    screen.until(lambda: "refused" in screen.text("#key-reason"), "the refusal")
    screen.find("#key").send_keys(KEYS["acme"])
    screen.click("#key-form .main")
    screen.until(lambda: screen.text("#connection") == "Live", "the connection")
    assert screen.text("#model") == "reader"


def test_the_key_is_kept_in_this_tab_only(locked: RunningServer, screen: Screen) -> None:
    log_in(screen, locked, "acme")
    assert screen.run("return Object.values(sessionStorage)") == [KEYS["acme"]]
    assert screen.run("return Object.values(localStorage)") == []
    assert screen.run("return document.cookie") == ""
    assert KEYS["acme"] not in screen.run("return document.documentElement.outerHTML + location.href")
    screen.click("#forget-key")
    assert screen.find("#key-dialog").is_displayed()
    assert screen.run("return Object.values(sessionStorage)") == []


def test_a_tenant_sees_nothing_of_another(locked: RunningServer, screen: Screen) -> None:
    log_in(screen, locked, "acme")
    screen.load_examples()
    screen.ask()
    screen.until(lambda: screen.all("#records > li"), "the strip")

    log_in(screen, locked, "zenith")
    screen.until(lambda: screen.all("#pools .pool"), "the totals")
    assert not screen.all("#records > li")
    assert not screen.all("#documents > li")
    assert not screen.all("#pools canvas")
    assert "by all tenants together" in screen.text("#pools")
    assert "Chunk hit rate" not in screen.text("#figures")

    log_in(screen, locked, "boss")
    screen.until(lambda: screen.all("#pools canvas"), "the block map")
    assert "tenant acme" in screen.text("#records")
    assert not screen.all("#documents > li")
