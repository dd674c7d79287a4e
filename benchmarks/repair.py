"""What repair costs: time to the first token by policy, beside no repair and beside computing everything.

    python benchmarks/repair.py [--documents 4] [--tokens 512] [--layers 24] [--dtype float32]

A random Llama answers one question over known documents, in a new order each time, with every policy in turn; medians.
For each policy:

    work    layers computed for choosing and repairing, by the layers of all documents' tokens, as the reply says it
    cost    (its time - time without repair) / (time of full repair - time without repair), as measured

The clock is the CPU time of the process, with one thread, so that other work on the machine does not count. Results go
to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from facts import RESULTS, save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.model import LoadedModel

NUM_SYSTEM, NUM_QUESTION = 64, 32
POLICIES = (
    "none",
    "first(16)",
    "first(77)",
    "query(0.05)",
    "query(0.15)",
    "deviation(0.15)",
    "combined(0.15)",
    "query(0.5)",
    "full",
)


def build_llm(arguments: argparse.Namespace) -> LLM:
    """A random Llama with grouped queries in kvmosaic."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1_408,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8_192,
        tie_word_embeddings=True,
    )
    dtype = getattr(torch, arguments.dtype)
    module = transformers.LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    return LLM(
        LoadedModel.from_module(module),
        chunk_cache_config=ChunkCacheConfig(position_strategy="sequential"),
        engine_config=EngineConfig(max_num_batched_tokens=4_096),
    )


def measure(arguments: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """By policy: CPU seconds to the first token of every round, and what the replies said about repair."""
    llm, chance = build_llm(arguments), random.Random(0)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(32_000) for _ in range(count)]

    system = tokens(NUM_SYSTEM)
    documents = [tokens(arguments.tokens) for _ in range(arguments.documents)]
    llm.generate(Prompt.from_tokens(system, documents, tokens(NUM_QUESTION)), SamplingParams(max_tokens=1))
    seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    uses: dict[str, Any] = {}
    for _ in track(range(arguments.rounds), description="measuring"):
        for policy in POLICIES:
            order = chance.sample(documents, len(documents))
            # a short new document in front, so that no order was met before
            prompt = Prompt.from_tokens(system, [tokens(2), *order], tokens(NUM_QUESTION))
            params = SamplingParams(temperature=0, max_tokens=1, repair=policy)
            begin = time.process_time()
            (output,) = llm.generate([prompt], params)
            seconds[policy].append(time.process_time() - begin)
            uses[policy] = output.reuse.repair
    return seconds, uses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds, uses = measure(arguments)
    median = {policy: statistics.median(values) for policy, values in seconds.items()}
    whole = median["full"] - median["none"]
    rows = [
        {
            "policy": policy,
            "repaired": uses[policy].fraction if uses[policy] else 0.0,
            "work": uses[policy].work_fraction if uses[policy] else 0.0,
            "cost": (median[policy] - median["none"]) / whole,
            "first_token_by_full": median[policy] / median["full"],
            "seconds": median[policy],
        }
        for policy in POLICIES
    ]
    title = f"{arguments.documents} documents of {arguments.tokens}, {arguments.layers} layers, {arguments.dtype}"
    table = Table("policy", "repaired", "work", "cost", "first token, by full", title=title)
    lines = [f"{title}, one thread, CPU time", "", "| policy | repaired | work | cost | first token, by full |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        cells = [f"{row[name]:.1%}" for name in ("repaired", "work", "cost", "first_token_by_full")]
        table.add_row(row["policy"], *cells)
        lines.append(f"| `{row['policy']}` | {' | '.join(cells)} |")
    Console().print(table)
    save("repair", {"arguments": vars(arguments), "torch": torch.__version__, "rows": rows, "seconds": seconds})
    Path(RESULTS / "repair.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
