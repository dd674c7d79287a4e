"""Arguments and options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvmosaic.layout.strategies import describe_strategies, strategy_names
from kvmosaic.model.formats import model_help
from kvmosaic.repair.parser import DEFAULT_REPAIR, FORMS


def _choice(names: Callable[[], tuple[str, ...]], value: str) -> str:
    """Parses an option whose choices are the names of a dict, at the time of the call."""
    if value not in names():
        raise typer.BadParameter(f"{value!r:.80} is not one of {', '.join(map(repr, names()))}.")
    return value


MODEL_HELP = model_help()
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
PromptText = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="A prompt as it is, or see --separator; - reads standard input.")
]
Documents = Annotated[
    Path | None, typer.Option("--documents", metavar="DIR", help="A folder of .txt and .md files, one document each.")
]
Questions = Annotated[
    list[str] | None, typer.Option("--question", "-q", metavar="TEXT", help="What to ask; may be given several times.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system text that comes before the documents.")]
Separator = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="What separates the segments of a prompt text, such as ##. Default, and '': prompts are never split.",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--position-strategy",
        parser=partial(_choice, lambda: strategy_names(auto=True, offsets=False)),
        metavar="|".join(strategy_names(auto=True, offsets=False)),
        help=f"Documents {describe_strategies(offsets=False)}, or the first where the prompt fits the model's "
        "positions, else the second (auto). Default: as the model's profile says, or auto.",
    ),
]
FixedStrategy = Annotated[
    str,
    typer.Option(
        "--position-strategy",
        parser=partial(_choice, lambda: strategy_names(offsets=False)),
        metavar="|".join(strategy_names(offsets=False)),
        help=f"Documents {describe_strategies(offsets=False)}.",
    ),
]
ContextKind = Annotated[
    Literal["system", "lead_in", "none"] | None,
    typer.Option(
        "--chunk-context",
        help="What a document saw when it was computed: the system text, that and a lead-in (a text that is not in the "
        "prompt), or nothing. Default: as the model's profile says, or system.",
    ),
]
Repair = Annotated[
    str | None,
    typer.Option(
        "--repair",
        metavar="POLICY",
        help=f"Which tokens of cached documents are computed again: {FORMS}. Default: as the model's profile says, or "
        f"{DEFAULT_REPAIR} where the model can.",
    ),
]
ProfileFile = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="auto | none | FILE",
        help="What kvmosaic tune found for this model: auto: kvmosaic_profile.json in its folder, if it is there.",
    ),
]
LongChunks = Annotated[
    Literal["error", "split"],
    typer.Option("--long-chunks", help="A document that is too long for one chunk: refuse it, or split it."),
]
WindowTokens = Annotated[
    int | None,
    typer.Option(
        "--window-tokens",
        min=1,
        max=2**27,
        help="Let answers go on without end in constant memory: a token sees this many newest tokens, and the sinks.",
    ),
]
SinkTokens = Annotated[
    int | None,
    typer.Option(
        "--sink-tokens", min=0, max=2**27, help="First tokens that stay visible, with --window-tokens. Default: 4."
    ),
]
Capacity = Annotated[str, typer.Option(metavar="SIZE", help="Memory for cached documents, such as 512MiB or 2GiB.")]
DType = Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or for example cuda:1.")]
Threads = Annotated[
    int | None,
    typer.Option("--num-threads", min=1, max=1024, help="Threads that compute on a CPU. Default: one per usable core."),
]
Packing = Annotated[
    Literal["auto", "always", "never"],
    typer.Option("--prepack", help="Keep bfloat16 weights in the order in which a CPU multiplies them."),
]
Rounding = Annotated[
    Literal["none", "int8"],
    typer.Option("--quantization", help="int8: linear layers in 8-bit integers, for bfloat16 on a CPU."),
]
NoChunkCache = Annotated[bool, typer.Option("--no-chunk-cache", help="Compute every document again for every prompt.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON: one object per line and prompt.")]

AsFields = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ChunkTiers = Annotated[
    list[str] | None,
    typer.Option(
        "--chunk-tier",
        metavar="URL",
        help="Where documents are offloaded to: disk:FOLDER?quota=SIZE, redis://…, s3://…, "
        "host:SIZE; several times for several, the fastest first.",
    ),
]
ChunkCodec = Annotated[
    Literal["none", "fp8", "int8", "int4"],
    typer.Option("--chunk-codec", help="How tiers store numbers: as they are, or in fewer bits."),
]
ChunkLoading = Annotated[
    Literal["auto", "always"],
    typer.Option("--chunk-loading", help="Load chunks from tiers where that is faster than computing, or always."),
]
ChunkCompression = Annotated[
    Literal["none", "zstd"], typer.Option("--chunk-compression", help="Whether tiers compress entries without loss.")
]
Tier = Annotated[str, typer.Argument(metavar="TIER_URL", help="disk:FOLDER, redis://…, s3://… or another tier.")]
TenantName = Annotated[
    str,
    typer.Option("--tenant", metavar="NAME", help="Whose prompts, on a server with several tenants. Default: the one."),
]
SecretVariable = Annotated[
    str | None,
    typer.Option(
        "--secret-env",
        metavar="NAME",
        help="Variable with the tier's secret. Default: KVMOSAIC_CHUNK_SECRET, if set.",
    ),
]
Name = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="Only entries with this in a name.")]
ModelDigits = Annotated[
    str | None, typer.Option("--model", metavar="FINGERPRINT", help="Only entries of this model; its first digits do.")
]
ServerURL = Annotated[
    str, typer.Option("--url", metavar="URL", help="Where the server is, with its --root-path if it has one.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, max=86_400, help="Longest wait for an answer, in seconds.")
]
