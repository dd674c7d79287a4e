"""vLLM worker over JSON lines; runs in the environment of vLLM, and imports nothing of kvmosaic."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Answers requests until its input ends."""
    # library output must not mix with the lines of JSON
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=options["max_tokens"],
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        enforce_eager=True,
        block_size=32,
        max_num_seqs=64,
        max_num_batched_tokens=max(2_048, options["max_tokens"]),
        seed=0,
    )
    _say(replies, {"version": vllm.__version__})
    for line in sys.stdin:
        message = json.loads(line)
        if "reset" in message:
            llm.reset_prefix_cache()
            _say(replies, {})
        else:
            _say(replies, _answer(vllm, llm.llm_engine, message["prompts"], message["max_tokens"]))


def _answer(vllm: Any, engine: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    readings: dict[str, dict[str, Any]] = {}
    begin = time.monotonic()
    for number, token_ids in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": token_ids}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = time.monotonic() - begin
            reading = readings.setdefault(output.request_id, {"first": now, "reused": output.num_cached_tokens})
            reading["last"] = now
    names = [str(number) for number in range(len(prompts))]
    return {"seconds": time.monotonic() - begin, "readings": [readings[name] for name in names]}


def _say(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
