"""Time to the first token over HTTP: documents with the chunk cache, against ordinary prompts with prefix caching.

    python benchmarks/server_first_token.py [--rounds 5] [--documents 8] [--tokens 64 128 256] [--threads 1]

Two servers (`kvmosaic serve`) hold the same random Llama of about 30 million parameters. They are asked the same in
turn, one request at a time; the other one has nothing to do meanwhile. Medians, from sending the request until the
answer of one token has arrived:

    composed cold       --enable-chunk-cache, no document is known (a new cache_salt)
    composed warm       --enable-chunk-cache, all documents are known, in a new order each time
    ordinary cold       --no-enable-chunk-cache, nothing is known (a new cache_salt)
    ordinary warm       --no-enable-chunk-cache with prefix caching, the same documents in a new order each time: what
                        has the same beginning as an earlier prompt is found, the rest is computed
    ordinary in order   the same, but always in one order: what prefix caching is made for

An ordinary prompt is the text that a server without a chunk cache reads; composed, documents do not see each other.
With one thread, ratios are those of the processor time that the server used, so that other work on the machine does not
count; wall times are printed beside them. Absolute times belong to the machine. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from facts import save
from rich.console import Console
from rich.progress import track
from rich.table import Table
from serving import Served, made_up_text

READER = Path(__file__).parents[1] / "src" / "kvmosaic" / "bundled" / "reader"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
KINDS = ("composed cold", "composed warm", "ordinary cold", "ordinary warm", "ordinary in order")


def write_model(folder: Path) -> int:
    """A random Llama with grouped queries and the bundled tokenizer; the number of its parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=3_072,
        hidden_size=512,
        intermediate_size=1_536,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8_192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(READER / name, folder / name)
    return sum(parameter.numel() for parameter in model.parameters())


SYSTEM = "Answer the question from the documents."


class Bench:
    """Two servers, one question after another."""

    def __init__(self, composed: Served, ordinary: Served, num_documents: int) -> None:
        self.servers = {"composed": composed, "ordinary": ordinary}
        self.clients = {name: httpx.Client(base_url=each.url, timeout=300) for name, each in self.servers.items()}
        self.num_documents = num_documents
        self.random = random.Random(0)
        self.num_salts = 0

    def documents(self, num_tokens: int) -> list[str]:
        """Texts of made-up words, each of nearly so many tokens."""
        client = self.clients["composed"]
        sample = made_up_text(self.random, 200)
        tokens_per_word = client.post("/tokenize", json={"prompt": sample}).raise_for_status().json()["count"] / 200
        num_words = max(1, round(num_tokens / tokens_per_word))
        return [made_up_text(self.random, num_words) for _ in range(self.num_documents)]

    def warm(self, documents: list[str]) -> None:
        """Makes documents known, as the first one of a prompt and as later ones."""
        body = {"documents": [{"text": text} for text in documents], "system": SYSTEM}
        self.clients["composed"].post("/v1/documents:warm", json=body).raise_for_status()

    def ask(self, kind: str, documents: list[str]) -> tuple[float, float, dict[str, Any]]:
        """Seconds until the first token has arrived, seconds of the processor, and the usage."""
        name, state = kind.split(maxsplit=1)
        order = documents if state == "in order" else self.random.sample(documents, len(documents))
        self.num_salts += state == "cold"
        body = {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"What does {made_up_text(self.random, 6)[:-1]} mean?"},
            ],
            "documents": [{"text": text} for text in order],
            "temperature": 0,
            "max_tokens": 1,
            "ignore_eos": True,
        }
        if state == "cold":
            body["cache_salt"] = f"cold {self.num_salts}"
        used, begin = self.servers[name].cpu_seconds(), time.perf_counter()
        reply = self.clients[name].post("/v1/chat/completions", json=body)
        seconds, used = time.perf_counter() - begin, self.servers[name].cpu_seconds() - used
        return seconds, used, reply.raise_for_status().json()["usage"]


def reused(usage: dict[str, Any]) -> int:
    """Prompt tokens that were not computed."""
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def measure(bench: Bench, num_tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All kinds, interleaved, at one length of documents."""
    wall, processor, usages = defaultdict(list), defaultdict(list), defaultdict(list)
    documents = bench.documents(num_tokens)
    bench.warm(documents)
    for kind in KINDS:  # not counted: what is slow the first time is done
        bench.ask(kind, documents)
    for _ in track(range(arguments.rounds), description=f"documents of {num_tokens} tokens"):
        for kind in KINDS:
            seconds, used, usage = bench.ask(kind, documents)
            wall[kind].append(seconds)
            processor[kind].append(used)
            usages[kind].append(usage)
    has_processor = arguments.threads == 1 and not math.isnan(processor[KINDS[0]][0])
    median = {kind: statistics.median((processor if has_processor else wall)[kind]) for kind in KINDS}
    warm = median["composed warm"]
    return {
        "document_tokens": num_tokens,
        "prompt_tokens": usages["ordinary warm"][-1]["prompt_tokens"],
        "median_reused_tokens": {kind: statistics.median(map(reused, usages[kind])) for kind in KINDS},
        "clock": "processor" if has_processor else "wall",
        "ratios": {
            "composed: cold by warm": median["composed cold"] / warm,
            "warm: ordinary by composed": median["ordinary warm"] / warm,
            "in order: ordinary by composed": median["ordinary in order"] / warm,
            "cold: composed by ordinary": median["composed cold"] / median["ordinary cold"],
        },
        "median_seconds": {kind: statistics.median(wall[kind]) for kind in KINDS},
        "seconds": dict(wall),
        "processor_seconds": dict(processor),
    }


def table_of(sizes: list[dict[str, Any]]) -> Table:
    """The figures as they are printed."""
    table = Table("prompt tokens", *(f"{kind}, wall ms" for kind in KINDS), *sizes[0]["ratios"])
    for size in sizes:
        times = [f"{size['median_seconds'][kind] * 1e3:.0f}" for kind in KINDS]
        table.add_row(str(size["prompt_tokens"]), *times, *(f"{ratio:.2f}" for ratio in size["ratios"].values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 256], help="of each document")
    parser.add_argument("--strategy", default="sequential", choices=["shared", "sequential"])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    options = (
        "--dtype",
        "float32",
        "--position-strategy",
        arguments.strategy,
        "--repair",
        "none",
        "--uvicorn-log-level",
        "warning",
    )
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = write_model(Path(folder))
        with (
            Served(folder, *options, threads=arguments.threads) as composed,
            Served(folder, *options, "--no-enable-chunk-cache", threads=arguments.threads) as ordinary,
        ):
            bench = Bench(composed, ordinary, arguments.documents)
            sizes = [measure(bench, num_tokens, arguments) for num_tokens in arguments.tokens]
    Console(width=140).print(table_of(sizes))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    save(
        f"server_first_token-{arguments.threads}",
        {"arguments": vars(arguments), "parameters": num_parameters, **versions, "sizes": sizes},
    )


if __name__ == "__main__":
    main()
