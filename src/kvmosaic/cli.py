"""Command line: run, plan, check, demo, bench, eval, tune, adapt, warm, documents, serve, vllm.

Commands import what they need when they run, so that `--help` does not import torch.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvmosaic.console.documents.commands import documents
from kvmosaic.console.help import CommandGroup, HelpCommand, ShortHelpCommand, show_all
from kvmosaic.console.options import (
    AsFields,
    AsJSON,
    FixedStrategy,
    FolderOptions,
    ModelOptions,
    PromptArguments,
    SamplingOptions,
    Takes,
    grouped,
)
from kvmosaic.errors import InvalidConfig, KVMosaicError

LOADING = "dtype device num_threads prepack engine kv_cache_dtype adapter merge_adapter"
LENGTHS = "long_chunks max_section_tokens max_chunk_tokens hash_algorithm companions"
TIERS = "chunk_tier chunk_codec"
RUN = f"""chunk_separator position_strategy chunk_context preamble find_documents document_pattern repair profile
{LENGTHS} chunk_cache_size {LOADING}
enable_chunk_cache {TIERS} chunk_loading"""
WARM = f"{TIERS} position_strategy chunk_context preamble find_documents profile {LENGTHS} chunk_cache_size {LOADING}"
_WARM_SIZE = Annotated[
    str,
    typer.Option(
        "--chunk-cache-size", metavar="SIZE", help="Memory for documents under way; the folder may be much larger."
    ),
]


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


app = CommandGroup(
    cls=_Commands,
    no_args_is_help=True,
    help="Run, serve and measure models that reuse the KV cache of documents in any order, at any position.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.add_typer(documents, name="documents")


def _add(name: str, annex: str, module: str, function: str) -> None:
    """Adds a command of vLLM's or the lab's folder, if that is there: nothing else of the package imports these."""
    if find_spec(f"kvmosaic.{annex}"):
        command = getattr(import_module(f"kvmosaic.{annex}.{module}"), function)
        app.add_typer(command, name=name) if isinstance(command, typer.Typer) else app.command(name)(command)


_add("vllm", "vllm", "commands", "vllm")


def main() -> None:
    """Entry point of the `kvmosaic` command."""
    from kvmosaic.container import this_machine, thread_variables

    gc.set_threshold(50_000)  # what imports make stays, and going through it takes a tenth of a start
    if sys.argv[1:2] != ["vllm"]:  # which manages the cores itself
        os.environ.update(thread_variables(os.environ, this_machine()))
    warnings.simplefilter("once", UserWarning)
    warnings.showwarning = _show_note
    app(prog_name="kvmosaic")


def _show_note(message: Warning | str, category: type[Warning], filename: str, *_: object, **__: object) -> None:
    """Prints what a person is warned of as a line, and other warnings with their place in the code."""
    is_for_people = issubclass(category, UserWarning)
    typer.echo(f"note: {message}" if is_for_people else f"{filename}: {category.__name__}: {message}", err=True)


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
@grouped
def run(
    prompts: PromptArguments,
    opening: Annotated[ModelOptions, Takes(RUN)],
    sampling: SamplingOptions,
    as_json: AsJSON = False,
) -> None:
    """Answer questions about documents, and show what was reused.

    kvmosaic run reader --documents notes --question "Where does the ferry go?"

    A prompt text is an ordinary prompt, as it is, unless --chunk-separator gives the text between its documents.
    Standard input (-) is one prompt; with --chunk-separator it may hold one per line, each with at least two
    separators.
    """
    opening, asking = prompts.read("run", opening)

    from kvmosaic.console.answer_output import run_prompts

    run_prompts(opening, asking, sampling.params(), as_json)


_add("plan", "lab", "capacity.command", "plan")


@app.command()
@grouped
def check(
    opening: Annotated[ModelOptions, Takes(f"{LOADING} {TIERS}")],
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
) -> None:
    """Check that a model's documents can be composed and moved, and that its tiers answer. Exit code 1 if not."""
    from kvmosaic.kept import VARIABLE

    os.environ[VARIABLE] = "none"  # what earlier starts have found is found again
    if in_vllm:
        if not import_module("kvmosaic.vllm.check").show_engine_check(opening.model, vllm_options or ()):
            raise typer.Exit(1)
        return
    if vllm_options:
        raise InvalidConfig(f"{vllm_options[0]!r:.80} is an option of vLLM; say --vllm as well")
    from kvmosaic.console.model import show_check

    if not show_check(opening):
        raise typer.Exit(1)


@app.command()
@grouped
def demo(
    opening: Annotated[
        ModelOptions,
        Takes(
            "position_strategy long_chunks max_section_tokens chunk_cache_size device",
            types={"position_strategy": FixedStrategy},
            defaults={"position_strategy": "sequential"},
        ),
    ],
) -> None:
    """Answer questions about bundled documents in changing orders, and show what was reused."""
    from kvmosaic.console.demo import run_demo
    from kvmosaic.console.folder import bundled_documents

    # the bundled reader was trained on documents read separately
    run_demo(opening.changed(repair="none"), bundled_documents())


_add("bench", "lab", "bench.bench_command", "bench_command")
_add("eval", "lab", "eval.commands", "eval_command")
_add("tune", "lab", "eval.commands", "tune_command")
_add("adapt", "lab", "adapt.command", "adapt_command")


@app.command()
@grouped
def warm(
    folder: FolderOptions,
    opening: Annotated[
        ModelOptions,
        Takes(
            WARM,
            types={"chunk_cache_size": _WARM_SIZE},
            defaults={"chunk_cache_size": "1GiB"},
            is_model_required=True,
        ),
    ],
    as_json: AsFields = False,
) -> None:
    """Compute a folder of documents ahead of time into tiers. Run again, it computes only what is missing.

    kvmosaic warm reader notes --chunk-tier "disk:/var/cache/kvmosaic?quota=10GiB"

    The system text must be that of the later prompts. The secret of the tiers is read from KVMOSAIC_CHUNK_SECRET.
    """
    from kvmosaic.console.warm_folder import warm_folder

    opening = opening.changed(chunk_pending=opening.values["chunk_cache_size"])
    raise typer.Exit(warm_folder(opening, folder, as_json))


class _ServeHelp(ShortHelpCommand):
    common = (
        *("--device", "--dtype", "--max-model-len", "--served-model-name", "--host", "--port", "--api-key", "--config"),
        *("--documents-dir", "--warm-on-start", "--find-documents", "--companions", "--repair"),
        *("--chunk-cache-size", "--chunk-tier"),
    )


class _ServeCommand(HelpCommand):
    """The command whose options come from the settings of the server."""

    def shell_complete(self, context: Any, incomplete: str) -> Any:
        """Completes the options of the server."""
        from kvmosaic.server import check_installed

        check_installed()
        from kvmosaic.server.options import serve_app

        command = typer.main.get_command(serve_app(_launch, HelpCommand, show_all))
        return command.shell_complete(command.make_context("serve", [], resilient_parsing=True), incomplete)


@app.command(
    cls=_ServeCommand,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def serve(context: typer.Context) -> None:
    """Serve an API like that of OpenAI and Anthropic; each document is computed once."""
    from kvmosaic.server import check_installed

    check_installed()
    from kvmosaic.server.options import serve_app

    # the options come from the server settings, which need the server's packages
    serve_app(_launch, _ServeHelp, show_all)(context.args, prog_name="kvmosaic serve", standalone_mode=False)


def _launch(settings: Any, read: Callable[[], Any]) -> None:
    from kvmosaic.server.launch import launch

    async def fill(services: Any) -> str:
        from kvmosaic.console.documents.sync import add_documents

        return await add_documents(services, settings.documents)

    launch(settings, read, fill)
