"""How far off the estimated time without caches is: estimates of a caching server, against one that caches nothing.

    python benchmarks/estimate.py [--rounds 5] [--threads 1]

Two servers (`kvmosaic serve reader`): one with its caches, which estimates for every prompt how long its first token
would have taken without them (`kvmosaic:request_uncached_ttft_seconds` of /metrics), and one with
`--no-enable-chunk-cache --no-enable-prefix-caching`. They are asked the same in turn, one request at a time: documents
of made-up words, which the first one knows, in a new order each time. In between, the first one is asked about others
that it does not know, from which it learns how long a token takes. Medians of wall times, so other work on the machine
is in them. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from collections import defaultdict
from typing import Any

import httpx
import torch
from facts import save
from rich.console import Console
from rich.progress import track
from rich.table import Table
from serving import Served, made_up_text

SHAPES = ((2, 15), (4, 80), (12, 40), (2, 330), (6, 145))
"""How many documents of how many words."""
_ESTIMATES = re.compile(r"^kvmosaic:request_uncached_ttft_seconds_(count|sum)\{.*\} (\S+)$", re.MULTILINE)


def estimates(client: httpx.Client) -> tuple[float, float]:
    """How many there have been, and their sum in seconds."""
    found = dict(_ESTIMATES.findall(client.get("/metrics").raise_for_status().text))
    return float(found.get("count", 0)), float(found.get("sum", 0))


def ask(client: httpx.Client, documents: list[str], question: str) -> dict[str, Any]:
    """The reply to one prompt, with the estimate in seconds."""
    count, total = estimates(client)
    body = {
        "messages": [
            {"role": "system", "content": "Answer the question from the documents."},
            {"role": "user", "content": question},
        ],
        "documents": [{"text": text} for text in documents],
        "max_tokens": 1,
        "ignore_eos": True,
    }
    reply: dict[str, Any] = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    while (now := estimates(client))[0] == count:  # written when the request has ended, which may be after its reply
        time.sleep(0.01)
    return reply | {"estimate": now[1] - total}


def seconds_of(reply: dict[str, Any]) -> float:
    """The measured time to the first token."""
    return float(reply["kvmosaic"]["time_to_first_token_ms"]) / 1e3


def measure(caching: httpx.Client, plain: httpx.Client, rounds: int) -> list[dict[str, Any]]:
    """Both servers in turn, in each round with documents of all shapes."""
    source = random.Random(0)
    known = {shape: texts(source, shape) for shape in SHAPES}
    seconds: dict[tuple[int, int], dict[str, list[float]]] = {shape: defaultdict(list) for shape in SHAPES}
    num_tokens = {}
    for number in track(range(rounds + 1), description="rounds"):
        for shape in SHAPES:
            question = f"What does {made_up_text(source, 6)[:-1]} mean?"
            ask(caching, texts(source, shape), question)  # something new: how long tokens take is learned all the time
            order = source.sample(known[shape], len(known[shape]))
            with_caches, without = ask(caching, order, question), ask(plain, order, question)
            num_tokens[shape] = without["usage"]["prompt_tokens"]
            if number:  # in the first round the documents become known
                seconds[shape]["cached, measured"].append(seconds_of(with_caches))
                seconds[shape]["without, estimated"].append(with_caches["estimate"])
                seconds[shape]["without, measured"].append(seconds_of(without))
    return [report(shape, num_tokens[shape], seconds[shape]) for shape in SHAPES]


def texts(source: random.Random, shape: tuple[int, int]) -> list[str]:
    """Documents of one shape, none cached."""
    num_documents, num_words = shape
    return [made_up_text(source, num_words) for _ in range(num_documents)]


def report(shape: tuple[int, int], num_tokens: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """The figures of one shape."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "documents": shape[0],
        "words": shape[1],
        "prompt_tokens": num_tokens,
        "median_seconds": median,
        "estimated by measured": median["without, estimated"] / median["without, measured"],
        "seconds": seconds,
    }


def table_of(sizes: list[dict[str, Any]]) -> Table:
    """The figures as they are printed."""
    table = Table("documents", "prompt tokens", *(f"{name}, ms" for name in sizes[0]["median_seconds"]), "ratio")
    for size in sizes:
        times = [f"{seconds * 1e3:.0f}" for seconds in size["median_seconds"].values()]
        table.add_row(
            f"{size['documents']} of {size['words']} words",
            str(size["prompt_tokens"]),
            *times,
            f"{size['estimated by measured']:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    options = ("--dtype", "float32", "--uvicorn-log-level", "warning")
    without = ("--no-enable-chunk-cache", "--no-enable-prefix-caching")
    with (
        Served("reader", *options, threads=arguments.threads) as caching,
        Served("reader", *options, *without, threads=arguments.threads) as plain,
        httpx.Client(base_url=caching.url, timeout=300) as first,
        httpx.Client(base_url=plain.url, timeout=300) as second,
    ):
        sizes = measure(first, second, arguments.rounds)
    Console(width=140).print(table_of(sizes))
    save(f"estimate-{arguments.threads}", {"arguments": vars(arguments), "torch": torch.__version__, "sizes": sizes})


if __name__ == "__main__":
    main()
