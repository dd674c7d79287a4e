"""Time to first token over known documents from every tier, against computing them; and what tiers cost new documents.

    python benchmarks/tiers.py [--model 0.1b] [--dtype float32] [--tokens 64 256 1024 4096] [--codec none int8]

A random Llama answers a question of 32 tokens over 4 documents after a system prompt of 64. The documents are computed
once, by an engine with all persistent tiers; then engines with one tier each have them on no device and are asked in
turns. The cost model is off here: a tier is waited for, however slow it is. Compared are

    device            nothing has to be loaded: the least that any tier can take
    host              memory of the process
    disk              files in the page cache of the operating system
    disk, cold        files that `posix_fadvise` has put out of it, as far as the system follows that advice
    redis             a real redis-server on a Unix socket, started here
    object            files through the object store client (file://)
    compute           no tier

and, with the cost model on and new documents each time, engines with a tier against one without: first token and time
per later token while the documents are offloaded, also in CPU time of the engine's thread. Medians and quartiles
of wall time. Results: results/tiers.*
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from facts import RESULTS, save
from rich.console import Console

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams, TierConfig
from kvmosaic.model import LoadedModel
from kvmosaic.tiers import fetch_policy

NUM_DOCUMENTS, NUM_SYSTEM, NUM_QUESTION, NUM_DECODED, NUM_NEW = 4, 64, 32, 24, 256
SIZES = {
    "0.1b": {"hidden_size": 768, "intermediate_size": 2_048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "0.5b": {"hidden_size": 1_280, "intermediate_size": 4_480, "num_hidden_layers": 20, "num_attention_heads": 20},
}
MAX_BYTES = "2GiB"


def build_model(size: str, dtype: torch.dtype) -> LoadedModel:
    """A random Llama with 4 key heads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        num_key_value_heads=4,
        max_position_embeddings=8_192,
        tie_word_embeddings=True,
        **SIZES[size],
    )
    model = transformers.LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    return LoadedModel.from_module(model)


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str | None]:
    """The URL of a server that keeps nothing on disk; None if there is no redis-server."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    socket = folder / "redis.sock"
    settings = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    process = subprocess.Popen([program, *settings], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists() and process.poll() is None:
            time.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        process.kill()
        process.wait()


class Random:
    """Tokens from a seed."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self.system = self.tokens(NUM_SYSTEM)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(32_000) for _ in range(count)]

    def documents(self, num_tokens: int) -> list[list[int]]:
        return [self.tokens(num_tokens) for _ in range(NUM_DOCUMENTS)]

    def prompt(self, documents: list[list[int]]) -> Prompt:
        return Prompt.from_tokens(self.system, documents, self.tokens(NUM_QUESTION))


def open_llm(model: LoadedModel, tiers: Sequence[str], codec: str = "none", *, believes_tiers: bool = False) -> LLM:
    """An engine over the model; with `believes_tiers` it never finds that computing is faster."""
    llm = LLM(
        model,
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size=MAX_BYTES, max_chunk_tokens=8_192, repair="none"),
        engine_config=EngineConfig(request_cache_size="256MiB", num_threads=1),
        tier_config=TierConfig(tuple(tiers), chunk_codec=codec, chunk_pending=MAX_BYTES, chunk_staged=MAX_BYTES)
        if tiers
        else None,
    )
    if believes_tiers and llm.engine.offloader is not None:
        llm.engine.offloader._compute.estimate = lambda num_tokens: 3_600.0
        fetch_policy.FIRST_TIMEOUT_SECONDS = 3_600.0
    return llm


def first_token(llm: LLM, prompt: Prompt) -> float:
    """Seconds."""
    begin = time.perf_counter()
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    return time.perf_counter() - begin


def put_out(llm: LLM) -> None:
    """Has all chunks leave the device, and waits until the tiers have them."""
    llm.engine.kv_cache.evict_cold(2**40, 0.0)
    if llm.engine.offloader is not None:
        assert llm.engine.offloader.tiered_store.flush(300)


def put_out_of_page_cache(folder: Path) -> None:
    """Asks the operating system to forget what the files hold."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def known_documents(
    model: LoadedModel, codec: str, lengths: Sequence[int], rounds: int, folder: Path, redis_url: str | None
) -> list[dict[str, Any]]:
    """Seconds to the first token from every tier, for every length."""
    chance = Random()
    documents = {length: chance.documents(length) for length in lengths}
    disk, objects = folder / f"disk-{codec}", folder / f"object-{codec}"
    objects.mkdir()
    persistent = {"disk": f"disk:{disk}?quota=8GiB", "object": objects.as_uri()}
    if redis_url is not None:
        persistent["redis"] = f"{redis_url}?prefix={codec}"
    with open_llm(model, list(persistent.values()), codec) as writer:
        for length in lengths:
            first_token(writer, chance.prompt(documents[length]))
            put_out(writer)
    filled = [persistent["disk"]]  # where device and host get the documents from, before anything is measured
    tiers = {"device": filled, "host": ["host:2GiB", *filled]}
    tiers |= {name: [url] for name, url in persistent.items()} | {"compute": []}
    found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        llms = {
            name: stack.enter_context(open_llm(model, urls, codec, believes_tiers=True)) for name, urls in tiers.items()
        }
        llms["disk, cold"] = llms["disk"]
        for length in lengths:
            seconds: dict[str, list[float]] = {name: [] for name in llms}
            first_token(llms["device"], chance.prompt(documents[length]))
            first_token(llms["host"], chance.prompt(documents[length]))
            for number in range(rounds + 1):
                for name, llm in llms.items():
                    if name == "compute" and not 1 <= number <= max(1, min(rounds, 2_048 // length)):
                        continue  # the longer, the less they differ
                    if name != "device":
                        put_out(llm)
                    if name == "disk, cold":
                        put_out_of_page_cache(disk)
                    before = llm.get_chunk_cache_stats().loaded_chunks
                    taken = first_token(llm, chance.prompt(documents[length]))
                    loaded = llm.get_chunk_cache_stats().loaded_chunks - before
                    assert loaded == (0 if name in ("device", "compute") else NUM_DOCUMENTS), (name, length, loaded)
                    if number:  # the first round warms up
                        seconds[name].append(taken)
            num_bytes = model.bytes_per_token() * length * NUM_DOCUMENTS
            found.append({"codec": codec, "tokens": length, "bytes": num_bytes, "seconds": seconds})
            for llm in llms.values():
                put_out(llm)
    return found


def new_documents(model: LoadedModel, rounds: int, folder: Path, redis_url: str | None) -> dict[str, Any]:
    """First and later tokens over uncached documents: seconds by tier, asked in turns."""
    chance = Random()
    objects = folder / "object-new"
    objects.mkdir()
    tiers = {"none": [], "disk": [f"disk:{folder}/disk-new?quota=8GiB"], "object": [objects.as_uri()]}
    tiers |= {"host": ["host:1GiB"]} | ({"redis": [f"{redis_url}?prefix=new"]} if redis_url else {})
    figures = ("first", "later", "first_cpu", "later_cpu")
    seconds: dict[str, dict[str, list[float]]] = {figure: {name: [] for name in tiers} for figure in figures}
    params = SamplingParams(temperature=0, max_tokens=NUM_DECODED, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        llms = {name: stack.enter_context(open_llm(model, urls)) for name, urls in tiers.items()}
        order = list(llms)
        for number in range(rounds + 1):
            order = [*order[1:], order[0]]
            for name in order:
                prompt = chance.prompt(chance.documents(NUM_NEW))
                times = [(time.perf_counter(), time.thread_time())]
                times += [(time.perf_counter(), time.thread_time()) for _ in llms[name].stream(prompt, params)]
                put_out(llms[name])
                for clock, kind in enumerate(("", "_cpu")) if number else ():
                    gaps = [later[clock] - earlier[clock] for earlier, later in pairwise(times)]
                    seconds[f"first{kind}"][name].append(gaps[0])
                    seconds[f"later{kind}"][name].append(statistics.fmean(gaps[1:]))
    return {"tokens": NUM_NEW, "seconds": seconds}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return (values[0],) * 3
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def shown(values: Sequence[float], scale: float = 1e3) -> str:
    lower, middle, upper = (value * scale for value in quartiles(values))
    return f"{middle:.3g} ({lower:.3g} to {upper:.3g})"


def written(runs: Mapping[str, Any]) -> str:
    """All runs as tables in Markdown."""
    lines = ["# Tiers", "", f"Written by `benchmarks/tiers.py`: {NUM_DOCUMENTS} documents each, median (quartiles)."]
    for title, run in runs.items():
        names = list(run["known"][0]["seconds"])
        lines += ["", f"## {title}", "", "First token over known documents, ms:", ""]
        lines += ["| codec | tokens each | MB | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
        for row in run["known"]:
            cells = [shown(row["seconds"][name]) for name in names]
            lines.append(f"| {row['codec']} | {row['tokens']} | {row['bytes'] / 1e6:.3g} | {' | '.join(cells)} |")
        seconds = run["new"]["seconds"]
        lines += ["", f"New documents of {run['new']['tokens']} tokens each, by no tier in the same round:", ""]
        lines += ["| tier | first token | its CPU time | later tokens | their CPU time |", "|---" * 5 + "|"]
        for name in seconds["first"]:
            if name != "none":
                pairs = [zip(times[name], times["none"], strict=True) for times in seconds.values()]
                cells = [shown([one / other for one, other in pair], 1) for pair in pairs]
                lines.append(f"| {name} | {' | '.join(cells[index] for index in (0, 2, 1, 3))} |")
    return "\n".join(lines) + "\n"


def plot(runs: Mapping[str, Any]) -> None:
    """First token by length, one panel a run, without a codec."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, axes = plt.subplots(1, len(runs), figsize=(4.2 * len(runs), 3.6), layout="constrained", squeeze=False)
    for axis, (title, run) in zip(axes[0], runs.items(), strict=True):
        rows = [row for row in run["known"] if row["codec"] == "none"]
        for name in rows[0]["seconds"]:
            middle = [quartiles(row["seconds"][name]) for row in rows]
            lengths = [row["tokens"] for row in rows]
            axis.plot(lengths, [each[1] * 1e3 for each in middle], marker="o", markersize=3, label=name)
            axis.fill_between(lengths, *([each[side] * 1e3 for each in middle] for side in (0, 2)), alpha=0.15)
        axis.set(xscale="log", yscale="log", title=title, xlabel=f"tokens of each of {NUM_DOCUMENTS} documents")
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
    axes[0][0].set_ylabel("first token, ms")
    axes[0][-1].legend(fontsize=7)
    figure.savefig(RESULTS / "tiers.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.1b", choices=list(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1_024, 4_096])
    parser.add_argument("--codec", nargs="+", default=["none", "int8"], choices=["none", "int8"])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    model = build_model(arguments.model, getattr(torch, arguments.dtype))
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as redis_url:
        if redis_url is None:
            print("redis is left out: there is no redis-server here")
        folder = Path(name)
        new = new_documents(model, 2 * arguments.rounds, folder, redis_url)
        known: list[dict[str, Any]] = []
        for codec in arguments.codec:
            known += known_documents(model, codec, arguments.tokens, arguments.rounds, folder, redis_url)
    path = RESULTS / "tiers.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    runs[f"{arguments.model}, {arguments.dtype}"] = {"arguments": vars(arguments), "known": known, "new": new}
    save("tiers", {"torch": torch.__version__, "runs": runs})
    (RESULTS / "tiers.md").write_text(written(runs))
    plot(runs)
    Console().print(written({"this run": runs[f"{arguments.model}, {arguments.dtype}"]}))


if __name__ == "__main__":
    main()
