"""Engines to compare with: transformers, and processes that speak lines of JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.gguf import save_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from kvmosaic.assembly import bundled_reader
from kvmosaic.errors import InvalidConfig, ModelNotFound
from kvmosaic.lab.bench.models import RANDOM_MODELS, model_folder, weigh, weigh_file
from kvmosaic.lab.bench.peers import GeneratePeer, OwnPeer, PeerOptions
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.prompt import Prompt

SYSTEM, ONE, OTHER, QUESTION = range(20, 28), range(30, 46), range(50, 66), range(70, 75)
SAME = Prompt.from_tokens(SYSTEM, [ONE, OTHER], QUESTION)
TURNED = Prompt.from_tokens(SYSTEM, [OTHER, ONE], QUESTION)
ASKED = Prompt.from_tokens(SYSTEM, [OTHER, ONE], range(80, 85))
"""The same documents and another question."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32")


def computed(peer: object, prompt: Prompt) -> int | None:
    return peer.answer([prompt], 3).readings[0].num_computed


def test_transformers_computes_what_differs_from_the_last_prompt(folder: Path) -> None:
    peer = GeneratePeer(folder, "float32")
    assert computed(peer, SAME) == SAME.num_tokens
    assert computed(peer, SAME) == 1, "one token is computed, for its logits"
    assert computed(peer, TURNED) == TURNED.num_tokens - len(SYSTEM)
    peer.reset()
    assert computed(peer, TURNED) == TURNED.num_tokens


def test_transformers_answers_the_same_with_and_without_the_kept_beginning(folder: Path) -> None:
    peer, fresh = GeneratePeer(folder, "float32"), GeneratePeer(folder, "float32")
    peer.answer([SAME], 3)
    peer.answer([TURNED], 6)
    fresh.answer([TURNED], 6)
    assert peer._kept[0] == fresh._kept[0]


def test_prompts_of_one_length_are_one_batch_for_transformers(folder: Path) -> None:
    batch = GeneratePeer(folder, "float32").answer([SAME, TURNED], 4)
    assert len(batch.readings) == 2 and batch.readings[0] == batch.readings[1]
    assert batch.readings[0].token_seconds is not None


def test_our_engine_computes_the_question_only_when_documents_are_known(model: LoadedModel) -> None:
    on, off = (OwnPeer(model, enable_chunk_cache=on, capacity="1MiB") for on in (True, False))
    for peer in (on, off):
        assert computed(peer, SAME) == SAME.num_tokens
    assert computed(on, ASKED) == len(QUESTION)
    assert (computed(off, TURNED) or 0) > len(ONE) + len(OTHER)
    on.reset()
    assert computed(on, TURNED) == TURNED.num_tokens
    assert on.is_ours and not off.is_ours


def test_our_engine_holds_shared_documents_once_and_private_copies_each(model: LoadedModel) -> None:
    held = {}
    for salts in (("", ""), ("a", "b")):
        peer = OwnPeer(model, enable_chunk_cache=True, capacity="1MiB")
        prompts = [Prompt.from_tokens(SYSTEM, [ONE, OTHER], QUESTION, salt=salt) for salt in salts]
        held[salts] = peer.answer(prompts, 2).kv_bytes or 0
    chunk_bytes = (len(ONE) + len(OTHER)) * model.bytes_per_token()
    assert held["a", "b"] - held["", ""] >= chunk_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ("on", "sglang")}, "no engine 'sglang'; choose from on, off"),
        ({"names": ("off",)}, "--engine on"),
    ],
)
def test_wrong_engines_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        PeerOptions(**options)


def test_parameters_are_counted_once_and_by_use(model: LoadedModel) -> None:
    weight = weigh(model.config, 4, model.bytes_per_token())
    assert weight.output_parameters == 128 * 32
    assert weight.num_parameters - weight.linear_parameters == 2 * 128 * 32
    assert weight.step_bytes == (weight.linear_parameters + 128 * 32) * 4


def test_parameters_of_a_file_are_those_of_its_folder(tmp_path: Path) -> None:
    file = weigh_file(save_gguf(tmp_path / "reader.gguf"), 7)
    assert file.element_bytes == pytest.approx(4, rel=1e-3)  # some bytes lie between tensors
    assert replace(file, element_bytes=4) == weigh(LlamaConfig.from_pretrained(bundled_reader()), 4, 7)


def test_random_models_have_the_size_of_their_name() -> None:
    for name, millions in (("random-0.1b", 100), ("random-0.5b", 470)):
        weight = weigh(LlamaConfig(**RANDOM_MODELS[name]), 2, 0)
        assert weight.num_parameters / 1e6 == pytest.approx(millions, rel=0.05)
        # the table of tokens is the output layer too
        assert weight.linear_parameters + weight.output_parameters == weight.num_parameters


def test_unknown_model_is_refused_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"'random-0\.1b'"):
        model_folder("no/such/folder", tmp_path)
