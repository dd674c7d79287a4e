"""Every attack in `attacks/` against a real server, while another tenant asks and an operator's probe looks in."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from _pytest.mark import ParameterSet
from support.attack import Attack, Request, read_attacks
from support.target import Target, headers_of, slowness


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("attack")) as target:
        yield target


def cases() -> Iterator[ParameterSet]:
    for attack in read_attacks():
        marks = [pytest.mark.xfail(reason=attack.unmet, strict=False)] if attack.unmet else []
        yield pytest.param(attack, id=attack.name, marks=marks)


@pytest.mark.parametrize("attack", list(cases()))
def test_attack_costs_others_nothing(target: Target, attack: Attack) -> None:
    sent = [request for request in attack.requests for _ in range(request.times)]
    holds = attack.holds
    slow_before = slowness()
    with target.observed() as costs, ThreadPoolExecutor(len(sent)) as senders:
        before = target.cpu_seconds
        replies = list(senders.map(lambda request: status_of(target, attack.sender, request), sent))
        used = target.cpu_seconds - before
    probe = sorted(costs.probes)[int(0.99 * (len(costs.probes) - 1))]
    wait = max(costs.chats) - target.usual_chat
    seen = f"{costs.memory_mb:.0f} MB, a chat waits {wait:.2f} s, a probe {probe:.2f} s"
    print(f"{attack.name}: {used:.2f} s of CPU, {seen}")
    slow = max(slow_before, slowness())  # of a core that others share, and that may be busier before or after
    assert target.is_alive
    wrong = [status for status in replies if (status not in holds.status if holds.status else status >= 500)]
    assert not wrong, f"answered with {wrong}"
    if holds.cpu_seconds is not None:
        assert used <= holds.cpu_seconds * slow
    assert costs.memory_mb <= holds.memory_mb
    assert wait <= holds.waits_seconds * slow
    assert probe <= holds.probe_seconds * slow


def status_of(target: Target, sender: str, request: Request) -> int:
    headers = {"Content-Type": request.content_type, **headers_of(sender)}
    reply = httpx.request(
        request.method, target.url + request.path, content=request.body, headers=headers, timeout=httpx.Timeout(240)
    )
    return reply.status_code
