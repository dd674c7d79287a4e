"""An attack as data: one YAML file says who sends what, and what must hold.

    tries: One text that never ends, without a key.
    as: anonymous                              # anonymous (no key), hostile (a tenant's key; the default) or admin
    send:
      - method: GET                            # POST unless said
        path: /livez
        text: ['"', {repeat: '\\"', times: 30_000}]
      - path: /v1/chat/completions
        json: {messages: [{role: user, content: {repeat: "x ", times: 1_000_000}}]}
        times: 2                               # at once
    holds: {status: [200], cpu_seconds: 0.5}
    unmet: Why a bound does not hold yet.   # the attack still runs, and what it costs is printed

In `json`, `{repeat: …, times: …}` stands for a text, or for a list where what is repeated is a list; "{i}" in what is
repeated is its number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "attack" / "attacks"


@dataclass(frozen=True)
class Request:
    """What is sent, so many times at once."""

    path: str
    body: bytes
    method: str = "POST"
    content_type: str = "application/json"
    times: int = 1


@dataclass(frozen=True)
class Limits:
    """What must hold.

    status: of the replies; empty: any but one of the server's own failures.
    cpu_seconds: most that the server may use for all of it; None: what a tenant may cost itself is not limited here.
    memory_mb: most that the server's resident memory may grow, at its highest.
    waits_seconds: most that another tenant's chat, and a probe, may wait, counted in CPU time of the server.
    probe_seconds: the same of `/livez`, for 99 of 100.
    """

    status: tuple[int, ...] = ()
    cpu_seconds: float | None = None
    memory_mb: float = 300.0
    waits_seconds: float = 0.5
    probe_seconds: float = 0.1


@dataclass(frozen=True)
class Attack:
    """One file."""

    name: str
    tries: str
    sender: str
    requests: tuple[Request, ...]
    holds: Limits = field(default_factory=Limits)
    unmet: str = ""
    """Why a bound does not hold yet."""


def read_attacks() -> list[Attack]:
    """All of them, by name."""
    return [read_attack(path) for path in sorted(FOLDER.glob("*.yaml"))]


def read_attack(path: Path) -> Attack:
    """What a file says; a field that is not known is a mistake of the file."""
    data = yaml.safe_load(path.read_text())
    requests = tuple(_request(each) for each in data.pop("send"))
    holds = data.pop("holds", {})
    status = holds.pop("status", [])
    sender = data.pop("as", "hostile")
    limits = Limits(status=tuple(status), **holds)
    attack = Attack(path.stem, data.pop("tries"), sender, requests, limits, data.pop("unmet", ""))
    assert not data, f"{path.name}: {sorted(data)} are not known"
    assert sender in ("anonymous", "hostile", "admin"), f"{path.name}: no sender {sender!r}"
    return attack


def _request(data: dict[str, Any]) -> Request:
    data = dict(data)
    body = b""
    if "text" in data:
        body = str(_grown(data.pop("text"))).encode()
    elif "json" in data:
        body = json.dumps(_grown(data.pop("json"))).encode()
    return Request(body=body, **data)


def _grown(value: Any) -> Any:
    if isinstance(value, dict):
        if _is_repetition(value):
            return _repeated(value["repeat"], value["times"])
        return {name: _grown(part) for name, part in value.items()}
    if isinstance(value, list):
        grown = [_grown(part) for part in value]
        # a list of texts is one text where one of them is repeated
        return "".join(grown) if any(_is_repetition(part) for part in value) and all_texts(grown) else grown
    return value


def all_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_repetition(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"repeat", "times"}


def _repeated(value: Any, times: int) -> Any:
    if isinstance(value, str):
        return value * times if "{i}" not in value else "".join(value.replace("{i}", str(i)) for i in range(times))
    written = json.dumps(_grown(value))
    items = [json.loads(written.replace("{i}", str(i))) for i in range(times)]
    if isinstance(value, dict) and set(value) == {"name", "value"}:  # fields of an object
        return {item["name"]: item["value"] for item in items}
    return [part for item in items for part in item] if isinstance(value, list) else items
