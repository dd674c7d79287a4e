"""Metric families with vLLM's names and meanings: dashboards made for vLLM work unchanged."""

from __future__ import annotations

from kvmosaic.metrics.family import family_named

REQUESTS_RUNNING = family_named("vllm:num_requests_running")
REQUESTS_WAITING = family_named("vllm:num_requests_waiting")
KV_CACHE_USAGE = family_named("vllm:kv_cache_usage_perc")
PREFIX_QUERIES = family_named("vllm:prefix_cache_queries")
PREFIX_HITS = family_named("vllm:prefix_cache_hits")
PREEMPTIONS = family_named("vllm:num_preemptions")
PROMPT_TOKENS = family_named("vllm:prompt_tokens")
GENERATION_TOKENS = family_named("vllm:generation_tokens")
REQUEST_SUCCESS = family_named("vllm:request_success")
TIME_TO_FIRST_TOKEN = family_named("vllm:time_to_first_token_seconds")
INTER_TOKEN_LATENCY = family_named("vllm:inter_token_latency_seconds")
TIME_PER_TOKEN = family_named("vllm:request_time_per_output_token_seconds")
LATENCY = family_named("vllm:e2e_request_latency_seconds")
QUEUE_TIME = family_named("vllm:request_queue_time_seconds")
PREFILL_TIME = family_named("vllm:request_prefill_time_seconds")
DECODE_TIME = family_named("vllm:request_decode_time_seconds")
INFERENCE_TIME = family_named("vllm:request_inference_time_seconds")
NUM_ANSWERS = family_named("vllm:request_params_n")

REQUEST_PROMPT_TOKENS = family_named("vllm:request_prompt_tokens")
REQUEST_GENERATION_TOKENS = family_named("vllm:request_generation_tokens")
REQUEST_COMPUTED_TOKENS = family_named("vllm:request_prefill_kv_computed_tokens")
