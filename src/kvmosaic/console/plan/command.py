"""Command `kvmosaic plan`: the memory of one prompt, or, with `--device-memory`, the capacity of a device."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from kvmosaic.console.model_options import ModelOptions
from kvmosaic.console.option_groups import Takes, grouped
from kvmosaic.console.options import PromptText, Questions, System
from kvmosaic.console.plan.device_options import DeviceOptions, device_option, whole_number
from kvmosaic.console.prompt_arguments import PromptArguments
from kvmosaic.errors import InvalidConfig, InvalidDocument

_OF_PROMPT = (
    *(
        "prompt",
        "question",
        "system",
        "chunk_separator",
        "position_strategy",
        "chunk_context",
        "preamble",
        "long_chunks",
    ),
    *("chunk_cache_size", "device"),
)
_OF_DEVICE = (*(each.name for each in fields(DeviceOptions)), "as_json")
_FLAGS = {"prompt": "PROMPT", "config": "--model", "as_json": "--json"}
PLANNED = "dtype chunk_separator position_strategy chunk_context preamble long_chunks chunk_cache_size device"


@grouped
def plan(
    context: typer.Context,
    opening: Annotated[ModelOptions, Takes(PLANNED)],
    device: DeviceOptions,
    prompt: PromptText = None,
    documents: Annotated[
        str | None,
        typer.Option(
            metavar="DIR | NUMBER",
            help="A folder of .txt and .md files for a prompt; with --device-memory, how many documents there are.",
        ),
    ] = None,
    question: Questions = None,
    system: System = None,
    as_json: Annotated[bool, device_option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what one prompt takes; or, with --device-memory, what a device holds and what to expect of it.

    kvmosaic plan reader --documents notes --question "Where?"

    kvmosaic plan llama --device-memory 80GiB --documents 10000 --tokens-per-document 1000 --concurrency 32

    The first composes a prompt without answering it. The second reads a configuration, and no weights: how many
    documents stay in memory, how often one is found, the time to the first token, and what each tier is worth.
    """
    if not _is_of_device(context, device.device_memory):
        opening, asking = PromptArguments(prompt, _folder(documents), question, system).read("plan", opening)

        from kvmosaic.console.plan.prompt import show_plans

        show_plans(opening, asking)
        return
    from kvmosaic.console.plan.device import show_capacity

    number = whole_number("--documents", documents)
    demand = device.demand(number, is_capped=not _given(context, ("documents_per_prompt",)))
    show_capacity(device.request(opening.model, opening.values["dtype"], demand), as_json=as_json, plot=device.plot)


def _is_of_device(context: typer.Context, device_memory: str | None) -> bool:
    """Whether a device is to be planned; refuses contradictory options."""
    of_device = _given(context, _OF_DEVICE)
    if not of_device:
        return False
    if device_memory is None:
        raise InvalidConfig(
            f"{of_device[0]} belongs to the plan of a device, which needs --device-memory SIZE; for the plan of a "
            "prompt leave it out"
        )
    if of_prompt := _given(context, _OF_PROMPT):
        raise InvalidConfig(
            f"{of_prompt[0]} belongs to the plan of a prompt, and --device-memory asks for the plan of a device; leave "
            "out one of the two"
        )
    if _given(context, ("config",)) and _given(context, ("model",)):
        raise InvalidConfig("the model is given twice, as MODEL and as --model; leave out one of the two")
    return True


def _given(context: typer.Context, names: tuple[str, ...]) -> list[str]:
    """Returns which of these parameters were given, as written on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    written = (name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    return [_FLAGS.get(name, f"--{name.replace('_', '-')}") for name in written]


def _folder(documents: str | None) -> Path | None:
    """Returns the document folder of a prompt."""
    if documents is not None and documents.isdecimal() and not Path(documents).exists():
        raise InvalidDocument(
            f"--documents is {documents[:20]}, and there is no folder of that name; for the plan of a device with so "
            "many documents add --device-memory SIZE"
        )
    return None if documents is None else Path(documents)
