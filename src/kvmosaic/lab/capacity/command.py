"""Command `kvmosaic plan`: the memory of one prompt, or the capacity of this machine or of another device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.console.options import (
    ModelOptions,
    PromptArguments,
    PromptText,
    Questions,
    System,
    Takes,
    grouped,
    option,
)
from kvmosaic.errors import InvalidConfig, InvalidDocument

if TYPE_CHECKING:
    from kvmosaic.lab.capacity import Demand


PANEL = "The plan of a device"
Codec = Literal["none", "int8"]
_USUAL_DOCUMENTS = 100
"""Documents of a plan that names no number."""
_CHARACTERS_PER_TOKEN = 4
"""About, for the plan of a folder: no tokenizer is needed to plan."""
device_option = partial(typer.Option, rich_help_panel=PANEL)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """The device, and what is asked of it."""

    device_memory: Annotated[
        str | None,
        device_option(
            metavar="SIZE", help="Plan another device with so much memory, such as 80GiB. Default: this one."
        ),
    ] = None
    tokens_per_document: Annotated[int, device_option(metavar="NUMBER", help="Tokens of each document.")] = 1_000
    concurrency: Annotated[int, device_option(metavar="NUMBER", help="Prompts that run at once.")] = 1
    documents_per_prompt: Annotated[int, device_option(metavar="NUMBER", help="Documents of a prompt.")] = 5
    system_tokens: Annotated[int, device_option(metavar="NUMBER", help="Tokens of the system text.")] = 256
    question_tokens: Annotated[int, device_option(metavar="NUMBER", help="Tokens of a question.")] = 64
    answer_tokens: Annotated[int, device_option(metavar="NUMBER", help="Tokens of an answer.")] = 256
    block_size: Annotated[int, option("block_size", panel=PANEL, has_bounds=False)] = ChunkCacheConfig().block_size
    headroom: Annotated[
        str,
        device_option(metavar="SIZE", help="For activations and the driver: a size, or 10%."),
    ] = "10%"
    weights: Annotated[
        str | None,
        device_option(metavar="SIZE", help="What the weights take, if you know better."),
    ] = None
    chunk_tier: Annotated[list[str] | None, option("chunk_tier", panel=PANEL)] = None
    chunk_codec: Annotated[Codec, option("chunk_codec", panel=PANEL)] = "none"

    def demand(self, given: str | None, *, is_capped: bool) -> Demand:
        """Documents, a number or those of a folder, and prompts.

        `is_capped`: a prompt takes no more documents than there are.
        """
        from kvmosaic.lab.capacity import Demand

        per_prompt, tokens = self.documents_per_prompt, self.tokens_per_document
        if given is not None and Path(given).is_dir():
            from kvmosaic.console.folder import read_folder

            lengths = [len(document["text"]) for document in read_folder(Path(given))]
            documents, tokens = len(lengths), -(-sum(lengths) // (len(lengths) * _CHARACTERS_PER_TOKEN))
        else:
            documents = _number_of_documents(given)
        most = min(per_prompt, documents) if is_capped else per_prompt
        texts = (self.system_tokens, self.question_tokens, self.answer_tokens)
        return Demand(documents, tokens, self.concurrency, most, *texts)


def _number_of_documents(given: str | None) -> int:
    text = str(_USUAL_DOCUMENTS) if given is None else given.replace(",", "").replace("_", "")
    if not text.isdecimal() or len(text) > 18:
        raise InvalidConfig(
            f"--documents is {text[:40]!r}, and there is no folder of that name; give a folder, or how many there are"
        )
    return int(text)


_COMPOSED = """chunk_separator position_strategy chunk_context preamble long_chunks max_section_tokens
chunk_cache_size device"""
PLANNED = f"dtype engine kv_cache_dtype {_COMPOSED}"
_OF_PROMPT = ("prompt", "question", "system", *_COMPOSED.split())
_OF_DEVICE = (*(each.name for each in fields(DeviceOptions)), "as_json")
_FLAGS = {"prompt": "PROMPT", "as_json": "--json"}


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
            help="A folder of documents, or how many there are. Default: 100.",
        ),
    ] = None,
    question: Questions = None,
    system: System = None,
    as_json: Annotated[bool, device_option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the memory of one prompt; or, without a prompt, what a device holds.

    kvmosaic plan reader --documents notes --question "Where?"

    kvmosaic plan reader --documents notes

    kvmosaic plan llama --device-memory 80GiB --documents 10000 --tokens-per-document 1000 --concurrency 32

    The first composes a prompt without answering it. The others read a configuration (that of a model, a config.json,
    or a family of transformers), and no weights: how many documents stay in memory and in each tier. The second is
    about this machine; --device-memory is about another one.
    """
    if not _is_of_device(context):
        opening, asking = PromptArguments(prompt, _folder(documents), question, system).read("plan", opening)

        from kvmosaic.lab.capacity.output import show_plans

        show_plans(opening, asking)
        return
    from kvmosaic.console.prompt_source import check_model_is_not_a_prompt
    from kvmosaic.lab.capacity.output import show_capacity

    check_model_is_not_a_prompt("plan", opening.model, opening.values["chunk_separator"], is_asked=False)
    demand = device.demand(documents, is_capped=not _given(context, ("documents_per_prompt",)))
    folder = documents if documents is not None and Path(documents).is_dir() else None
    show_capacity(opening, device, demand, folder, as_json=as_json)


def _is_of_device(context: typer.Context) -> bool:
    """Whether a device is to be planned; refuses contradictory options."""
    of_device, of_prompt = _given(context, _OF_DEVICE), _given(context, _OF_PROMPT)
    if not of_device and of_prompt:
        return False
    if of_prompt:
        raise InvalidConfig(
            f"{of_prompt[0]} belongs to the plan of a prompt, and {of_device[0]} to the plan of a device; leave "
            "out one of the two"
        )
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
            f"--documents is {documents[:20]}, and there is no folder of that name; for the plan of this machine with "
            "so many documents leave out the question and all else of a prompt"
        )
    return None if documents is None else Path(documents)
