"""Metric families with vLLM's names and meanings: dashboards made for vLLM work unchanged."""

from __future__ import annotations

from kvmosaic.metrics import family
from kvmosaic.metrics.family import Family, Kind

MODEL = ("model_name", "engine")
"""The served model name, and "0": there is one engine."""


def _family(name: str, kind: Kind, meaning: str, bounds: tuple[float, ...] = (), label: str = "") -> Family:
    return Family(f"vllm:{name}", kind, meaning, (*MODEL, label) if label else MODEL, bounds)


REQUESTS_RUNNING = _family("num_requests_running", "gauge", "Requests that run.")
REQUESTS_WAITING = _family("num_requests_waiting", "gauge", "Requests that wait.")
KV_CACHE_USAGE = _family(
    "kv_cache_usage_perc",
    "gauge",
    "Share of the request pool (prefixes, questions, answers) that running requests hold; 1 is full.",
)
PREFIX_QUERIES = _family("prefix_cache_queries", "counter", "Tokens looked up in the prefix cache, chunks not counted.")
PREFIX_HITS = _family("prefix_cache_hits", "counter", "Of these, tokens found.")
PREEMPTIONS = _family("num_preemptions", "counter", "Answers that were preempted.")
PROMPT_TOKENS = _family("prompt_tokens", "counter", "Tokens of prompts that are done, computed or reused.")
GENERATION_TOKENS = _family("generation_tokens", "counter", "Answer tokens.")
REQUEST_SUCCESS = _family(
    "request_success",
    "counter",
    "Answers that ended, by `finished_reason`: stop, length, abort or error.",
    label="finished_reason",
)
TIME_TO_FIRST_TOKEN = _family(
    "time_to_first_token_seconds", "histogram", "From arrival to the first token.", family.TIME_TO_FIRST_TOKEN
)
INTER_TOKEN_LATENCY = _family(
    "inter_token_latency_seconds",
    "histogram",
    "Between two tokens of an answer; of long answers, the first 512 times.",
    family.INTER_TOKEN_LATENCY,
)
TIME_PER_TOKEN = _family(
    "request_time_per_output_token_seconds",
    "histogram",
    "Mean time between the tokens of a request's answers.",
    family.INTER_TOKEN_LATENCY,
)
LATENCY = _family(
    "e2e_request_latency_seconds", "histogram", "From arrival to the end of the last answer.", family.REQUEST_LATENCY
)
QUEUE_TIME = _family(
    "request_queue_time_seconds", "histogram", "From arrival to the first step.", family.REQUEST_LATENCY
)
PREFILL_TIME = _family(
    "request_prefill_time_seconds", "histogram", "From the first step to the first token.", family.REQUEST_LATENCY
)
DECODE_TIME = _family(
    "request_decode_time_seconds", "histogram", "From the first token to the end.", family.REQUEST_LATENCY
)
INFERENCE_TIME = _family(
    "request_inference_time_seconds", "histogram", "From the first step to the end.", family.REQUEST_LATENCY
)
NUM_ANSWERS = _family("request_params_n", "histogram", "Answers per request.", family.NUM_ANSWERS)

REQUEST_PROMPT_TOKENS = _family("request_prompt_tokens", "histogram", "Tokens of a prompt.", family.TOKENS)
REQUEST_GENERATION_TOKENS = _family(
    "request_generation_tokens", "histogram", "Tokens of all answers of a request.", family.TOKENS
)
REQUEST_COMPUTED_TOKENS = _family(
    "request_prefill_kv_computed_tokens", "histogram", "Tokens of a prompt that were computed.", family.TOKENS
)
