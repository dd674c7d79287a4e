"""Commands of `kvmosaic vllm`: vLLM's own server, with documents."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from kvmosaic.console.help import CommandGroup
from kvmosaic.console.options import ChunkTiers, grouped, option

vllm = CommandGroup(
    no_args_is_help=True,
    add_completion=False,
    help="Run the server of vLLM; each document is computed once.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@vllm.callback()
def _options() -> None:
    pass


@dataclass(frozen=True, slots=True)
class DocumentOptions:
    """How documents are found, placed and stored."""

    chunk_separator: Annotated[str | None, option("chunk_separator")] = None
    position_strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of requests that say nothing of it: auto, sequential or shared.")
    ] = None
    chunk_context: Annotated[
        str | None, typer.Option(metavar="NAME", help="companions, system or none: what documents saw when computed.")
    ] = None
    companions: Annotated[str | None, option("companions")] = None
    preamble: Annotated[str | None, option("preamble")] = None
    find_documents: Annotated[str | None, option("find_documents")] = None
    document_pattern: Annotated[str | None, option("document_pattern")] = None
    repair: Annotated[
        str | None,
        typer.Option(
            metavar="REPAIR",
            help="none, names, or first(16): so many tokens of each document are computed again. Default: none where "
            "they have met companions, else first(8).",
        ),
    ] = None
    long_chunks: Annotated[str | None, option("long_chunks")] = None
    max_section_tokens: Annotated[int | None, option("max_section_tokens")] = None
    max_chunk_tokens: Annotated[int | None, option("max_chunk_tokens")] = None
    document_reads: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="copy (default): each request gets copies of its documents. in-place: all read the same ones.",
        ),
    ] = None
    document_cache_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="How much of vLLM's KV cache documents may fill before others are evicted first: 0.5 (default), "
            "'100000 tokens', 4GiB, or 0.",
        ),
    ] = None
    document_eviction: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which document is evicted first: priority (default), lru, lfu or gdsf."),
    ] = None
    documents_dir: Annotated[str | None, option("documents_dir")] = None


@vllm.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="MODEL [OPTIONS] [OPTIONS OF VLLM SERVE]",
)
@grouped
def serve(
    context: typer.Context,
    documents: DocumentOptions,
    chunk_tier: ChunkTiers = None,
    chunk_loading: Annotated[str | None, option("chunk_loading")] = None,
    require_composing: Annotated[
        bool,
        typer.Option(
            "--require-composing", help="Exit with status 1 where vLLM cannot compose documents, and say why."
        ),
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the command line, and run nothing.")] = False,
) -> None:
    """Run `vllm serve` with documents: all of its own options may be given, and ours are added where they are missing.

    kvmosaic vllm serve Qwen/Qwen3-0.6B --max-model-len 8192 --position-strategy shared
    """
    from kvmosaic.vllm.front.command import check_installed, serving
    from kvmosaic.vllm.settings import REQUIRED_SETTING

    choices = {name: None if value is None else str(value) for name, value in asdict(documents).items()}
    choices[REQUIRED_SETTING] = "1" if require_composing else None
    launch = serving(context.args, choices, chunk_tier or (), chunk_loading)
    variables = [f"{name}={shlex.quote(value)}" for name, value in launch.shown_variables.items()]
    typer.echo(" ".join((*variables, "vllm", shlex.join(launch.arguments))), err=not show)
    if show:
        return
    check_installed()
    sys.stderr.flush()
    os.execve(launch.command[0], launch.command, {**os.environ, **launch.variables})  # noqa: S606
