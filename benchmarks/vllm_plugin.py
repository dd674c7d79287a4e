"""vLLM with the plugin against plain vLLM with prefix caching and against our own engine: the same model and prompts.

    python benchmarks/vllm_plugin.py [--model random-0.1b] [--dtype bfloat16] [--rounds 6] [--plain-rounds 40]

Run it with the Python of an environment in which vLLM and kvmosaic are installed. Each engine has one thread and a
process of its own, forked from one import; they take turns, prompt by prompt, and another one begins each time. A
prompt is a system text of 64 tokens, 4 documents of 512 and a question of 32; documents are

    fresh       never seen
    repeated    the same ones in the same order, another question
    permuted    known ones, in an order that begins with one that never came first among them
    zipf        drawn from 32 by popularity: 3% of them take 60% of the requests; nothing is known at the start
    none        a prompt of 512 tokens without documents
    shared      known ones that 8 requests read at once, each in another order; their answers have 65 tokens

Asked one at a time, first tokens are measured; of several at once (`x 4`) the throughput. Counted are the tokens that
went through the model, those of chunks that are computed for a prompt too. Times are medians and quartiles, of the wall
and of the CPU time of the engine's process; ratios are of two engines in the same round. At the end, each target is
printed with what was reached. Results: results/vllm_plugin.*
"""

from __future__ import annotations

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import vllm
import vllm.v1.worker.cpu_worker  # what the engines need is imported once, before they are forked
from facts import RESULTS, save
from vllm_plugin_engines import ENGINES, IN_PLACE, OWN, PLAIN, PLUGIN, Forked
from vllm_plugin_works import DECODE, Work, measure, workloads

from kvmosaic.lab.bench.models import RANDOM_MODELS, model_folder
from kvmosaic.lab.bench.sizes import Sizes

ROOM = 2 << 30
"""Bytes for keys and values of each engine."""


def shown(values: Sequence[float], scale: float = 1.0) -> str:
    """Median (quartiles)."""
    if len(values) == 1:
        return f"{values[0] * scale:.3g}"
    lower, middle, upper = (value * scale for value in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{middle:.3g} ({lower:.3g} to {upper:.3g})"


def row(work: Work, names: Sequence[str]) -> dict[str, Any]:
    """What was measured, for JSON."""
    engines = {}
    for name in names:
        taken = work.taken[name]
        rate = work.width * len(taken) / sum(each.seconds for each in taken)
        engines[name] = {
            "first_seconds": [statistics.fmean(each.first_seconds) for each in taken],
            "seconds": [each.seconds for each in taken],
            "cpu_seconds": [each.cpu_seconds for each in taken],
            "decode_seconds": [each.decode_seconds for each in taken],
            "decode_cpu_seconds": [each.decode_cpu_seconds for each in taken],
            "requests_per_second": rate,
            "answer_tokens_per_second": rate * work.num_answer,
            "computed_tokens": sum(each.num_computed for each in taken),
        }
    shape = {"name": work.name, "at_once": work.width, "rounds": len(work.rounds), "answer_tokens": work.num_answer}
    return {**shape, "prompt_tokens": work.num_prompt_tokens, "engines": engines}


def paired(measured: Mapping[str, Any], engine: str, other: str, figure: str) -> list[float]:
    """One engine by another, round by round."""
    one, two = (measured["engines"][name][figure] for name in (engine, other))
    return [first / second for first, second in zip(one, two, strict=True)]


def written(report: Mapping[str, Any]) -> str:
    """Tables in Markdown."""
    works = report["works"]
    names = [name for name in ENGINES if name in works[0]["engines"]]
    lines = ["# Documents inside vLLM", "", "Written by `benchmarks/vllm_plugin.py`; median (quartiles).", ""]
    lines += [f"{report['about']}."]
    single, several = ([one for one in works if (one["at_once"] == 1) is alone] for alone in (True, False))
    first = [[one["name"], *(shown(one["engines"][name]["first_seconds"], 1e3) for name in names)] for one in single]
    lines += table("First token, ms", ["documents", *names], first)
    rates = [
        [one["name"], *(f"{one['engines'][name]['requests_per_second']:.3g}" for name in names)] for one in several
    ]
    lines += table("Several at once, requests per second", ["documents", *names], rates)
    counts = [
        [one["name"], f"{one['prompt_tokens']:,}", *(f"{one['engines'][n]['computed_tokens']:,}" for n in names)]
        for one in works
    ]
    lines += table("Tokens that went through the model", ["documents", "of prompts", *names], counts)
    wanted = ((PLAIN, PLUGIN), (PLAIN, IN_PLACE), (PLUGIN, IN_PLACE), (OWN, PLUGIN))
    pairs = [(one, two) for one, two in wanted if one in names and two in names]
    if pairs:
        heads = [f"{one} by {two}{unit}" for one, two in pairs for unit in ("", ", CPU time")]
        lines += table("Ratios of time, round by round", ["documents", *heads], [ratios(one, pairs) for one in works])
        lines += ["", *verdicts(report)]
    return "\n".join(lines) + "\n"


def ratios(measured: Mapping[str, Any], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """A row: of the first token where nothing else is answered, else of the whole answers."""
    figure = "first_seconds" if measured["answer_tokens"] == 1 else "seconds"
    figures = [(*pair, each) for pair in pairs for each in (figure, "cpu_seconds")]
    return [measured["name"], *(shown(paired(measured, *each)) for each in figures)]


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A heading and a table; nothing without rows."""
    if not rows:
        return []
    return ["", f"## {title}", "", *("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))]


TARGETS = (
    ("permuted", PLAIN, PLUGIN, "first", 10.0, "permuted documents, copied"),
    ("permuted", PLAIN, IN_PLACE, "first", 20.0, "permuted documents, read in place"),
    ("repeated", PLAIN, PLUGIN, "first", 1.0, "documents in the same order, copied"),
    ("repeated", PLAIN, IN_PLACE, "first", 1.0, "documents in the same order, read in place"),
    ("none", PLAIN, PLUGIN, "", 0.99, "no documents, plugin that copies"),
    ("none", PLAIN, IN_PLACE, "", 0.99, "no documents, plugin that reads in place"),
    (DECODE, PLUGIN, IN_PLACE, "decode", 1.0, "8 requests over shared documents, decoding in place against copies"),
)
"""Documents, slower engine, faster engine, what is timed, how many times as fast it has to be at least, in words."""


def verdicts(report: Mapping[str, Any]) -> Iterator[str]:
    """The targets, what was reached, and whether that is enough: CPU time decides, as others run on the machine."""
    works = {one["name"]: one for one in report["works"]}
    for documents, slow, fast, timed, target, words in TARGETS:
        measured = works.get(documents)
        if measured is None or not {slow, fast} <= measured["engines"].keys():
            continue
        wall_figure = f"{timed}_seconds" if timed else "seconds"
        cpu_figure = "decode_cpu_seconds" if timed == "decode" else "cpu_seconds"
        wall, cpu = (statistics.median(paired(measured, slow, fast, each)) for each in (wall_figure, cpu_figure))
        verdict = "reached" if cpu >= target else "missed"
        yield f"- {words}: {wall:.3g}x, CPU time {cpu:.3g}x; target {target:g}x: {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-0.1b", help=f"{', '.join(RANDOM_MODELS)}, or a folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--documents", type=int, default=4, help="of a prompt")
    parser.add_argument("--document-tokens", type=int, default=512, help="of each document")
    parser.add_argument("--plain-tokens", type=int, default=512, help="of a prompt without documents")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--plain-rounds", type=int, default=40)
    parser.add_argument("--engine", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--only", nargs="+", help="kinds of documents, as the tables name them")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = Sizes(
        documents=arguments.documents, document_tokens=arguments.document_tokens, plain_tokens=arguments.plain_tokens
    )
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = model_folder(arguments.model, Path(scratch))
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        engines = []
        for name in arguments.engine:
            engines.append(Forked(name, folder, arguments.dtype, ROOM))
            stack.callback(engines[-1].close)
        works = []
        for work in workloads(sizes, vocab_size, arguments.rounds, arguments.plain_rounds):
            if arguments.only is None or work.name in arguments.only:
                measure(work, engines)
                works.append(row(work, arguments.engine))
    about = (
        f"{arguments.model} in {arguments.dtype}; system text of {sizes.system} tokens, {sizes.documents} documents of "
        f"{sizes.document_tokens}, question of {sizes.question}; one thread each; vLLM {vllm.__version__}, torch "
        f"{torch.__version__}, transformers {metadata.version('transformers')}"
    )
    report = {"about": about, "works": works}
    path = save("vllm_plugin", report, arguments.out)
    facts = json.loads(path.read_text())
    machine = f"{facts['processor']}, load average {facts['load_average']:.1f}, commit {facts['commit']}"
    text = written({**report, "about": f"{about}. {machine}"})
    (arguments.out / "vllm_plugin.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
