"""Low-rank adapters: files, rows of several adapters in one forward, and chunks that none of them shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.adapters import ATTENTION, random_adapter
from support.families import build
from support.loaded import random_prompt
from support.tiny import save_tiny_model

from kvmosaic import LLM, SamplingParams
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.errors import InvalidAdapter, InvalidConfig, InvalidPrompt
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.model.cpu.prepack import has_onednn_for_bfloat16
from kvmosaic.model.lora import LoraAdapter, adapter_scope, attach, merge, read_adapter, write_adapter
from kvmosaic.model.lora.attach import AdaptedRows
from kvmosaic.prompt import Prompt

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)


def adapter_of(module: Any, seed: int, *targets: str) -> LoraAdapter:
    return random_adapter(module, seed, targets or ATTENTION)


def engine_of(module: Any, **adapters: LoraAdapter) -> LLM:
    """An engine over one more model of the same weights, so that the others stay as they are."""
    twin = build("llama", torch.float64)
    twin.load_state_dict(module.state_dict())
    return LLM(LoadedModel.from_module(twin, adapters=adapters), profile=False, **small())


def small() -> dict[str, Any]:
    return {
        "chunk_cache_config": ChunkCacheConfig(chunk_cache_size="4MiB", repair="none", position_strategy="sequential"),
        "engine_config": EngineConfig(request_cache_size="4MiB"),
    }


def merged_engine(module: Any, adapter: LoraAdapter) -> LLM:
    twin = build("llama", torch.float64)
    twin.load_state_dict(module.state_dict())
    merge(twin, adapter)
    return LLM(LoadedModel.from_module(twin), profile=False, **small())


def scores(llm: LLM, prompt: Prompt) -> list[float]:
    """Log probabilities of a given answer."""
    (output,) = llm.score([prompt], [[7, 8, 9, 10]])
    return list(output.logprobs)


def named(prompt: Prompt, adapter: str | None) -> Prompt:
    from dataclasses import replace

    return replace(prompt, adapter=adapter)


def close(one: list[float], other: list[float], tolerance: float = 1e-9) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < tolerance


@pytest.fixture(scope="module")
def module() -> Any:
    return build("llama", torch.float64)


def test_an_adapter_is_read_as_it_was_written_and_its_content_identifies_it(module: Any, tmp_path: Path) -> None:
    adapter = adapter_of(module, 0)
    write_adapter(adapter, tmp_path, "some/model")
    read = read_adapter(tmp_path)
    assert read.digest == adapter.digest and set(read.layers) == set(adapter.layers)
    assert adapter_of(module, 1).digest != adapter.digest
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = max(tensors)
    tensors[name][0, 0] += 1e-9
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert read_adapter(tmp_path).digest != adapter.digest


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_peft_reads_what_is_written_and_computes_the_same(module: Any, tmp_path: Path) -> None:
    adapter = adapter_of(module, 0)
    write_adapter(adapter, tmp_path, "some/model")
    base, ours = build("llama", torch.float64), build("llama", torch.float64)
    for twin in (base, ours):
        twin.load_state_dict(module.state_dict())
    theirs = PeftModel.from_pretrained(base, tmp_path, autocast_adapter_dtype=False).double().eval()
    attach(ours, adapter)
    tokens = torch.arange(3, 23)[None]
    with torch.inference_mode(), adapter_scope([AdaptedRows(adapter.digest, slice(0, 20))]):
        found = ours.eval()(input_ids=tokens).logits
    with torch.inference_mode():
        expected = theirs(input_ids=tokens).logits
    assert float((found - expected).abs().max()) < 1e-9
    with torch.inference_mode():
        assert torch.equal(ours(input_ids=tokens).logits, module.eval()(input_ids=tokens).logits)


def test_prompts_of_several_adapters_share_steps_and_each_is_as_with_its_merged_weights(module: Any) -> None:
    first, second = adapter_of(module, 1), adapter_of(module, 2, "v_proj", "down_proj")
    prompt = random_prompt()
    llm = engine_of(module, first=first, second=second)
    prompts = [named(prompt, name) for name in (None, "second", "", "first")]
    outputs = llm.generate(prompts, GREEDY)
    alone = [
        merged_engine(module, first),
        merged_engine(module, second),
        engine_of(module),
        merged_engine(module, first),
    ]
    for output, other in zip(outputs, alone, strict=True):
        (expected,) = other.generate([prompt], GREEDY)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    for adapted, other in zip(prompts, alone, strict=True):
        assert close(scores(llm, adapted), scores(other, prompt))
    assert not close(scores(llm, prompts[0]), scores(llm, prompts[2]), 1e-3)


def test_ordinary_prompts_are_the_base_models_to_the_bit(module: Any) -> None:
    prompt = Prompt.plain(range(3, 40))
    with_adapter, without = engine_of(module, tuned=adapter_of(module, 1)), engine_of(module)
    assert scores(with_adapter, prompt) == scores(without, prompt)
    assert not close(scores(with_adapter, named(prompt, "tuned")), scores(without, prompt), 1e-3)


@pytest.mark.slow
def test_documents_that_are_alike_are_read_in_full_by_the_adapter_and_by_the_base_model_if_asked(module: Any) -> None:
    alike = [[*range(20, 36)], [*range(20, 27), 70, 71, *range(29, 36)]]
    prompt, adapter = Prompt.from_tokens([2, 3], alike, [5, 6, 7]), adapter_of(module, 1)
    config = {**small(), "chunk_cache_config": ChunkCacheConfig(chunk_cache_size="4MiB")}
    twin = build("llama", torch.float64)
    twin.load_state_dict(module.state_dict())
    llm = LLM(LoadedModel.from_module(twin, adapters={"tuned": adapter}), profile=False, **config)
    assert close(scores(llm, prompt), scores(merged_engine(module, adapter), prompt.joined()))
    (full,) = llm.score([prompt], [[7, 8, 9, 10]], repair="full")
    assert close(list(full.logprobs), scores(engine_of(module), prompt.joined()))


def test_an_adapter_that_no_key_depends_on_shares_the_chunks_of_the_base_model(module: Any) -> None:
    last = module.config.num_hidden_layers - 1
    whole = adapter_of(module, 1, "o_proj", "down_proj")
    late = LoraAdapter({name: layer for name, layer in whole.layers.items() if f".{last}." in name})
    assert late.layers
    llm, prompt = engine_of(module, late=late), random_prompt()
    llm.generate([named(prompt, "")], GREEDY)
    (output,) = llm.generate([named(prompt, "late")], GREEDY)
    assert output.reuse.computed_tokens < prompt.segments[-1].num_tokens + 2
    assert close(scores(llm, named(prompt, "late")), scores(merged_engine(module, late), prompt))
    llm = engine_of(module, whole=whole)
    llm.generate([named(prompt, "")], GREEDY)
    (output,) = llm.generate([named(prompt, "whole")], GREEDY)
    assert output.reuse.computed_tokens == prompt.num_tokens


def test_equal_content_under_two_names_shares_chunks(module: Any) -> None:
    llm, prompt = engine_of(module, one=adapter_of(module, 1), other=adapter_of(module, 1)), random_prompt()
    llm.generate([named(prompt, "one")], GREEDY)
    (output,) = llm.generate([named(prompt, "other")], GREEDY)
    assert output.reuse.computed_tokens < prompt.segments[-1].num_tokens + 2


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["", "a", "b"])), min_size=2, max_size=6))
def test_no_chunk_crosses_adapters(asked: list[tuple[int, str]]) -> None:
    """Whatever was asked before, and by whom, a prompt is what a fresh engine computes."""
    module = build("llama", torch.float64)
    adapters = {"a": adapter_of(module, 1), "b": adapter_of(module, 2)}
    llm = engine_of(module, **adapters)
    seen: set[tuple[int, str]] = set()
    for number, name in asked:
        prompt = named(random_prompt(number), name)
        fresh = engine_of(module, **adapters)
        (output,) = llm.generate([prompt], GREEDY)
        assert (output.reuse.computed_tokens < prompt.num_tokens) == ((number, name) in seen)
        assert close(scores(llm, prompt), scores(fresh, prompt))
        seen.add((number, name))


def test_an_unknown_adapter_is_refused_and_nothing_changes(module: Any) -> None:
    llm = engine_of(module, tuned=adapter_of(module, 1))
    with pytest.raises(InvalidPrompt, match="no adapter 'other'; loaded are 'tuned'"):
        llm.generate([named(random_prompt(), "other")], GREEDY)
    with pytest.raises(InvalidPrompt, match="loaded are none; load it with"):
        engine_of(module).generate([named(random_prompt(), "other")], GREEDY)


def test_an_adapter_of_another_model_is_refused_and_the_model_stays_as_it_was(module: Any) -> None:
    other = build("llama", torch.float64, hidden_size=48)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for act in (attach, merge):
        with pytest.raises(InvalidAdapter, match="trained for another model"):
            act(other, adapter_of(module, 0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    lost = LoraAdapter({"model.layers.9.self_attn.q_proj": next(iter(adapter_of(module, 0).layers.values()))})
    with pytest.raises(InvalidAdapter, match="has no such layer"):
        attach(other, lost)


def test_a_loaded_model_takes_no_adapters_later(module: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="loaded already"):
        LLM(LoadedModel.from_module(build("llama", torch.float64)), adapter={"a": tmp_path})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("peft_type", "IA3"),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("lora_alpha", "large"),
        ("lora_alpha", float("inf")),
        ("alpha_pattern", [1]),
    ],
)
def test_what_would_compute_something_else_is_refused_by_name(
    module: Any, tmp_path: Path, setting: str, value: object
) -> None:
    write_adapter(adapter_of(module, 0), tmp_path, "some/model")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), setting: value}))
    with pytest.raises(InvalidAdapter, match=r"LORA|not supported|finite numbers"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"[]"),
        ("adapter_config.json", b"[" * 100_000),
        ("adapter_config.json", b"\xff\xfe"),
        ("adapter_model.safetensors", b""),
        ("adapter_model.safetensors", b"\x80" * 64),
    ],
)
def test_damaged_files_are_refused(module: Any, tmp_path: Path, name: str, content: bytes) -> None:
    write_adapter(adapter_of(module, 0), tmp_path, "some/model")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidAdapter):
        read_adapter(tmp_path)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_an_adapter_says_what_is_missing(module: Any, tmp_path: Path, missing: str) -> None:
    write_adapter(adapter_of(module, 0), tmp_path, "some/model")
    (tmp_path / missing).unlink()
    with pytest.raises(InvalidAdapter, match=missing):
        read_adapter(tmp_path)


@pytest.mark.parametrize("change", ["half", "shape", "nan", "unknown"])
def test_strange_tensors_are_refused(module: Any, tmp_path: Path, change: str) -> None:
    write_adapter(adapter_of(module, 0), tmp_path, "some/model")
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    if change == "half":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif change == "nan":
        tensors[name][0, 0] = float("nan")
    else:
        tensors["base_model.model.lm_head.weight"] = torch.zeros(2, 2)
    save_file(tensors, path)
    with pytest.raises(InvalidAdapter):
        read_adapter(tmp_path)


def test_a_layer_whose_weights_the_model_reads_itself_is_refused_but_can_be_merged() -> None:
    """Latent attention multiplies queries with the weights of kv_b_proj: an update beside them would be left out."""
    module = build("deepseek_v2", torch.float64)
    adapter = random_adapter(module, 0, ("kv_b_proj", "o_proj"))
    with pytest.raises(InvalidAdapter, match=r"kv_b_proj .*reads itself.*merge"):
        LoadedModel.from_module(module, adapters={"tuned": adapter})
    merge(build("deepseek_v2", torch.float64), adapter)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v2", "phi3", "qwen3_moe"])
def test_other_families_compute_with_an_adapter_as_with_merged_weights(family: str) -> None:
    module = build(family, torch.float64)
    targets = ("o_proj",) if family == "deepseek_v2" else ("qkv_proj", *ATTENTION)
    adapter, prompt = random_adapter(module, 0, targets), random_prompt()
    merged = build(family, torch.float64)
    merged.load_state_dict(module.state_dict())
    merge(merged, adapter)
    found = LLM(LoadedModel.from_module(module, adapters={"tuned": adapter}), profile=False, **small())
    expected = LLM(LoadedModel.from_module(merged), profile=False, **small())
    assert close(scores(found, prompt), scores(expected, prompt), 1e-8)


@pytest.mark.parametrize(
    "prepack",
    [
        "never",
        pytest.param("always", marks=pytest.mark.skipif(not has_onednn_for_bfloat16(), reason="no oneDNN")),
    ],
)
def test_packed_layers_take_adapters(tmp_path: Path, prepack: Any) -> None:
    """bfloat16: the update is added after the multiplication with weights in whatever form they are."""
    folder = save_tiny_model(tmp_path / "model")
    adapter = random_adapter(load_model(folder, dtype="float32").module, 0, size=1.0)
    (tmp_path / "adapter").mkdir()
    write_adapter(adapter, tmp_path / "adapter", "model")
    how: dict[str, Any] = {"dtype": "bfloat16", "prepack": prepack}
    beside = LLM(load_model(folder, **how, adapters={"tuned": tmp_path / "adapter"}), profile=False, **small())
    exact = LLM(load_model(folder, dtype="float32", adapters={"a": tmp_path / "adapter"}), profile=False, **small())
    prompt = random_prompt()
    found, without, expected = scores(beside, prompt), scores(beside, named(prompt, "")), scores(exact, prompt)
    apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert apart < 0.3 * max(abs(a - b) for a, b in zip(without, expected, strict=True)), "the update is there"
