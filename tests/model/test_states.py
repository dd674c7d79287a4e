"""Layers with a state: documents composed in any order give what transformers gives, run token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import GREEDY, answer, build_engine
from support.families import HYBRIDS, build
from support.float64 import Float64
from support.hybrid import oracle_logits
from support.loaded import loaded_hybrid, random_prompt
from torch import Tensor, nn

from kvmosaic.attention import RowStates, SpanRows
from kvmosaic.cache.block_table import SavedState, StateProgress
from kvmosaic.engine.self_check.whole import run_self_check
from kvmosaic.errors import InvalidConfig, InvalidRepair, UnsupportedModel
from kvmosaic.layout import arrange
from kvmosaic.llm import LLM
from kvmosaic.model import LoadedModel
from kvmosaic.model.states import LayerState, StateLayer, install_states, mixing_scope
from kvmosaic.model.step_states import StepStates
from kvmosaic.prompt import Prompt


def check(family: str, prompt: Prompt, orders: tuple[tuple[int, ...], ...]) -> None:
    """Whatever was cached before, an order gives what transformers gives."""
    model = loaded_hybrid(family)
    engine = build_engine(model)
    parts: list[Any] = [list(segment.token_ids or ()) for segment in prompt.segments]
    for order in orders:
        asked = Prompt.from_tokens(system=parts[0], chunks=[parts[1 + number] for number in order], question=parts[-1])
        expected = oracle_logits(model.module, arrange(asked, "shared"))[-1]
        for _ in range(2):
            _, logits = answer(engine, asked, GREEDY)
            assert (logits[0] - expected).abs().max() <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_documents_in_any_order_cold_and_warm_equal_transformers_token_by_token(family: str) -> None:
    check(family, random_prompt(), ((0, 1, 2), (2, 0, 1), (1,), (2, 0)))


@pytest.mark.parametrize("family", ["minimax", "lfm2"])
def test_documents_in_two_orders_equal_transformers_token_by_token(family: str) -> None:
    check(family, random_prompt(system=3, chunks=(4, 2), question=6), ((0, 1), (1, 0)))


LIKE = torch.zeros(1, dtype=torch.float64)


class Delta(nn.Module):
    """A layer with a gated delta rule, and one planted fault at most."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.layer_idx = 0
        self.fault = fault
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 8, 8, generator=generator, dtype=torch.float64) / 3)
        self.taps = nn.Parameter(torch.randn(3, 8, 1, generator=generator, dtype=torch.float64))

    def forward(self, hidden_states: Tensor, cache_params: Any = None) -> Tensor:
        tail = cache_params.get_conv_state(self.layer_idx)
        memory = cache_params.get_recurrent_state(self.layer_idx)
        inputs = cache_params.update_conv_state(hidden_states.transpose(1, 2), self.layer_idx, conv_kernel_size=3)
        if tail is None or self.fault == "tail":
            inputs = nn.functional.pad(inputs[..., -hidden_states.shape[1] :], (3, 0))
        count = hidden_states.shape[1]
        mixed = sum(
            self.taps[k].T * inputs.transpose(1, 2)[:, -count - k : inputs.shape[2] - k or None] for k in range(3)
        )
        key, value, query = (mixed @ self.weight[number] for number in range(3))
        if memory is None or self.fault == "memory":
            memory = hidden_states.new_zeros(hidden_states.shape[0], 8, 8)
        outputs = []
        for step in range(count):
            k, v = nn.functional.normalize(key[:, step], dim=-1)[..., None], value[:, step, None]
            memory = 0.9 * (memory - 0.5 * k @ (k.transpose(1, 2) @ memory)) + 0.5 * k @ v
            if self.fault == "decay":
                memory = memory / (1 + memory.abs().mean())
            outputs.append((query[:, step, None] @ memory)[:, 0])
        cache_params.update_recurrent_state(memory, self.layer_idx)
        return torch.stack(outputs, dim=1)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("tail", "gives other results when it continues from its own state"),
        ("memory", "gives other results when it continues from its own state"),
        ("decay", "is not a linear map of what it was before"),
    ],
)
def test_a_layer_that_does_something_else_with_its_state_is_refused(fault: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        install_states(nn.ModuleList([Delta(fault)]), 8, LIKE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", HYBRIDS)
def test_every_family_loads_and_passes_its_self_check_in_every_dtype(family: str, dtype: torch.dtype) -> None:
    coarse, fine = LoadedModel.from_module(build(family, dtype)), loaded_hybrid(family)
    assert [layer.kind for layer in coarse.state_layers] == [layer.kind for layer in fine.state_layers]
    check = run_self_check(coarse)
    assert check.passed, check.reason


@torch.inference_mode()
def test_how_documents_change_a_memory_is_found() -> None:
    model = nn.ModuleList([Delta()])
    (layer,) = install_states(model, 8, LIKE)
    assert (layer.kind, layer.memory_shape, layer.one_by_one) == ("left", (8, 8), False)
    texts = [torch.randn(1, count, 8, dtype=torch.float64) for count in (5, 3, 7)]
    end: LayerState | None = None
    memory = layer.zero_memory(torch.device("cpu"))
    for text in texts:
        _, kept = layer.run_with_map(text, end)
        _, end = layer.run(text, None if end is None else end.repeated(1))
        memory = layer.applied(kept.gain, memory) + kept.offset
        assert end.memory is not None and (memory - end.memory).abs().max() <= 1e-12


@torch.inference_mode()
def test_rows_run_after_those_that_they_begin_from() -> None:
    (layer,) = install_states(nn.ModuleList([Delta()]), 8, LIKE)
    chunk, last, hidden = SavedState(has_map=True), SavedState(), torch.randn(1, 5, 8, dtype=torch.float64)

    def rows(count: int, saved: SavedState, *seen: SavedState) -> SpanRows:
        states = RowStates(StateProgress(None, ((count, saved),)), seen)
        return SpanRows([1] * count, 0, "request", range(count), (), state=states)

    output = StepStates(1, [rows(2, last, chunk), rows(3, chunk)])(layer, hidden)
    document, state = layer.run(hidden[:, 2:], None)
    question, _ = layer.run(hidden[:, :2], state)
    torch.testing.assert_close(output, torch.cat([question, document], dim=1))


def test_a_layer_is_its_own_where_no_mixer_is_in_scope() -> None:
    model, hidden = nn.ModuleList([Delta()]), torch.randn(1, 4, 8, dtype=torch.float64)
    (layer,) = install_states(model, 8, LIKE)

    def twice(layer: StateLayer, hidden: Tensor) -> Tensor:
        return 2 * layer.run(hidden, None)[0]

    alone = layer.run(hidden, None)[0]
    with mixing_scope(twice):
        torch.testing.assert_close(model[0](hidden), 2 * alone)


def test_what_hybrid_models_cannot_do_is_refused_with_the_reason(tmp_path: Any) -> None:
    from kvmosaic import ChunkCacheConfig, EngineConfig
    from kvmosaic.lab.adapt.trainer import AdaptSettings, Trainer

    with Float64():
        model = LoadedModel.from_module(build("lfm2"))
    assert "carries a state from token to token" in model.no_window_reason
    for setting, message in (
        ({"repair": "names"}, r"use 'none', .* or start with repair='first\(8\)'"),
        ({"repair": "first(4)"}, r"the first 8 tokens of documents are kept apart: use 'first\(8\)', "),
    ):
        engine = build_engine(model, repaired_tokens=8 if "4" in setting["repair"] else 0)
        with pytest.raises(InvalidRepair, match=message):
            answer(engine, random_prompt(), replace(GREEDY, **setting))
    with pytest.raises(InvalidConfig, match="lessons are composed by attention alone"):
        Trainer(model, None, AdaptSettings(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"a state of this model takes .* give it \d+ MiB or more"):
        LLM(
            model,
            chunk_cache_config=ChunkCacheConfig(chunk_cache_size="1MiB"),
            engine_config=EngineConfig(request_cache_size="600KiB"),
        )
