from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.screen import Screen
from support.server import RunningServer

KEYS = {"acme": "acme-key-123", "zenith": "zenith-key-123", "boss": "boss-key-123", "small": "small-key-123"}

_LISTED = "return !['documents', 'documents-empty'].every((name) => document.getElementById(name).hidden)"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with two tenants and an admin."""
    path: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(
        "".join(
            f"- {{key: {key}, tenant: {name}, admin: {name == 'boss'}}}\n"
            for name, key in KEYS.items()
            if name != "small"
        )
        + "- {key: small-key-123, tenant: small, quota: 4MiB}\n"
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
    screen.until(lambda: screen.run(_LISTED), "the tenant's documents, or that there are none")


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
    assert KEYS["acme"] not in screen.run("return JSON.stringify(localStorage)")
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
    screen.until(lambda: len(screen.all("#pools .pool")) == 2, "what its requests hold")
    assert pools(screen) == ["0 B, in 0 blocks.", "0 B are held by your requests that run now."]
    assert screen.text("#memory-heading") == "Your memory"
    assert "Chunk hit rate" not in screen.text("#figures")
    assert (screen.text("#running-label"), screen.text("#running")) == ("Yours running", "0")

    log_in(screen, locked, "boss")
    screen.until(lambda: screen.all("#pools canvas"), "the block map")
    assert "tenant acme" in screen.text("#records")
    assert not screen.all("#documents > li")
    assert screen.text("#memory-heading") == "Memory"
    assert "in 0 of" not in screen.text("#pools") and " of 32.0 MiB" in screen.text("#pools")
    assert screen.text("#running-label") == "Running"


def test_a_tenant_sees_what_it_has_and_how_much_of_its_quota(locked: RunningServer, screen: Screen) -> None:
    log_in(screen, locked, "acme")
    if not screen.all("#documents > li"):
        screen.load_examples()
        screen.ask()
    own = screen.until(lambda: next((words for words in pools(screen) if "idle" in words), ""), "idle blocks")
    usage = locked.services.engine.figures.usages["acme"]
    assert own == f"{mebibytes(usage.num_bytes)} MiB, in {usage.num_blocks} blocks: {usage.num_blocks} cached and idle."
    assert f"{mebibytes(usage.num_bytes)} MiB" in screen.text("#figures")

    log_in(screen, locked, "small")
    screen.load_examples()
    screen.menu("#documents", "pin")
    screen.ask()
    own = screen.until(lambda: next((words for words in pools(screen) if "idle, " in words), ""), "pinned blocks")
    usage = locked.services.engine.figures.usages["small"]
    share = round(100 * usage.num_bytes / 2**22)
    assert own.startswith(f"{mebibytes(usage.num_bytes)} MiB of your quota of 4.0 MiB ({share}%), in ")
    assert own.endswith(f": {usage.num_idle_blocks} cached and idle, {usage.num_pinned_blocks} pinned.")


def pools(screen: Screen) -> list[str]:
    """What is said of each pool."""
    return [
        str(words)
        for words in screen.run("return [...document.querySelectorAll('#pools p')].map((p) => p.textContent)")
    ]


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
