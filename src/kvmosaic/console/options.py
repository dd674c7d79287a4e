"""Arguments and options shared by several commands."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvmosaic.console.setting_options import choice, option
from kvmosaic.layout.strategies import describe_strategies, strategy_names

PromptText = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="A prompt as it is, or see --chunk-separator; - reads standard input."),
]
Documents = Annotated[
    Path | None, typer.Option("--documents", metavar="DIR", help="A folder of .txt and .md files, one document each.")
]
Questions = Annotated[
    list[str] | None, typer.Option("--question", "-q", metavar="TEXT", help="What to ask; may be given several times.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system text that comes before the documents.")]
FixedStrategy = Annotated[
    str,
    typer.Option(
        "--position-strategy",
        parser=partial(choice, partial(strategy_names, offsets=False)),
        metavar="|".join(strategy_names(offsets=False)),
        help=f"Documents {describe_strategies(offsets=False)}.",
    ),
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
ChunkTiers = Annotated[list[str] | None, option("chunk_tier")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON: one object per line and prompt.")]

AsFields = Annotated[bool, typer.Option("--json", help="Print JSON.")]
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
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write JSON, Markdown and plots here.")
]
AsReport = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]
ModelDigits = Annotated[
    str | None, typer.Option("--model", metavar="FINGERPRINT", help="Only entries of this model; its first digits do.")
]
ServerURL = Annotated[
    str, typer.Option("--url", metavar="URL", help="Where the server is, with its --root-path if it has one.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, max=86_400, help="Longest wait for an answer, in seconds.")
]
