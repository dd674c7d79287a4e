"""What runs in the fork: one engine, and the functions that tests call by name.

Each function takes the engine first, then JSON, and returns JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

MAX_STEPS = 3_000


class Inside:
    """An engine in this process, and the parts of vLLM that tests look at."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = options.pop("kv_transfer_config", None)
        if transfer is not None:
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm = LLM(model, **_readable(model, options))
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool


def _readable(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a latent model: where the processor has AMX, another backend than that, which keeps no weights."""
    import torch

    config = json.loads(Path(model, "config.json").read_text())
    return (
        {"attention_backend": "CPU_MLA", **options}
        if "kv_lora_rank" in config and torch.cpu._is_amx_tile_supported()
        else options
    )


def serve(model: str, options: dict[str, Any], end: socket.socket) -> None:
    """Starts an engine and does what is asked until the other end is closed."""
    lines = end.makefile("rw")

    def reply(**said: Any) -> None:
        lines.write(json.dumps(said) + "\n")
        lines.flush()

    try:
        engine = Inside(model, options)
    except BaseException:
        reply(error=traceback.format_exc())
        return
    reply(value=None)
    for line in lines:
        asked = json.loads(line)
        module, _, name = asked["function"].partition(":")
        try:
            reply(value=getattr(sys.modules[module], name)(engine, **asked["arguments"]))
        except Exception:
            reply(error=traceback.format_exc())


def prompt_and_params(ask: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Prompt and sampling parameters as vLLM wants them."""
    from vllm import SamplingParams

    prompt: dict[str, Any] = {"prompt_token_ids": list(ask["token_ids"])}
    if ask["cache_salt"] is not None:
        prompt["cache_salt"] = ask["cache_salt"]
    names = ("max_tokens", "logprobs", "n", "temperature", "seed", "prompt_logprobs", "repetition_penalty")
    params = SamplingParams(**{name: ask[name] for name in names}, ignore_eos=True, detokenize=False)
    if ask["kv_transfer_params"] is not None:
        params.extra_args = {"kv_transfer_params": ask["kv_transfer_params"]}
    return prompt, params


def _said(output: Any) -> dict[str, Any]:
    """A finished vLLM output as an `Answer`'s fields."""
    ordered = sorted(output.outputs, key=lambda each: each.index)
    prompt = output.prompt_logprobs
    return {
        "token_ids": [list(each.token_ids) for each in ordered],
        "logprobs": [
            [{token: entry.logprob for token, entry in step.items()} for step in each.logprobs or []]
            for each in ordered
        ],
        "num_cached_tokens": output.num_cached_tokens or 0,
        "kv_transfer_params": output.kv_transfer_params,
        "prompt_logprobs": prompt
        and [step and {token: entry.logprob for token, entry in step.items()} for step in prompt],
    }


def answer(engine: Inside, asks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to all of them, asked at once."""
    prompts, params = zip(*map(prompt_and_params, asks), strict=True)
    outputs = engine.llm.generate(list(prompts), list(params), use_tqdm=False)
    return [_said(output) for output in outputs]


def play(engine: Inside, asks: list[dict[str, Any]], at: list[int], abort: list[int | None]) -> list[Any]:
    """Adds request i at step at[i], aborts it at step abort[i] if that is a step; None for what never ended itself."""
    ended: dict[int, Any] = {}
    names = [f"played-{index}" for index in range(len(asks))]
    for step in range(MAX_STEPS):
        for index, ask in enumerate(asks):
            if at[index] == step:
                prompt, params = prompt_and_params(ask)
                engine.engine.add_request(names[index], prompt, params)
            if abort[index] == step and index not in ended:
                engine.engine.abort_request([names[index]])
        if step >= max(at) and not engine.engine.has_unfinished_requests():
            break
        for output in engine.engine.step():
            if output.finished:
                ended[names.index(output.request_id)] = _said(output)
    else:
        raise AssertionError(f"not done after {MAX_STEPS} steps: {state(engine)}")
    return [None if abort[index] is not None and index not in ended else ended.get(index) for index in range(len(asks))]


def settle(engine: Inside) -> dict[str, Any]:
    """Steps until no request is left, internal ones too, and one step more; then the state."""
    for _ in range(MAX_STEPS):
        idle = not engine.scheduler.has_unfinished_requests()
        engine.engine.engine_core.get_output()
        if idle and not engine.scheduler.has_unfinished_requests():
            return state(engine)
    raise AssertionError(f"never at rest: {state(engine)}")


def state(engine: Inside) -> dict[str, Any]:
    """Blocks and requests: a pool at rest has every block free but the null block."""
    blocks = engine.pool.blocks
    return {
        "num_blocks": len(blocks),
        "free": engine.pool.get_num_free_blocks(),
        "referenced": [block.block_id for block in blocks if block.ref_cnt and not block.is_null],
        "requests": sorted(engine.scheduler.requests),
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
    }


def reset_prefix_cache(engine: Inside) -> bool:
    """Forgets every cached block; whether that was possible."""
    return bool(engine.llm.reset_prefix_cache())


def has_prefix_caching(engine: Inside) -> bool:
    """Whether vLLM keeps prefixes of this model on this machine."""
    return bool(engine.core.vllm_config.cache_config.enable_prefix_caching)


def preemptions(engine: Inside) -> int:
    """How often a request lost its blocks since the first call of `count_preemptions`."""
    return int(getattr(engine, "preempted", 0))


def count_preemptions(engine: Inside) -> None:
    """Counts from now on."""
    preempt = engine.scheduler._preempt_request

    def counted(*arguments: Any, **named: Any) -> Any:
        engine.preempted = preemptions(engine) + 1  # type: ignore[attr-defined]
        return preempt(*arguments, **named)

    engine.scheduler._preempt_request = counted


def first_layer(engine: Inside, ask: dict[str, Any]) -> list[list[float]]:
    """Keys and values of the first layer, one row per token of a prompt, as they lie in the cache after its prefill."""
    import torch

    from kvmosaic.vllm.worker.layouts import find_layout

    prompt, params = prompt_and_params(ask)
    engine.engine.add_request("looked-at", prompt, params)
    while not engine.engine.step():
        pass
    (running,) = engine.scheduler.running
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(running.request_id)
    layer_name, layer = next(iter(engine.core.vllm_config.compilation_config.static_forward_context.items()))
    size = engine.core.vllm_config.cache_config.block_size
    slots = torch.tensor([blocks[index // size] * size + index % size for index in range(len(ask["token_ids"]))])
    parts = find_layout(layer_name, layer, layer.kv_cache).read(slots)
    engine.engine.abort_request(["looked-at"])
    rows: list[list[float]] = torch.cat([part.flatten(1) for part in parts if part is not None], dim=1).tolist()
    return rows


def trouble(engine: Inside) -> str:
    """Why nothing is composed here; empty: it is."""
    return str(engine.scheduler.connector.trouble)
