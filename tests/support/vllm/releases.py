"""Releases of vLLM side by side: the names that the package uses, and what differs with the code that bridges it.

Everything here is data, without an import of vLLM. `tests/integrations/vllm/test_releases.py` holds it against the
source of each release in `RELEASES`.
"""

from __future__ import annotations

from dataclasses import dataclass

RELEASES = ("0.23.0", "0.32.0", "0.33.0")
"""The oldest supported release, the one that the tests run, and the newest one."""


@dataclass(frozen=True, slots=True)
class Use:
    """A class or function of vLLM, and what the package uses of it."""

    module: str
    """Under `vllm`."""
    name: str
    members: tuple[str, ...] = ()
    """Parameters of a function (`Class.method` too); attributes of a class."""
    since: str = ""
    """The first of `RELEASES` that has it; empty: all have it."""

    @property
    def key(self) -> str:
        """Its name in the list of signatures."""
        return f"vllm.{self.module}:{self.name}"


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not the same in all releases, and the function that bridges it."""

    what: str
    by_release: dict[str, str]
    """What a release has, by the first of `RELEASES` that has it."""
    adapter: str
    """Dotted name under `kvmosaic.vllm` of the code that works with all of them."""


_BASE = "distributed.kv_transfer.kv_connector.v1.base"

USES: tuple[Use, ...] = (
    # connector contract, scheduler side
    Use("distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory", ("_registry", "register_connector")),
    Use(_BASE, "KVConnectorBase_V1.__init__", ("vllm_config", "role", "kv_cache_config")),
    Use(_BASE, "KVConnectorBase_V1", ("_connector_metadata",)),
    Use(_BASE, "KVConnectorBase_V1.on_new_request", ("request",)),
    Use(_BASE, "KVConnectorBase_V1.get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    Use(_BASE, "KVConnectorBase_V1.update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
    Use(_BASE, "KVConnectorBase_V1.build_connector_meta", ("scheduler_output",)),
    Use(_BASE, "KVConnectorBase_V1.update_connector_output", ("connector_output",)),
    Use(_BASE, "KVConnectorBase_V1.request_finished", ("request", "block_ids")),
    Use(_BASE, "SupportsHMA.request_finished_all_groups", ("request", "block_ids")),
    Use(_BASE, "KVConnectorBase_V1.set_xfer_handshake_metadata", ("metadata",)),
    Use(_BASE, "KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware", ("metadata",)),
    Use(_BASE, "KVConnectorBase_V1.reset_cache"),
    Use(_BASE, "KVConnectorBase_V1.take_events"),
    # connector contract, worker side
    Use(_BASE, "KVConnectorBase_V1.register_kv_caches", ("kv_caches",)),
    Use(_BASE, "KVConnectorBase_V1.get_handshake_metadata"),
    Use(_BASE, "KVConnectorBase_V1.bind_connector_metadata", ("connector_metadata",)),
    Use(_BASE, "KVConnectorBase_V1.has_connector_metadata"),
    Use(_BASE, "KVConnectorBase_V1.clear_connector_metadata"),
    Use(_BASE, "KVConnectorBase_V1.start_load_kv", ("forward_context",)),
    Use(_BASE, "KVConnectorBase_V1.wait_for_layer_load", ("layer_name",)),
    Use(_BASE, "KVConnectorBase_V1.save_kv_layer", ("layer_name", "kv_layer", "attn_metadata")),
    Use(_BASE, "KVConnectorBase_V1.wait_for_save"),
    Use(_BASE, "KVConnectorBase_V1.build_connector_worker_meta"),
    Use(_BASE, "KVConnectorBase_V1.get_block_ids_with_load_errors"),
    Use(_BASE, "KVConnectorBase_V1.shutdown"),
    Use(_BASE, "KVConnectorBase_V1.requires_kv_delivery", since="0.32.0"),
    Use(_BASE, "KVConnectorHandshakeMetadata"),
    Use(_BASE, "KVConnectorMetadata"),
    Use(_BASE, "KVConnectorRole", ("SCHEDULER", "WORKER")),
    Use(_BASE, "KVConnectorWorkerMetadata.aggregate", ("other",)),
    Use("distributed.kv_transfer", "get_kv_transfer_group"),
    Use("distributed.kv_transfer", "has_kv_transfer_group"),
    # statistics
    Use(_BASE, "KVConnectorBase_V1.get_kv_connector_stats"),
    Use(_BASE, "KVConnectorBase_V1.build_kv_connector_stats", ("data",)),
    Use(
        _BASE,
        "KVConnectorBase_V1.build_prom_metrics",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    Use(
        "distributed.kv_transfer.kv_connector.v1.metrics",
        "KVConnectorStats",
        ("data", "reset", "aggregate", "reduce", "is_empty"),
    ),
    Use(
        "distributed.kv_transfer.kv_connector.v1.metrics",
        "KVConnectorPromMetrics.__init__",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    Use(
        "distributed.kv_transfer.kv_connector.v1.metrics",
        "KVConnectorPromMetrics.observe",
        ("transfer_stats_data", "engine_idx"),
    ),
    # scheduler, its requests and its output
    Use("v1.core.sched.scheduler", "Scheduler", ("add_request", "schedule", "kv_cache_manager", "vllm_config")),
    Use("v1.core.sched.scheduler", "Scheduler.pause_state"),
    Use("v1.core.kv_cache_manager", "KVCacheManager", ("block_pool", "get_blocks")),
    Use("v1.core.kv_cache_manager", "KVCacheBlocks", ("get_block_ids",)),
    Use("v1.core.block_pool", "BlockPool.get_cached_block", ("block_hash", "kv_cache_group_ids")),
    Use(
        "v1.core.block_pool",
        "BlockPool",
        ("num_gpu_blocks", "cached_block_hash_to_block", "touch", "free_blocks", "evict_blocks"),
    ),
    Use("v1.core.kv_cache_utils", "KVCacheBlock", ("block_id", "ref_cnt")),
    Use("v1.core.kv_cache_utils", "BlockHash"),
    Use(
        "v1.core.kv_cache_utils",
        "generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
    Use(
        "v1.core.kv_cache_utils",
        "hash_block_tokens",
        ("hash_function", "parent_block_hash", "curr_block_token_ids", "extra_keys"),
    ),
    Use("utils.hashing", "get_hash_fn_by_name", ("hash_fn_name",)),
    Use(
        "v1.core.sched.output",
        "SchedulerOutput",
        ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
    ),
    Use("v1.core.sched.output", "NewRequestData", ("req_id", "block_ids", "num_computed_tokens")),
    Use(
        "v1.core.sched.output",
        "CachedRequestData",
        ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    Use(
        "v1.request",
        "Request.__init__",
        (
            *("request_id", "prompt_token_ids", "sampling_params", "pooling_params", "client_index", "arrival_time"),
            *("lora_request", "cache_salt", "priority", "block_hasher"),
        ),
    ),
    Use(
        "v1.request",
        "Request",
        (
            *("request_id", "status", "client_index", "arrival_time", "priority", "lora_request", "cache_salt"),
            *("prompt_token_ids", "prompt_embeds", "num_prompt_tokens", "num_tokens", "num_output_tokens"),
            *("all_token_ids", "_all_token_ids", "max_tokens", "sampling_params", "mm_features", "resumable"),
            *("block_hashes", "_block_hasher", "update_block_hashes", "skip_reading_prefix_cache"),
            *("num_preemptions", "trace_headers"),
        ),
    ),
    Use("v1.request", "RequestStatus", ("PREEMPTED",)),
    Use("v1.engine", "EngineCoreOutput", ("request_id", "trace_headers", "kv_transfer_params")),
    Use("v1.engine.output_processor", "OutputProcessor.process_outputs", ("engine_core_outputs",)),
    # KV cache
    Use("v1.kv_cache_interface", "KVCacheConfig", ("num_blocks", "kv_cache_groups")),
    Use("v1.kv_cache_interface", "KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    Use("v1.kv_cache_interface", "FullAttentionSpec", ("block_size", "sliding_window")),
    Use("v1.kv_cache_interface", "MLAAttentionSpec"),
    Use("v1.kv_cache_interface", "SlidingWindowSpec", ("sliding_window",)),
    Use("v1.kv_cache_interface", "UniformTypeKVCacheSpecs", ("kv_cache_specs",)),
    # worker: forwards and attention
    Use(
        "forward_context",
        "set_forward_context",
        ("attn_metadata", "vllm_config", "num_tokens", "num_tokens_across_dp", "slot_mapping", "skip_compiled"),
    ),
    Use("forward_context", "get_forward_context"),
    Use("forward_context", "is_forward_context_available"),
    Use("forward_context", "ForwardContext", ("attn_metadata",)),
    Use(
        "v1.attention.backend",
        "CommonAttentionMetadata",
        (
            *("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens"),
            *("max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping"),
        ),
    ),
    Use("v1.attention.backend", "AttentionMetadataBuilder.build", ("common_prefix_len", "common_attn_metadata")),
    Use("v1.attention.backends.registry", "AttentionBackendEnum", ("CPU_ATTN",)),
    Use("v1.attention.backends.registry", "register_backend"),
    Use("v1.attention.backends.cpu_attn", "CPUAttentionBackend"),
    Use("v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl"),
    Use("v1.attention.backends.cpu_attn", "_get_attn_isa"),
    Use("v1.attention.backends.flash_attn", "FlashAttentionBackend", ("get_impl_cls",)),
    Use("v1.attention.backends.flash_attn", "FlashAttentionImpl", ("forward",)),
    Use("v1.attention.backends.triton_attn", "TritonAttentionBackend", ("get_impl_cls",)),
    Use("v1.attention.backends.triton_attn", "TritonAttentionImpl", ("forward",)),
    Use("v1.worker.utils", "AttentionGroup.create_metadata_builders", ("vllm_config", "device", "kernel_block_size")),
    Use("v1.worker.utils", "AttentionGroup.get_metadata_builder", ("ubatch_id",)),
    Use("v1.worker.utils", "select_common_block_size", ("kv_manager_block_size",)),
    Use("lora.layers", "LoRAMapping", ("index_mapping", "prompt_mapping", "is_prefill")),
    Use("lora.punica_wrapper.punica_base", "PunicaWrapperBase.update_metadata", ("mapping", "lora_index_to_id")),
    Use("distributed", "get_pp_group"),
    Use("distributed", "get_tp_group"),
    Use("distributed.parallel_state", "get_pp_group"),
    Use("distributed.parallel_state", "get_tp_group"),
    # worker: rotation
    Use(
        "model_executor.layers.rotary_embedding.base",
        "RotaryEmbeddingBase",
        ("rotary_dim", "is_neox_style", "head_size"),
    ),
    Use(
        "model_executor.layers.rotary_embedding.mrope",
        "MRotaryEmbedding",
        ("mrope_section", "get_next_input_positions_tensor"),
    ),
    # configuration and Python interface
    Use("config", "KVTransferConfig", ("kv_connector_extra_config",)),
    Use("config", "set_current_vllm_config"),
    Use("config.model", "ModelConfig", ("uses_mrope", "is_encoder_decoder", "is_multimodal_model", "get_vocab_size")),
    Use("config.cache", "CacheConfig", ("enable_prefix_caching", "cache_dtype", "prefix_caching_hash_algo")),
    Use("config.compilation", "CompilationConfig", ("static_forward_context", "cudagraph_mode")),
    Use("sampling_params", "SamplingParams", ("prompt_logprobs", "repetition_penalty", "extra_args")),
    Use("sampling_params", "StructuredOutputsParams"),
    Use("engine.arg_utils", "EngineArgs"),
    Use("utils.argparse_utils", "FlexibleArgumentParser"),
    Use("tokenizers.registry", "cached_tokenizer_from_config"),
    Use("renderers.hf", "resolve_chat_template"),
    Use("entrypoints.openai.chat_completion.protocol", "ChatCompletionToolsParam"),
)

DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "KV layout on GPUs",
        {
            "0.23.0": "[N, 2, P, G, D] or [2, N, P, G, D], by backend",
            "0.32.0": "a view [N, G, P, D + Dv], any byte order",
        },
        "worker.layouts.find_layout",
    ),
    Difference(
        "block size that all kernels of a group take",
        {"0.23.0": "select_common_block_size(size, backends)", "0.32.0": "… (size, backends, specs)"},
        "worker.extra_forward.layer_groups",
    ),
    Difference(
        "option that returns routed experts",
        {"0.23.0": "in the model's configuration", "0.32.0": "in aux_output_config"},
        "scheduler.trouble.engine_trouble",
    ),
    Difference(
        "where the API server keeps its renderer",
        {"0.23.0": "openai_serving_render", "0.32.0": "online_renderer"},
        "front.served_model.find_model",
    ),
    Difference(
        "token ids of a conversation that was rendered elsewhere",
        {"0.23.0": "not taken: its /v1/completions is called", "0.32.0": "taken"},
        "front.served_model.ServedModel",
    ),
    Difference(
        "reports in streams",
        {"0.23.0": "not in chunks", "0.33.0": "in the last chunk of each choice"},
        "front.answers.StreamAnswer",
    ),
    Difference(
        "--reasoning-effort-map",
        {"0.33.0": "renames the effort of a request for the template"},
        "front.served_model.ServedModel",
    ),
)
