"""Checks why an engine, or one request, cannot be composed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvmosaic.layout import IN_FULL, SHORT_IN_FULL, Layout
from kvmosaic.prompt.companions import are_short, likeness_of
from kvmosaic.repair import DEFAULT_REPAIR, FirstTokens, repair_policy
from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.operations import WorkerFacts, layer_specs
from kvmosaic.vllm.scheduler.chunk_prompts import has_seen_chunks


@dataclass(frozen=True, slots=True)
class Bypass:
    """Why a request with segments is answered as an ordinary prompt."""

    code: str
    """One word, as a metric label."""
    reason: str


BLOCK_HASH_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""Connectors of vLLM that name what they store by block hashes, where composed blocks have hashes of their own.

Others name it by tokens (ExampleConnector, LMCache, FlexKV, HF3FS) or by request (NIXL, Mooncake, MoRIIO), and would
give composed keys and values to ordinary prompts, or to engines that do not know their positions.
MooncakeStoreConnector uses block hashes, too, but was not tested.
"""


def connectors_trouble(engine: Any, own: Any) -> Bypass | None:
    """Why requests cannot be composed beside the other connectors of a MultiConnector; None if they can.

    Args:
        engine: the engine's `kv_transfer_config`.
        own: the part of it that configures this connector; the same object if there is no other connector.
    """
    if engine is own:
        return None
    children = engine.kv_connector_extra_config.get("connectors") or [{"kv_connector": engine.kv_connector}]
    if children[0].get("kv_connector") != own.kv_connector:  # vLLM loads from the first connector that has anything
        return Bypass(
            "connectors",
            f"{children[0].get('kv_connector')} is the first connector, and what it loads would replace documents; "
            f"list {own.kv_connector} first",
        )
    for child in children[1:]:
        name = child.get("kv_connector")
        if name not in BLOCK_HASH_CONNECTORS or child.get("kv_connector_module_path"):
            return Bypass(
                "connectors",
                f"{name} does not name what it stores by vLLM's block hashes, so ordinary prompts could load composed "
                f"documents from it; beside {own.kv_connector}, list {' or '.join(BLOCK_HASH_CONNECTORS)} only, or use "
                "its own tiers",
            )
    return None


CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
"""vLLM's names of dtypes of its cache that can be read: plain numbers, or float8 with one scale for each layer."""


def engine_trouble(config: Any, kv_cache_config: Any) -> Bypass | None:
    """Why this engine cannot compose requests; None if it can."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if not cache.enable_prefix_caching:
        return Bypass(
            "prefix_caching",
            "prefix caching is off, and chunks are kept there; start vLLM with --enable-prefix-caching",
        )
    if len(groups) != 1:
        kinds = {type(spec).__name__ for group in groups for spec in layer_specs(group)}
        way_out = (
            "sliding windows); start vLLM with --disable-hybrid-kv-cache-manager, and every layer keeps all tokens"
            if kinds == {"FullAttentionSpec", "SlidingWindowSpec"}
            else "sliding windows or recurrent state)"
        )
        return Bypass("cache_groups", f"the model's layers are in {len(groups)} groups of KV cache ({way_out}")
    specs = layer_specs(groups[0])
    kinds = {type(spec).__name__ for spec in specs}
    has_windows = any(getattr(spec, "sliding_window", None) for spec in specs)
    # full attention with a window: a layer that sees the last tokens, and keeps all
    if kinds != {"FullAttentionSpec"} and (has_windows or not kinds <= {"MLAAttentionSpec", "AscendMLAAttentionSpec"}):
        named = ", ".join(sorted(kinds))
        return Bypass(
            "cache_kind", f"the model's KV cache is of kind {named}; chunks can be moved in full attention only"
        )
    if str(cache.cache_dtype) not in CACHE_DTYPES:
        return Bypass(
            "cache_dtype",
            f"the KV cache is kept as {cache.cache_dtype}, which is not read; use --kv-cache-dtype auto, or fp8",
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return Bypass(
                "context_parallel",
                f"context parallel ({name} = {getattr(parallel, name)}) spreads a block over several devices",
            )
    if any(getattr(part, "enable_return_routed_experts", False) for part in _with_routed_experts(config)):
        return Bypass(
            "routed_experts",
            "--enable-return-routed-experts: experts of documents that are moved are unknown; start vLLM without it",
        )
    if model.is_encoder_decoder:
        return Bypass("encoder", "the model has an encoder")
    if config.speculative_config is not None and config.speculative_config.method not in ("ngram", "suffix"):
        return Bypass(
            "speculative", f"speculative decoding by {config.speculative_config.method} keeps keys of its own"
        )
    return None


def _with_routed_experts(config: Any) -> tuple[Any, Any]:
    """The parts of vLLM's configuration that may have this option, by version."""
    return config.model_config, getattr(config, "aux_output_config", None)


def workers_trouble(facts: Iterable[WorkerFacts], num_expected: int) -> Bypass | None:
    """Why the workers cannot move chunks; None if all can."""
    facts = list(facts)
    if len(facts) < num_expected:
        return Bypass("workers", f"{len(facts)} of {num_expected} workers told what they can do")
    return next((Bypass("model", fact.trouble) for fact in facts if fact.trouble), None)


def default_repair(facts: Iterable[WorkerFacts]) -> int:
    """Recomputed tokens per chunk for requests without a repair setting; 0 if workers cannot repair."""
    policy = repair_policy(DEFAULT_REPAIR)
    if not isinstance(policy, FirstTokens) or not all(fact.can_repair for fact in facts):
        return 0
    return policy.tokens


def with_default_repair(composition: Composition, layout: Layout, facts: Iterable[WorkerFacts]) -> Composition:
    """The same with a repair that these workers can compute, where the request leaves it open."""
    if not composition.leaves_repair_open:
        return composition
    return replace(composition, repair=0) if why_not_repaired(composition, layout, facts) else composition


def request_trouble(
    request: Any, composition: Composition, layout: Layout, facts: Iterable[WorkerFacts], *, in_place: bool
) -> Bypass | None:
    """Why this request cannot be composed; None if it can.

    Args:
        request: vLLM's request.
        composition: of its prompt.
        layout: of its prompt.
        facts: capabilities of the workers.
        in_place: whether it `reads_in_place`: then positions are shifted by the reader, if by nothing else.
    """
    if request.sampling_params is None:
        return Bypass("pooling", "pooling requests have no question")
    if request.sampling_params.prompt_logprobs is not None:
        return Bypass("prompt_logprobs", "prompt_logprobs asks for every token of the prompt to be computed")
    if request.skip_reading_prefix_cache:
        return Bypass("skip_reading", "skip_reading_prefix_cache asks for every token of the prompt to be computed")
    if request.mm_features:
        return Bypass("multimodal", "the prompt has images, sounds or videos")
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return Bypass("embeddings", "the prompt is given as embeddings")
    if request.resumable:
        return Bypass("resumable", "the prompt arrives in parts")
    if composition.leaves_repair_open and likeness_of(layout.chunk_token_ids, ()):
        return Bypass("alike", IN_FULL)
    is_short = len(composition.chunks) > 1 and are_short(composition.chunks)
    if composition.leaves_repair_open and composition.companions and is_short:
        return Bypass("short", SHORT_IN_FULL)
    if composition.repair and (reason := why_not_repaired(composition, layout, facts)):
        return Bypass("repair", reason)
    if _has_texts(layout) and not all(fact.can_repair for fact in facts):
        return Bypass(
            "texts", "text between documents cannot be computed on these workers, where repair is not possible"
        )
    if layout.rules.overlaps and not in_place and not all(fact.can_shift for fact in facts):
        return Bypass(
            "shared_positions", "positions cannot be shifted on these workers; use position_strategy 'sequential'"
        )
    return None


def reads_in_place(
    request: Any, composition: Composition, layout: Layout, facts: Iterable[WorkerFacts], *, is_alone: bool
) -> bool:
    """Whether this request reads its documents where they are stored; if not, it gets copies of them.

    Args:
        request: vLLM's request.
        composition: of its prompt.
        layout: of its prompt.
        facts: capabilities of the workers.
        is_alone: whether there is no other connector.
    """
    return (
        is_alone
        and all(fact.can_read_in_place for fact in facts)
        and request.sampling_params is not None
        and request.sampling_params.repetition_penalty == 1.0  # which needs all tokens of the prompt
        # repaired tokens are computed at other positions than the question sees them at
        and not (composition.repair and layout.rules.overlaps)
    )


def why_copied(request: Any, composition: Composition, facts: Iterable[WorkerFacts], *, is_alone: bool) -> str:
    """Why a request that cannot read its documents in place gets copies; empty where copies were chosen.

    Args:
        request: vLLM's request, for which `reads_in_place` is false, or which is not alone.
        composition: of its prompt.
        facts: capabilities of the workers.
        is_alone: whether there is no other connector.
    """
    facts = list(facts)
    if reason := next((fact.no_reading for fact in facts if fact.no_reading), ""):
        return reason
    if not all(fact.can_read_in_place for fact in facts):
        return ""
    if not is_alone:
        return "another connector is used beside kvmosaic; documents are read in place where it is the only one"
    if request.sampling_params.repetition_penalty != 1.0:
        return "repetition_penalty counts all tokens of the prompt; leave it at 1"
    return "repair in shared positions is computed on copies; use repair 'none' or position_strategy 'sequential'"


def why_not_repaired(composition: Composition, layout: Layout, facts: Iterable[WorkerFacts]) -> str:
    """Why this prompt cannot be repaired; empty if it can."""
    facts = list(facts)
    if not all(fact.can_repair for fact in facts):
        return "repair cannot be computed on these workers"
    if not layout.rules.overlaps:
        return ""
    if not isinstance(composition.repair, int):
        return "names are repaired where documents are one after the other; use position_strategy 'sequential'"
    if not all(fact.can_shift for fact in facts):
        return (
            "repair computes documents in shared positions on copies, whose positions cannot be shifted on these "
            "workers; use repair 'none' or position_strategy 'sequential'"
        )
    if _has_texts(layout):
        return (
            "repair computes documents in shared positions one after the other, where a text between documents does "
            "not see them; use repair 'none' or position_strategy 'sequential'"
        )
    num_positions = min((fact.num_positions for fact in facts if fact.num_positions), default=composition.end)
    if composition.end > num_positions:
        return (
            "repair computes documents in shared positions one after the other, which here takes "
            f"{composition.end} positions; the model's rotary table has {num_positions}: use repair 'none', or send "
            "fewer documents"
        )
    return ""


def _has_texts(layout: Layout) -> bool:
    return any(has_seen_chunks(layout, index) for index in range(len(layout.spans) - 1))
