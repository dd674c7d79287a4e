"""Command `kvmosaic plan`: the memory of one prompt, or, with `--device-memory`, the capacity of a device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvmosaic.console.options import (
    Capacity,
    ContextKind,
    Device,
    DType,
    LongChunks,
    Model,
    PromptText,
    Questions,
    Separator,
    Strategy,
    System,
)
from kvmosaic.errors import InvalidConfig, InvalidDocument

_device_option = partial(typer.Option, rich_help_panel="The plan of a device (with --device-memory)")
_OF_PROMPT = (
    *("prompt", "question", "system", "separator", "position_strategy", "chunk_context", "long_chunks", "capacity"),
    "device",
)
_OF_DEVICE = (
    *("config", "device_memory", "tokens_per_document", "concurrency", "documents_per_prompt", "system_tokens"),
    *("question_tokens", "answer_tokens", "zipf", "block_size", "headroom", "weights", "quantization", "hardware"),
    *("flops", "bandwidth", "measure", "chunk_tier", "tier_speed", "chunk_codec", "as_json", "plot"),
)
_FLAGS = {"prompt": "PROMPT", "config": "--model", "as_json": "--json"}


def plan(
    context: typer.Context,
    model: Model = "reader",
    prompt: PromptText = None,
    documents: Annotated[
        str | None,
        typer.Option(
            metavar="DIR | NUMBER",
            help="A folder of .txt and .md files for a prompt; with --device-memory, how many documents there are.",
        ),
    ] = None,
    dtype: DType = "auto",
    question: Questions = None,
    system: System = None,
    separator: Separator = None,
    position_strategy: Strategy = None,
    chunk_context: ContextKind = None,
    long_chunks: LongChunks = "error",
    capacity: Capacity = "2GiB",
    device: Device = "auto",
    device_memory: Annotated[
        str | None,
        _device_option(metavar="SIZE", help="Plan a device with so much memory, such as 80GiB."),
    ] = None,
    config: Annotated[
        str | None,
        _device_option(
            "--model",
            metavar="CONFIG",
            help="The same as MODEL; a config.json or a family of transformers, such as llama, will do.",
        ),
    ] = None,
    tokens_per_document: Annotated[
        int | None, _device_option(metavar="NUMBER", help="Tokens of each document.")
    ] = None,
    concurrency: Annotated[int, _device_option(metavar="NUMBER", help="Prompts that run at once.")] = 1,
    documents_per_prompt: Annotated[int, _device_option(metavar="NUMBER", help="Documents of a prompt.")] = 5,
    system_tokens: Annotated[int, _device_option(metavar="NUMBER", help="Tokens of the system text.")] = 256,
    question_tokens: Annotated[int, _device_option(metavar="NUMBER", help="Tokens of a question.")] = 64,
    answer_tokens: Annotated[int, _device_option(metavar="NUMBER", help="Tokens of an answer.")] = 256,
    zipf: Annotated[
        float,
        _device_option(
            metavar="EXPONENT",
            help="Popularity: rank r is drawn as 1 / r ** EXPONENT; 0: all alike.",
        ),
    ] = 1.0,
    block_size: Annotated[int, _device_option(metavar="NUMBER", help="Token slots of a block.")] = 16,
    headroom: Annotated[
        str,
        _device_option(metavar="SIZE", help="For activations and the driver: a size, or 10%."),
    ] = "10%",
    weights: Annotated[
        str | None,
        _device_option(metavar="SIZE", help="What the weights take, if you know better."),
    ] = None,
    quantization: Annotated[
        Literal["none", "int8"],
        _device_option(help="int8: linear layers in 8-bit integers, for bfloat16 on a CPU."),
    ] = "none",
    hardware: Annotated[
        str | None,
        _device_option(
            metavar="NAME",
            help="Speed by data sheet: a100, h100, h200, l4, l40s, rtx4090, mi300x. Half of it is counted.",
        ),
    ] = None,
    flops: Annotated[
        str | None,
        _device_option(metavar="RATE", help="Operations per second that are reached: 400T."),
    ] = None,
    bandwidth: Annotated[
        str | None,
        _device_option(metavar="RATE", help="Bytes of its memory per second: 2TB/s."),
    ] = None,
    measure: Annotated[
        bool,
        _device_option("--measure", help="Measure this machine and the tiers named, a few seconds."),
    ] = False,
    chunk_tier: Annotated[
        list[str] | None,
        _device_option(
            metavar="URL",
            help="A tier below the device, as for serve: host:64GiB, disk:FOLDER?quota=1TiB, redis://…, s3://….",
        ),
    ] = None,
    tier_speed: Annotated[
        list[str] | None,
        _device_option(
            metavar="KIND=RATE,TIME",
            help="How fast host, disk, redis or object is: disk=3GB/s,0.2ms.",
        ),
    ] = None,
    chunk_codec: Annotated[
        Literal["none", "fp8", "int8", "int4"],
        _device_option(help="How tiers store numbers: as they are, or in fewer bits."),
    ] = "none",
    plot: Annotated[
        Path | None,
        _device_option(metavar="FILE", help="Draw hit rate and first token by memory (PNG)."),
    ] = None,
    as_json: Annotated[bool, _device_option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what one prompt takes; or, with --device-memory, what a device holds and what to expect of it.

    kvmosaic plan reader --documents notes --question "Where?"

    kvmosaic plan llama --device-memory 80GiB --documents 10000 --tokens-per-document 1000 --concurrency 32

    The first composes a prompt without answering it. The second reads a configuration, and no weights: how many
    documents stay in memory, how often one is found, the time to the first token, and what each tier is worth.
    """
    if not _is_of_device(context, device_memory):
        from kvmosaic.console.prompt_source import PromptSource, check_model_is_not_a_prompt

        model, prompt = ("reader", "-") if model == "-" else (model, prompt)
        check_model_is_not_a_prompt("plan", model, separator, is_asked=bool(prompt or question))
        asking = PromptSource(prompt, _folder(documents), tuple(question or ()), system)

        from kvmosaic.console.model_options import ModelOptions
        from kvmosaic.console.plan.prompt import show_plans

        opening = ModelOptions(model, dtype, device, position_strategy, chunk_context, separator, long_chunks, capacity)
        show_plans(opening, asking)
        return
    from kvmosaic.capacity import Demand
    from kvmosaic.console.plan.device import CapacityRequest, SpeedAsked, show_capacity

    number = _number("--documents", documents)
    demand = Demand(
        number,
        _number("--tokens-per-document", tokens_per_document),
        concurrency,
        documents_per_prompt if _given(context, ("documents_per_prompt",)) else min(documents_per_prompt, number),
        system_tokens,
        question_tokens,
        answer_tokens,
        zipf,
    )
    asked = CapacityRequest(
        config or model,
        dtype,
        quantization,
        device_memory or "",
        demand,
        block_size,
        headroom,
        weights,
        SpeedAsked(hardware, flops, bandwidth, measure),
        tuple(chunk_tier or ()),
        tuple(tier_speed or ()),
        chunk_codec,
    )
    show_capacity(asked, as_json=as_json, plot=plot)


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


def _number(flag: str, given: str | int | None) -> int:
    """Returns a number of documents or tokens that a plan of a device requires."""
    text = "" if given is None else str(given).replace(",", "").replace("_", "")
    if not text.isdecimal() or len(text) > 18:
        what = "is missing" if given is None else f"is {str(given)[:40]!r}"
        raise InvalidConfig(f"{flag} {what}; the plan of a device needs a whole number there")
    return int(text)
