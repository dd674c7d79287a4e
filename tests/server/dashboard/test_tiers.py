"""What the dashboard shows of the tiers, and of an engine that sleeps."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.screen import Screen
from support.server import RunningServer
from support.tiers import TroubledTier

from kvmosaic.errors import TierUnavailable
from kvmosaic.tiers import HostTier

DOCUMENTS = [{"id": f"d{number}", "text": f"The ferry number {number} leaves at noon."} for number in range(3)]


@pytest.fixture(scope="module")
def tiered() -> Iterator[tuple[RunningServer, TroubledTier]]:
    redis = TroubledTier("redis")
    with RunningServer(tiers=[HostTier(2**25), redis]) as running:
        yield running, redis


def test_each_tier_says_how_full_it_is_and_whether_it_answers(
    tiered: tuple[RunningServer, TroubledTier], screen: Screen
) -> None:
    server, redis = tiered
    screen.open(server.url)
    screen.until(lambda: screen.run("return document.querySelectorAll('#tiers > div').length") == 2, "two tiers")
    assert screen.text("#tiers > div:first-child h3").strip() == "Tier: memory of the host"
    assert "of 32.0 MiB" in screen.text("#tiers > div:first-child p")
    assert "not asked yet" in screen.text("#tiers > div:first-child p")
    body = {"model": "reader", "messages": [{"role": "user", "content": "When?"}], "documents": DOCUMENTS}
    assert httpx.post(server.url + "/v1/chat/completions", json=body | {"max_tokens": 1}, timeout=60).status_code == 200
    screen.until(lambda: "in 3 entries" in screen.text("#tiers > div:last-child p"), "entries")
    redis.error = TierUnavailable("gone")
    body["documents"] = [{"id": "new", "text": "Nobody has asked for this text before."}]
    assert httpx.post(server.url + "/v1/chat/completions", json=body | {"max_tokens": 1}, timeout=60).status_code == 200
    screen.until(lambda: screen.text("#tiers > div:last-child .mark") == "does not answer", "the breaker")
    redis.error = None
    is_hidden = "return document.querySelector('#tiers > div:last-child .mark').hidden"
    screen.until(lambda: screen.run(is_hidden), "the tier to be back")


def test_sleep_is_shown(tiered: tuple[RunningServer, TroubledTier], screen: Screen) -> None:
    server, _ = tiered
    screen.open(server.url)
    httpx.post(server.url + "/sleep")
    screen.until(lambda: screen.text("#running") == "asleep", "the sleep")
    httpx.post(server.url + "/wake_up")
    screen.until(lambda: screen.text("#running") == "0", "the wake")
