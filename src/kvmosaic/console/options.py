"""Arguments and options of several commands, and their groups: sampling, prompts, a folder of documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvmosaic.console.model_options import ModelOptions
from kvmosaic.console.option_groups import choice, option
from kvmosaic.layout.strategies import describe_strategies, strategy_names

if TYPE_CHECKING:
    from kvmosaic.console.prompt_source import PromptSource
    from kvmosaic.console.warm.folder import Warming
    from kvmosaic.sampling import SamplingParams


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
        parser=lambda value: choice(lambda: strategy_names(offsets=False), value),
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


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How answers are sampled, and how long they become."""

    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token every time.")] = 0.0
    window_tokens: WindowTokens = None
    sink_tokens: SinkTokens = None

    def params(self) -> SamplingParams:
        """The parameters of the requests."""
        from kvmosaic.sampling import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            window_tokens=self.window_tokens,
            sink_tokens=self.sink_tokens,
        )


@dataclass(frozen=True, slots=True)
class PromptArguments:
    """A prompt text, or questions about a folder of documents."""

    prompt: PromptText = None
    documents: Documents = None
    question: Questions = None
    system: System = None

    def read(self, command: str, opening: ModelOptions) -> tuple[ModelOptions, PromptSource]:
        """Returns the model and the prompts; a lone "-" is the prompt, not the model.

        Raises:
            InvalidPrompt: nothing is asked, or a prompt is given as the model.
        """
        from kvmosaic.console.prompt_source import PromptSource, check_model_is_not_a_prompt

        prompt = self.prompt
        if opening.model == "-":
            opening, prompt = ModelOptions(values=opening.values), "-"
        separator = opening.values["chunk_separator"]
        check_model_is_not_a_prompt(command, opening.model, separator, is_asked=bool(prompt or self.question))
        return opening, PromptSource(prompt, self.documents, tuple(self.question or ()), self.system)


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """The documents to warm, and where they will be used."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of documents, one per file.")]
    system: System = None
    system_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The system text, from a file of UTF-8 text.")
    ] = None
    glob: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Which files, such as '**/*.md'. Default: .txt and .md, no sub-folders."),
    ] = None
    tenant: TenantName = ""

    def warming(self) -> Warming:
        """What `warm_folder` needs."""
        from kvmosaic.console.warm.folder import Warming

        return Warming(self.folder, self.glob, self.system, self.system_file, self.tenant)
