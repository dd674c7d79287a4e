"""Tokens computed again inside vLLM, and tokens that stand earlier than their index says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.vllm.asking import documents

from kvmosaic.vllm.operations import Operations, RepairedRun, ShiftedTokens
from kvmosaic.vllm.worker.extra_forward import AttentionRows, ExtraForward, Repairer, can_run
from kvmosaic.vllm.worker.kv_layout import KVLayout
from kvmosaic.vllm.worker.position_shift import PositionShift, can_shift, step_slots

ENGINES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "deepseek": {"environment": {}},  # with its latent cache
}
LENGTH = 203
RUNS = {
    "one": [(50, 90)],
    "one token": [(64, 65)],
    "all": [(0, LENGTH)],
    "several, each seeing those before": [(10, 11), (64, 100), (100, 101), (150, LENGTH)],
    "in no order": [(150, LENGTH), (20, 30), (32, 40)],
}


class Parts:
    """What a worker has of vLLM, found as the plugin finds it."""

    def __init__(self, engine: Any) -> None:
        worker = engine.core.model_executor.driver_worker.worker
        self.configurations = worker.vllm_config, worker.model_runner.kv_cache_config
        layers = worker.vllm_config.compilation_config.static_forward_context
        caches = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
        self.places = KVLayout.of(worker.vllm_config, caches)

    def nested(self) -> ExtraForward:
        return ExtraForward(*self.configurations, self.places.root)

    def read(self, blocks: Sequence[int], start: int, end: int) -> list[torch.Tensor]:
        slots = self.places.slots(blocks, start, end - start)
        found = (part for place in self.places.layers for part in place.layout.read(slots))
        return [part for part in found if part is not None]

    def spoil(self, blocks: Sequence[int], start: int, end: int) -> None:
        slots = self.places.slots(blocks, start, end - start)
        for place in self.places.layers:
            parts = (None if part is None else torch.randn_like(part) for part in place.layout.read(slots))
            place.layout.write(slots, *parts)


def answered(engine: Any, token_ids: Sequence[int], root: torch.nn.Module) -> tuple[Any, list[int]]:
    """What vLLM answers to a prompt, and the blocks that its first forward wrote to."""
    from vllm import SamplingParams

    slots: list[torch.Tensor] = []
    hook = root.register_forward_pre_hook(lambda *_: slots.append(step_slots().clone()))
    try:
        params = SamplingParams(max_tokens=6, temperature=0, logprobs=4, ignore_eos=True, detokenize=False)
        output = engine.llm.generate([{"prompt_token_ids": list(token_ids)}], params, use_tqdm=False)[0]
    finally:
        hook.remove()
    block_size = engine.scheduler.block_size
    return output, list(dict.fromkeys((slots[0] // block_size).tolist()))


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(one, other, strict=True))


def recompute(engine: Any, runs: list[list[int]], small: bool) -> dict[str, Any]:
    """Spoils tokens of an answered prompt, computes them again, and asks once more."""
    parts = Parts(engine)
    engine.llm.reset_prefix_cache()
    token_ids = documents(3, LENGTH)[0]
    before, blocks = answered(engine, token_ids, parts.places.root)
    wanted = parts.read(blocks, 0, LENGTH)
    for start, end in runs:
        parts.spoil(blocks, start, end)
    spoiled = apart(wanted, parts.read(blocks, 0, LENGTH))
    nested = parts.nested()
    if small:
        nested.max_tokens, nested.max_runs = 16, 3
    repairs = [RepairedRun(tuple(blocks), start, tuple(token_ids[start:end]), start) for start, end in runs]
    num_forwards = Repairer(nested).run(repairs)
    repaired = apart(wanted, parts.read(blocks, 0, LENGTH))
    after, _ = answered(engine, token_ids, parts.places.root)
    return {
        "spoiled": spoiled,
        "repaired": repaired,
        "num_forwards": num_forwards,
        "same": list(before.outputs[0].token_ids) == list(after.outputs[0].token_ids),
        "can_run": can_run(*parts.configurations),
    }


@pytest.mark.parametrize("small", [False, True], ids=["one forward", "small forwards"])
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("name", ENGINES)
def test_tokens_computed_again_are_those_of_the_prefill(vllm_engine, name, runs, small):
    said = vllm_engine(name, **ENGINES[name]).call(recompute, runs=RUNS[runs], small=small)
    assert said["can_run"] == ""
    assert said["spoiled"] > 0.1
    assert said["repaired"] < 1e-5
    assert said["same"]
    num_tokens = sum(end - start for start, end in RUNS[runs])
    assert said["num_forwards"] >= num_tokens / 16 if small else said["num_forwards"] == 1


def interrupt(engine: Any) -> dict[str, Any]:
    """A nested forward inside another one, with a connector that counts how often layers call it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.forward_context import get_forward_context, set_forward_context

    from kvmosaic.vllm.connector import StepMetadata

    parts, connector, called = Parts(engine), get_kv_transfer_group(), []
    connector.wait_for_layer_load = called.append
    connector.save_kv_layer = lambda name, *_, **__: called.append(name)
    metadata = StepMetadata(Operations())
    connector.bind_connector_metadata(metadata)
    with set_forward_context(None, parts.configurations[0]):
        outer = get_forward_context()
        parts.nested().forward([RepairedRun((1,), 0, (5, 6, 7), 0)])
        same_context = get_forward_context() is outer
    same_metadata = connector._get_connector_metadata() is metadata
    connector.clear_connector_metadata()
    nested_calls = len(called)
    engine.llm.generate([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)
    del connector.wait_for_layer_load, connector.save_kv_layer
    return {"context": same_context, "metadata": same_metadata, "nested": nested_calls, "ordinary": len(called)}


def test_a_nested_forward_leaves_the_step_and_the_connector_alone(vllm_engine):
    said = vllm_engine("llama").call(interrupt)
    assert said["context"] and said["metadata"]
    assert said["nested"] == 0
    assert said["ordinary"] == 0  # nor does a step of vLLM's: there is nothing to do at a layer


def shifted(engine: Any, distance: int, first_block: int) -> dict[str, Any]:
    """A prompt whose tokens stand earlier from some block on, and what transformers makes of these positions."""
    from transformers import AutoModelForCausalLM

    parts = Parts(engine)
    root, block_size = parts.places.root, parts.places.block_size
    engine.llm.reset_prefix_cache()
    token_ids = documents(5, LENGTH)[0]
    free = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    blocks = free[: -(-(LENGTH + 6) // block_size)]
    given: list[int] = []
    hook = root.register_forward_pre_hook(
        lambda _, __, named: given.append(int(named["positions"][0])), with_kwargs=True
    )
    shift = PositionShift(root, block_size)
    shift.begin([ShiftedTokens(tuple(blocks[first_block:]), distance)])
    output, used = answered(engine, token_ids, root)
    shift.end()
    hook.remove()
    assert used == blocks[: len(used)]
    answer = list(output.outputs[0].token_ids)
    tokens = torch.tensor([token_ids + answer[:-1]])
    positions = torch.arange(tokens.shape[1])
    positions[first_block * block_size :] -= distance
    model = AutoModelForCausalLM.from_pretrained(engine.llm.llm_engine.model_config.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model(tokens, position_ids=positions[None], attention_mask=torch.ones_like(tokens), use_cache=True)
    logprobs = wanted.logits[0, LENGTH - 1 :].log_softmax(-1)
    steps = enumerate(output.outputs[0].logprobs)
    said = [(i, token, each.logprob) for i, step in steps for token, each in step.items()]
    caches = wanted.past_key_values.layers
    theirs = [part[0].transpose(0, 1) for layer in caches for part in (layer.keys, layer.values)]
    ours = parts.read(blocks, 0, tokens.shape[1])
    return {
        "can_shift": can_shift(*parts.configurations, root),
        "logprobs": max(abs(float(logprobs[i, token]) - logprob) for i, token, logprob in said),
        "cache": None if parts.places.layers[0].layout.is_latent else apart(ours, theirs),
        "given": given[1],
        "hooks": len(root._forward_pre_hooks) + len(root._forward_hooks),
    }


@pytest.mark.parametrize("name", ENGINES)
def test_shifted_tokens_are_what_transformers_computes_at_these_positions(vllm_engine, name):
    said = vllm_engine(name, **ENGINES[name]).call(shifted, distance=27, first_block=2)
    assert said["can_shift"] == ""
    assert said["logprobs"] < 1e-4
    assert said["cache"] is None if name == "deepseek" else said["cache"] < 1e-5  # transformers caches another latent
    assert said["given"] == LENGTH  # vLLM goes on counting
    assert said["hooks"] == 0


def split_blocks(engine: Any) -> list[Any]:
    """One batch in the scheduler's blocks, and the same where a kernel counts two blocks for each of them."""
    runs = [RepairedRun((3, 5), 40, (7, 8, 9), 40), RepairedRun((6, 2), 0, (1,) * 33, 11)]
    rows = AttentionRows.of(runs, 32, torch.device("cpu"))
    halves = [replace(run, blocks=tuple(2 * block + half for block in run.blocks for half in (0, 1))) for run in runs]
    wanted, given = AttentionRows.of(halves, 16, torch.device("cpu")), rows.common(2)
    width = wanted.block_table.shape[1]
    return [
        wanted.block_table.tolist() == given.block_table_tensor[:, :width].tolist(),
        wanted.slots.tolist() == given.slot_mapping.tolist(),
        given.seq_lens.tolist(),
        given.query_start_loc.tolist(),
    ]


def test_a_kernel_with_smaller_blocks_finds_the_same_tokens(vllm_engine):
    assert vllm_engine("llama").call(split_blocks) == [True, True, [43, 33], [0, 3, 36]]
