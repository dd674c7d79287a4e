"""First token of a hybrid model with known documents in a new order (first(8) repaired), beside the whole prompt.

The weights are random: time does not depend on them. Rounds alternate, medians are printed, and one round that computes
the documents for the first time.

    python benchmarks/hybrid_first_token.py --documents 8 --tokens 512
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, SamplingParams
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt


def build() -> torch.nn.Module:
    """A model of 0.1 B parameters: three layers with a gated delta rule to each one with attention."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=32_000,
        hidden_size=640,
        intermediate_size=1_792,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=5,
        linear_num_value_heads=10,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--question", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    model = LoadedModel.from_module(build())
    llm = LLM(
        model,
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size="1GiB"),
        engine_config=EngineConfig(request_cache_size="512MiB"),
    )
    chance = random.Random(0)

    def text(count: int) -> list[int]:
        return chance.choices(range(3, 32_000), k=count)

    system, documents = text(64), [text(given.tokens) for _ in range(given.documents)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def seconds(prompt: Prompt, repair: str | None = None) -> float:
        begin = time.process_time()
        llm.generate(prompt, replace(one, repair=repair))
        return time.process_time() - begin

    cold = seconds(Prompt.from_tokens(system, documents, text(given.question)))
    known, unrepaired, whole, alone = [], [], [], []
    for _ in range(given.rounds):
        chance.shuffle(documents)
        question = text(given.question)
        known.append(seconds(Prompt.from_tokens(system, documents, question)))
        unrepaired.append(seconds(Prompt.from_tokens(system, documents, question[::-1]), "none"))
        whole.append(seconds(Prompt.plain([*text(64), *(token for each in documents for token in each), *question])))
        alone.append(seconds(Prompt.plain([*text(64), *question])))
    result = {
        "parameters": model.num_parameters,
        "documents": given.documents,
        "tokens": given.tokens,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "state_bytes": model.state_bytes,
        "map_bytes": 2 * model.map_bytes,
        "kv_bytes": model.bytes_per_token() * given.tokens,
        "cpu_seconds": {
            "known, new order": statistics.median(known),
            "the same, nothing repaired": statistics.median(unrepaired),
            "read in full": statistics.median(whole),
            "documents computed for the first time": cold,
            "system text and question alone": statistics.median(alone),
        },
    }
    ratio = result["cpu_seconds"]["read in full"] / result["cpu_seconds"]["known, new order"]
    result["ratio"] = ratio
    print(json.dumps(result, indent=1))
    print(f"first token {ratio:.1f}x sooner than read in full (in full / known)")
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
