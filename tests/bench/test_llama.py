"""llama.cpp as a peer: its model file, and its worker over a fake of its library."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kvmosaic.bench.models import Subject
from kvmosaic.bench.peers import llama_gguf
from kvmosaic.bench.peers.llama_gguf import LlamaShape, from_bfloat16, in_pairs, llama_weights, to_bfloat16, write_gguf
from kvmosaic.bench.peers.outside import OutsidePeer, llama_peer
from kvmosaic.bench.peers.startup import PeerOptions, open_peers
from kvmosaic.errors import EngineError
from kvmosaic.model import load_model
from kvmosaic.prompt import Prompt

FAKE = Path(__file__).with_name("fake_llama")
VOCAB_SIZE = 128
ONE, LONGER, OTHER = [*range(20, 40)], [*range(20, 40), *range(60, 70)], [*range(80, 100)]


def saved(folder: Path, *, dtype: torch.dtype = torch.bfloat16, **others: Any) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_theta=500_000.0,
        tie_word_embeddings=True,
        **others,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OutsidePeer]:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    peer = llama_peer(Path(sys.executable), folder, "bfloat16", threads=1, max_tokens=3_000)
    yield peer
    peer.close()


def turned_halves(rows: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """The rotation of transformers: number i with number i + D/2."""
    low, high = np.split(rows, 2)
    return np.concatenate([low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)])


def turned_pairs(rows: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """The rotation of llama.cpp: number 2 i with number 2 i + 1."""
    even, odd = rows[::2], rows[1::2]
    both = [even * np.cos(angles) - odd * np.sin(angles), odd * np.cos(angles) + even * np.sin(angles)]
    return np.stack(both, axis=1).reshape(-1)


@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 5), st.integers(0, 10_000))
def test_pairs_of_sorted_rows_turn_as_halves_of_the_rows_before(heads: int, half: int, inputs: int, seed: int) -> None:
    source = np.random.default_rng(seed)
    weight, hidden = source.normal(size=(heads * 2 * half, inputs)), source.normal(size=inputs)
    angles = source.uniform(0, 6, half)
    sorted_weight = in_pairs(weight, 2 * half)
    for head in range(heads):
        rows = slice(head * 2 * half, (head + 1) * 2 * half)
        halves = turned_halves(weight[rows] @ hidden, angles)
        pairs = turned_pairs(sorted_weight[rows] @ hidden, angles)
        np.testing.assert_allclose(pairs, halves.reshape(2, half).T.reshape(-1), atol=1e-12)


@given(st.lists(st.tuples(st.integers(0, 0x7F7E), st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]))))
def test_bfloat16_is_rounded_as_torch_rounds_it(halves: list[tuple[int, int]]) -> None:
    values = np.array([(high << 16) | low for high, low in halves], np.uint32).view(np.float32)
    ours = from_bfloat16(to_bfloat16(values))
    assert ours.tolist() == torch.from_numpy(values).bfloat16().float().tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_weight_is_read_and_named_once(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(tmp_path, dtype=dtype)
    weights = dict(llama_weights(folder, LlamaShape.of(folder)))
    original = {name: weight.float().numpy() for name, weight in load_state(folder).items()}
    assert len(weights) == 2 + 2 * 9, "the tied output layer is not written"
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(weights["token_embd.weight"], original["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights["blk.1.ffn_up.weight"], original["model.layers.1.mlp.up_proj.weight"])
    np.testing.assert_array_equal(weights["blk.1.attn_v.weight"], original["model.layers.1.self_attn.v_proj.weight"])
    keys = original["model.layers.1.self_attn.k_proj.weight"]
    assert (
        weights["blk.1.attn_k.weight"].tolist() == keys[[0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]].tolist()
    )


def load_state(folder: Path) -> dict[str, torch.Tensor]:
    return LlamaForCausalLM.from_pretrained(folder).state_dict()


def test_the_file_says_what_llama_cpp_asks_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    try:
        write_gguf(folder, tmp_path / "model.gguf", "bfloat16")
    finally:
        sys.modules.pop("gguf", None)
    content = json.loads((tmp_path / "model.gguf").read_text())
    tensors = content.pop("tensors")
    assert content == {
        "architecture": "llama",
        "vocab_size": VOCAB_SIZE,
        "tokenizer_model": "none",
        "context_length": 4096,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 48,
        "head_count": 4,
        "head_count_kv": 2,
        "key_length": 8,
        "value_length": 8,
        "rope_dimension_count": 8,
        "rope_freq_base": 500_000.0,
        "layer_norm_rms_eps": 1e-6,
    }
    assert tensors["blk.0.attn_k.weight"] == [[16, 64], "uint8", 30], "two bytes each, told to be bfloat16"
    assert tensors["blk.0.attn_norm.weight"] == [[32], "float32", None]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "qwen3"}, "type 'qwen3'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "positions of type 'yarn'"),
        ({"attention_bias": True}, "biases"),
    ],
)
def test_other_models_are_refused(changed: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ValueError, match=message):
        LlamaShape.of(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_norm.weight", "model.layers.x.mlp.up_proj.weight", "x"])
def test_an_unknown_weight_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no weight of a plain Llama"):
        llama_gguf.llama_name(name)


def test_a_file_with_a_boundless_header_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="said to be 1152921504606846976 bytes long"):
        list(llama_weights(tmp_path, LlamaShape.of(folder)))


def answers(peer: OutsidePeer, prompts: list[list[int]], num_answer: int = 4) -> list[list[int]]:
    reply = peer._ask({"prompts": prompts, "max_tokens": num_answer})
    return [reading["answer"] for reading in reply["readings"]]


def expected(prompt: list[int], num_answer: int = 4) -> list[int]:
    """The rule of the fake."""
    tokens = list(prompt)
    for _ in range(num_answer):
        tokens.append(sum((place + 1) * token for place, token in enumerate(tokens)) % VOCAB_SIZE)
    return tokens[len(prompt) :]


def test_one_prompt_computes_what_differs_from_the_last_one(worker: OutsidePeer) -> None:
    assert worker.version == "9.9.9 of llama-cpp-python (FAST, BIG)"
    computed = [
        worker.answer([Prompt.plain(tokens)], 3).readings[0].num_computed for tokens in (ONE, ONE, LONGER, OTHER)
    ]
    assert computed == [len(ONE), 1, len(LONGER) - len(ONE), len(OTHER)]
    worker.reset()
    assert worker.answer([Prompt.plain(OTHER)], 3).readings[0].num_computed == len(OTHER)


def test_answers_are_the_same_alone_together_and_after_others(worker: OutsidePeer) -> None:
    wanted = [expected(prompt) for prompt in (ONE, LONGER, OTHER)]
    assert [answers(worker, [prompt])[0] for prompt in (ONE, LONGER, OTHER)] == wanted
    assert answers(worker, [ONE, LONGER, OTHER]) == wanted
    assert answers(worker, [LONGER]) == [expected(LONGER)]
    # more than there are slots
    assert answers(worker, [ONE, LONGER, OTHER] * 4) == wanted * 4


def test_prompts_longer_than_a_call_are_cut(worker: OutsidePeer) -> None:
    prompts = [[number, *range(16, 116)] * 20 for number in (1, 2, 3)]
    assert answers(worker, prompts) == [expected(prompt) for prompt in prompts]
    batch = worker.answer([Prompt.plain(prompt) for prompt in prompts], 2)
    assert batch.readings[0].first_seconds < batch.readings[2].first_seconds
    num_held = sum(map(len, prompts)) + 3
    assert batch.kv_bytes == num_held * 2 * 2 * 16 * 2, "keys and values of 2 layers, 2 heads of 8, 2 bytes"


def test_a_worker_that_cannot_store_a_prompt_says_so(worker: OutsidePeer) -> None:
    with pytest.raises(EngineError, match="llama_decode returned 1"):
        answers(worker, [ONE * 200])


def test_llama_cpp_is_opened_or_left_out_with_a_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder, dtype="float32")

    def opened(python: Path | None) -> tuple[list[str], str]:
        options = PeerOptions(("on", "llama.cpp"), capacity="1MiB", llama_python=python, max_tokens=64)
        with ExitStack() as stack:
            peers, notes = open_peers(Subject(folder, {"float32": model}, {}), options, stack)
            return [peer.name for peer in peers], notes[-1]

    assert opened(None) == (
        ["kvmosaic"],
        "llama.cpp in float32 is left out: --llama-python names no environment with llama-cpp-python and gguf.",
    )
    names, note = opened(Path(sys.executable))
    assert names == ["kvmosaic"] and "No module named 'llama_cpp'" in note
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    names, note = opened(Path(sys.executable))
    assert names == ["kvmosaic", "llama.cpp"]
    assert note == "llama.cpp in float32 is version 9.9.9 of llama-cpp-python (FAST, BIG)."
