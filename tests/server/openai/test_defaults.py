"""Sampling fields that a request leaves out: those of the model's generation configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.asking import QUESTION, post
from support.server import RunningServer

from kvmosaic.assembly import bundled_reader
from kvmosaic.model import load_model

ANSWER = {"prompt": QUESTION, "max_tokens": 12, "ignore_eos": True}
SAID = {"do_sample": True, "temperature": 1.9, "top_p": 0.9, "top_k": 1, "repetition_penalty": 0}


def texts(http: httpx.Client, **fields) -> list[str]:
    """Several answers to one prompt."""
    return [choice["text"] for choice in post(http, "/v1/completions", **ANSWER, n=4, **fields)["choices"]]


def echoed(http: httpx.Client, **fields) -> tuple[float, float]:
    """Temperature and top_p as /v1/responses says them."""
    reply = post(http, "/v1/responses", input=QUESTION, max_output_tokens=1, **fields)
    return reply["temperature"], reply["top_p"]


def client_of(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with another generation configuration."""
    path = tmp_path_factory.mktemp("model") / "reader"
    shutil.copytree(bundled_reader(), path)
    declared = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**declared, **SAID}))
    return path


@pytest.fixture(scope="module")
def drawing(folder: Path) -> Iterator[httpx.Client]:
    """A server of that model."""
    with RunningServer(loaded=load_model(folder, dtype="float32", device="cpu")) as server, client_of(server) as http:
        yield http


def test_model_that_says_do_sample_false_is_greedy_unless_it_is_told_otherwise(http):
    (greedy,) = set(texts(http, temperature=0))
    assert set(texts(http)) == set(texts(http, temperature=None)) == {greedy}
    assert len(set(texts(http, temperature=2.0, seed=3))) > 1
    assert echoed(http) == (0, 1)
    assert echoed(http, temperature=0.5, top_p=0.25) == (0.5, 0.25)


def test_conversations_are_greedy_too(http):
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "ignore_eos": True, "n": 4}
    choices = post(http, "/v1/chat/completions", **body)["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 1


def test_values_of_the_models_folder_count_where_a_request_says_nothing(drawing, http):
    greedy = set(texts(http))
    assert echoed(drawing) == (1.9, 0.9)
    assert set(texts(drawing)) == set(texts(drawing, top_k=None)) == greedy  # top_k is 1
    assert len(set(texts(drawing, top_k=0, seed=3))) > 1
    assert echoed(drawing, temperature=0, top_p=1) == (0, 1)


def test_defaults_are_openais_where_the_file_is_not_to_be_followed():
    with RunningServer(generation_config="none") as server, client_of(server) as http:
        assert echoed(http) == (1, 1)
        assert len(set(texts(http, seed=3))) > 1
        assert len(set(texts(http, temperature=0, seed=3))) == 1
