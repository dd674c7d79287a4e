"""Prompts with documents are computed by an adapter over HTTP, too, and a request may choose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapters import random_adapter
from support.asking import DOCUMENTS, GREEDY, post, refused
from support.server import RunningServer

from kvmosaic.assembly import bundled_reader
from kvmosaic.model import load_model
from kvmosaic.model.lora import write_adapter

MESSAGES = [{"role": "user", "content": "Where does the ferry go?"}]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folders: dict[str, Path] = {name: tmp_path_factory.mktemp(name) for name in ("first", "second")}
    module = load_model(bundled_reader(), dtype="float32").module
    for seed, folder in enumerate(folders.values()):
        write_adapter(random_adapter(module, seed, size=0.02), folder, "reader")
    loaded = load_model(bundled_reader(), dtype="float32", adapters=folders)
    with RunningServer(loaded=loaded) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


class Numbers(list[float]):
    """Log probabilities, equal up to the rounding of float32 in forwards of other shapes."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, list)
        return max(abs(one - two) for one, two in zip(self, other, strict=True)) < 5e-4

    def __ne__(self, other: object) -> bool:
        return not self == other


def answer(http: httpx.Client, **fields: Any) -> tuple[Numbers, list[str]]:
    reply = post(http, "/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=1, **GREEDY, **fields)
    (choice,) = reply["choices"]
    numbers = Numbers(token["logprob"] for token in choice["logprobs"]["content"])
    return numbers, [each["action"] for each in reply["kvmosaic"]["documents"]]


def test_an_adapters_name_is_no_model(http: httpx.Client) -> None:
    error = refused(http, "/v1/chat/completions", messages=MESSAGES, model="first")
    assert error["status"] == 404 and "send it as 'adapter'" in error["message"]


def test_a_request_chooses_an_adapter_and_none_reads_anothers_chunks(http: httpx.Client) -> None:
    found = {}
    for name in (None, "first", "second", ""):
        fields: dict[str, Any] = {} if name is None else {"adapter": name}
        cold, actions = answer(http, documents=DOCUMENTS, **fields)
        assert set(actions) == {"reused" if name == "first" else "computed"}, "the first one is the default"
        assert answer(http, documents=DOCUMENTS, **fields)[0] == cold
        found[name] = cold
    assert found[None] == found["first"] != found["second"] != found[""] != found["first"]


def test_ordinary_prompts_are_the_base_models(http: httpx.Client) -> None:
    assert answer(http)[0] == answer(http, adapter="")[0] != answer(http, adapter="second")[0]


def test_an_unknown_adapter_is_an_error_of_the_client(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, **GREEDY, "documents": DOCUMENTS, "adapter": "third"}
    error = refused(http, "/v1/chat/completions", **body)
    assert error["status"] == 400 and "no adapter 'third'; loaded are 'first', 'second'" in error["message"]
