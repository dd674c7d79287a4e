"""`kvmosaic vllm serve` against `vllm serve` with prefix caching and against `kvmosaic serve`, over HTTP.

    python benchmarks/vllm_plugin_http.py [--rounds 5] [--prompts 12] [--dtype bfloat16]

Run it with the Python of an environment in which vLLM and kvmosaic are installed, and pandas for `vllm bench serve`,
which is left out otherwise. The model is a random Llama of about 0.1 B with the tokenizer of the bundled reader; each
server has one thread. Prompts are texts, the same for all: a system text of about 64 tokens, 4 documents of about 512
and a question of about 32, with `##` between them, which a plain vLLM reads as text. Our own client asks one prompt at
a time, the servers in turns, and takes the time to the first token and, from the usage, how many tokens were computed.
Then `vllm bench serve` asks each server other prompts of the same kind, 4 at a time, answers of 16 tokens. Kinds as in
`vllm_plugin.py`. Results: results/vllm_plugin_http.*
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}

import argparse
import contextlib
import io
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import torch
from facts import RESULTS, save
from serving import Served, made_up_text
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvmosaic.assembly import bundled_reader
from kvmosaic.lab.bench.models import RANDOM_MODELS
from kvmosaic.lab.bench.workloads import draw, zipf_weights

PLAIN, PLUGIN, OWN = "vllm serve", "kvmosaic vllm serve", "kvmosaic serve"
NUM_DOCUMENTS, NUM_CATALOGUE, AT_ONCE, NUM_ANSWER = 4, 32, 4, 16
SYSTEM_TOKENS, QUESTION_TOKENS, PLAIN_TOKENS = 64, 32, 512
MODEL, SEPARATOR = "random", "##"
SECONDS_TO_START = 900.0
Ask = tuple[list[str], list[str]]
"""Prompts that are asked before and not measured, and prompts that are."""


def make_model(folder: Path, dtype: str) -> Path:
    """A random Llama with the reader's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_reader())
    torch.manual_seed(0)
    shape = {**RANDOM_MODELS["random-0.1b"], "vocab_size": -(-len(tokenizer) // 64) * 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=None))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class VLLMServed:
    """A server of vLLM on a free port of loopback, from `with` until its end."""

    def __init__(self, command: Sequence[str], model: Path, dtype: str, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        sizes = {"max-model-len": 4096, "max-num-batched-tokens": 4096, "max-num-seqs": 64, "block-size": 32}
        self._command = [sys.executable, "-m", *command, str(model), "--dtype", dtype, "--served-model-name", MODEL]
        self._command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--enable-prefix-caching"]
        self._command += ["--enable-prompt-tokens-details", *options]
        self._command += [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> VLLMServed:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, start_new_session=True)
        return self

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + SECONDS_TO_START
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            if self._process.poll() is not None or time.monotonic() > end:
                self._log.seek(max(0, self._log.seek(0, 2) - 3000))
                raise RuntimeError("vLLM did not start:\n" + self._log.read().decode(errors="replace"))
            time.sleep(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


class Texts:
    """Prompts of made-up words, from a seed."""

    def __init__(self, seed: str, tokenizer: Any, document_tokens: int) -> None:
        self._random = random.Random(seed)
        self._tokenizer = tokenizer
        self._document_tokens = document_tokens
        self._system = self.text(SYSTEM_TOKENS)

    def text(self, num_tokens: int) -> str:
        """About so many tokens."""
        ids = self._tokenizer.encode(made_up_text(self._random, num_tokens), add_special_tokens=False)
        return str(self._tokenizer.decode(ids[:num_tokens])).strip()

    def documents(self, count: int = NUM_DOCUMENTS) -> list[str]:
        return [self.text(self._document_tokens) for _ in range(count)]

    def prompt(self, documents: Sequence[str]) -> str:
        return f" {SEPARATOR} ".join((self._system, *documents, self.text(QUESTION_TOKENS)))

    def fresh(self, count: int) -> Ask:
        return [], [self.prompt(self.documents()) for _ in range(count)]

    def repeated(self, count: int) -> Ask:
        known = self.documents()
        return [self.prompt(known)], [self.prompt(known) for _ in range(count)]

    def permuted(self, count: int) -> Ask:
        """Sets of documents, each asked in orders that begin with every one of them but the one that came first."""
        first, then = [], []
        for number in range(count):
            turn = number % (NUM_DOCUMENTS - 1) + 1
            if turn == 1:
                known = self.documents()
                first.append(self.prompt(known))
            rest = known[:turn] + known[turn + 1 :]
            then.append(self.prompt([known[turn], *self._random.sample(rest, len(rest))]))
        return first, then

    def zipf(self, count: int) -> Ask:
        catalogue = self.documents(NUM_CATALOGUE)
        weights = zipf_weights(NUM_CATALOGUE)
        chosen = [draw(weights, NUM_DOCUMENTS, self._random) for _ in range(count)]
        return [], [self.prompt([catalogue[rank] for rank in ranks]) for ranks in chosen]

    def none(self, count: int) -> Ask:
        return [], [self.text(PLAIN_TOKENS) for _ in range(count)]


KINDS: dict[str, Callable[[Texts, int], Ask]] = {
    "fresh": Texts.fresh,
    "repeated": Texts.repeated,
    "permuted": Texts.permuted,
    "zipf": Texts.zipf,
    "none": Texts.none,
}


def first_token(url: str, prompt: str) -> tuple[float, int | None]:
    """Seconds to the first token of an answer, and how many tokens of the prompt were computed."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    seconds, usage = None, {}
    begin = time.monotonic()
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**body, "stream_options": {"include_usage": True}}, timeout=600
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seconds = seconds or time.monotonic() - begin
                usage = json.loads(line[6:]).get("usage") or usage
    if answer.status_code != 200 or seconds is None:
        raise RuntimeError(f"{url} answered {answer.status_code}")
    details = usage.get("prompt_tokens_details") or {}
    computed = details.get("recomputed_tokens", usage["prompt_tokens"] - details.get("cached_tokens", 0))
    return seconds, computed


def one_at_a_time(urls: Mapping[str, str], ask: Ask) -> dict[str, Any]:
    """Our own client: every server in turns."""
    found: dict[str, Any] = {name: {"first_seconds": [], "computed_tokens": 0} for name in urls}
    names = list(urls)
    for prompt in ask[0]:
        for name in names:
            first_token(urls[name], prompt)
    for prompt in ask[1]:
        names = [*names[1:], names[0]]
        for name in names:
            seconds, computed = first_token(urls[name], prompt)
            found[name]["first_seconds"].append(seconds)
            found[name]["computed_tokens"] += computed
    return found


def several_at_once(url: str, model: Path, ask: Ask, scratch: Path) -> dict[str, Any]:
    """`vllm bench serve`, as its command line runs it, in this process: importing vLLM takes longer than the run."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for prompt in ask[0]:
        first_token(url, prompt)
    rows = scratch / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ask[1]))
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = {
        **{"backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": str(model)},
        **{"served-model-name": MODEL, "dataset-name": "custom", "dataset-path": rows, "num-prompts": len(ask[1])},
        **{"custom-output-len": NUM_ANSWER, "max-concurrency": AT_ONCE, "percentile-metrics": "ttft,tpot,e2el"},
    }
    line = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    line += ["--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        result = bench_serve(parser.parse_args(line))
    if result["completed"] != len(ask[1]):
        raise RuntimeError(f"vllm bench serve: {result['completed']} of {len(ask[1])} answered\n{said.getvalue()}")
    names = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_e2el_ms")
    return {name: result[name] for name in names}


def shown(values: Sequence[float], scale: float = 1.0) -> str:
    """Median (quartiles)."""
    if len(values) == 1:
        return f"{values[0] * scale:.3g}"
    lower, middle, upper = (value * scale for value in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{middle:.3g} ({lower:.3g} to {upper:.3g})"


def written(report: Mapping[str, Any]) -> str:
    """Tables in Markdown."""
    names = list(next(iter(report["kinds"].values()))["single"])
    lines = ["# Documents inside vLLM, over HTTP", "", "Written by `benchmarks/vllm_plugin_http.py`.", ""]
    lines += [f"{report['about']}.", "", "## First token, ms: median (quartiles) of our own client", ""]
    lines += _table(["documents", *names], _single(report, names))
    lines += ["", f"## `vllm bench serve`, {AT_ONCE} at a time: requests per second (median first token, ms)", ""]
    lines += _table(["documents", *names], _several(report, names))
    lines += ["", "## Tokens that were computed for the prompts of our own client", ""]
    counts = [
        [kind, *(f"{each['single'][name]['computed_tokens']:,}" for name in names)]
        for kind, each in report["kinds"].items()
    ]
    return "\n".join([*lines, *_table(["documents", *names], counts)]) + "\n"


def _single(report: Mapping[str, Any], names: Sequence[str]) -> Iterator[list[str]]:
    for kind, each in report["kinds"].items():
        yield [kind, *(shown(each["single"][name]["first_seconds"], 1e3) for name in names)]


def _several(report: Mapping[str, Any], names: Sequence[str]) -> Iterator[list[str]]:
    for kind, each in report["kinds"].items():
        if each["bench"]:
            bench = [each["bench"][name] for name in names]
            yield [kind, *(f"{one['request_throughput']:.3g} ({one['median_ttft_ms']:.3g})" for one in bench)]


def _table(head: Sequence[str], rows: Iterator[list[str]] | list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


@contextlib.contextmanager
def servers(names: Sequence[str], model: Path, dtype: str) -> Iterator[dict[str, str]]:
    """Addresses of running servers; those of vLLM start at once, since most of it is importing."""
    commands = {
        PLAIN: (["vllm.entrypoints.cli.main", "serve"], []),
        PLUGIN: (["kvmosaic", "vllm", "serve"], ["--chunk-separator", SEPARATOR]),
    }
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(VLLMServed(command, model, dtype, *options))
            for name, (command, options) in commands.items()
            if name in names
        }
        urls = {}
        for name, server in started.items():
            server.wait()
            urls[name] = server.url
        if OWN in names:
            options = ["--chunk-separator", SEPARATOR, "--position-strategy", "sequential", "--dtype", dtype]
            own = stack.enter_context(Served(str(model), *options, "--served-model-name", MODEL))
            urls[OWN] = own.url
        yield {name: urls[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--document-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6, help="prompts of our own client, of each kind")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of vllm bench serve, of each kind")
    parser.add_argument("--server", nargs="+", default=[PLAIN, PLUGIN, OWN], choices=[PLAIN, PLUGIN, OWN])
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    kinds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", arguments.dtype)
        tokenizer = AutoTokenizer.from_pretrained(model)
        with servers(arguments.server, model, arguments.dtype) as urls:
            for url in urls.values():
                first_token(url, "A first prompt takes longer than all others.")
            for kind in arguments.kind:

                def texts(use: str, kind: str = kind) -> Texts:
                    return Texts(f"{use} {kind}", tokenizer, arguments.document_tokens)

                single = one_at_a_time(urls, KINDS[kind](texts("client"), arguments.rounds))
                bench = {}
                if find_spec("pandas"):
                    ask = KINDS[kind](texts("bench"), arguments.prompts)
                    bench = {name: several_at_once(url, model, ask, Path(scratch)) for name, url in urls.items()}
                kinds[kind] = {"single": single, "bench": bench}
                print(kind, json.dumps(kinds[kind]), flush=True)
    about = (
        f"Random Llama like random-0.1b with {len(tokenizer):,} tokens, {arguments.dtype}, one thread each, "
        f"{NUM_DOCUMENTS} documents of {arguments.document_tokens} tokens"
    )
    path = save("vllm_plugin_http", {"about": about, "kinds": kinds}, arguments.out)
    facts = json.loads(path.read_text())
    machine = f"{facts['processor']}, load average {facts['load_average']:.1f}, commit {facts['commit']}"
    text = written({"about": f"{about}. {machine}", "kinds": kinds})
    (arguments.out / "vllm_plugin_http.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
