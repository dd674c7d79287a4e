"""Options: groups of them as one parameter of a command, options made from settings, and those of several commands."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from kvmosaic.config import LLMConfig, Setting, Unset, flag_of, setting_named
from kvmosaic.config.llm import MAX_SECRET_CHARACTERS, MIN_SECRET_CHARACTERS, is_secret_text
from kvmosaic.errors import InvalidConfig
from kvmosaic.layout.strategies import describe_strategies, strategy_names
from kvmosaic.model.formats import model_help

if TYPE_CHECKING:
    from rich.console import Console

    from kvmosaic.console.prompt_source import PromptSource
    from kvmosaic.llm import LLM
    from kvmosaic.sampling import SamplingParams


SECRET_VARIABLE = "KVMOSAIC_CHUNK_SECRET"  # noqa: S105  the name of a variable


def tier_secret() -> str | None:
    """Returns the secret of the tiers from the environment; an argument would be visible to other users.

    Raises:
        InvalidConfig: it cannot be one.
    """
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is not None and not is_secret_text(secret):
        raise InvalidConfig(
            f"the secret in the environment variable {SECRET_VARIABLE} has {len(secret):,} characters; give it "
            f"{MIN_SECRET_CHARACTERS} to {MAX_SECRET_CHARACTERS}, or unset it to have none"
        )
    return secret


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model a command loads, and how."""

    model: str = "reader"
    values: Mapping[str, Any] = field(default_factory=dict)
    """Settings by name, as options give them; the others have their defaults."""

    def config(self) -> LLMConfig:
        """The settings of the model.

        Raises:
            InvalidConfig: one of them cannot work.
        """
        from kvmosaic.tuned_settings import profile_choice

        tiers = tuple(self.values.get("chunk_tier") or ())
        return LLMConfig.from_values(
            {
                **self.values,
                "chunk_tier": tiers,
                "adapter": tuple(self.values.get("adapter") or ()),
                "chunk_secret": tier_secret() if tiers else None,
                "profile": profile_choice(self.values.get("profile", "auto")),
            }
        )

    def changed(self, **values: Any) -> ModelOptions:
        """The same with other values."""
        return ModelOptions(self.model, {**self.values, **values})


def loading_text(model: str) -> str:
    """Returns the message while a model loads; with the size of a file, as loading takes some seconds per GB."""
    try:
        num_bytes = file.stat().st_size if (file := Path(model).expanduser()).is_file() else 0
    except (OSError, ValueError, RuntimeError):  # an invalid file name
        num_bytes = 0
    from kvmosaic.console.text import printable

    size = f", {num_bytes / 1e6:,.1f} MB" if num_bytes else ""
    return printable(f"loading {model}{size}")


def open_llm(opening: ModelOptions, notices: Console) -> LLM:
    """Loads the model; `notices` shows progress.

    Raises:
        KVMosaicError: the model cannot be loaded, or a setting cannot work.
    """
    with notices.status(loading_text(opening.model)), warnings.catch_warnings():
        from kvmosaic.llm import LLM
        from kvmosaic.model import quiet_libraries

        quiet_libraries()
        warnings.filterwarnings("ignore", "the chunk cache is off")  # reported below, in one line
        config = opening.config()
        llm = LLM(opening.model, **config.keywords())
    if llm.model.weights_note:
        notices.print(llm.model.weights_note, style="dim", markup=False, highlight=False)
    if llm.profile is not None:
        notices.print(llm.profile_note, style="dim", markup=False, highlight=False)
    if config.model.enable_chunk_cache and not llm.has_chunk_cache:
        notices.print(f"the chunk cache is off: {llm.chunk_cache_off_reason}", style="yellow", markup=False)
    return llm


def option(name: str, *, panel: str | None = None, has_bounds: bool = True) -> Any:
    """The option of a setting, which has its name as a flag.

    Args:
        name: name of the setting.
        panel: heading under which the help shows it.
        has_bounds: False: what the command builds from it checks the number, with its own message.
    """
    about, flag = setting_named(name), flag_of(name)
    if about.kind is bool:
        return typer.Option(f"{flag}/--no-{flag[2:]}", help=about.flag_help(), rich_help_panel=panel)
    has_parser = about.flag_choices is not None  # other choices are checked where they are used
    return typer.Option(
        flag,
        *([about.flag_alias] if about.flag_alias else []),
        help=about.flag_help(),
        metavar="|".join(about.names()) or about.metavar or None,
        min=about.low if has_bounds else None,
        max=about.high if has_bounds else None,
        parser=(lambda value: choice(about.names, value)) if has_parser else None,
        rich_help_panel=panel,
    )


def option_type(name: str) -> Any:
    """The annotation of a parameter for a setting."""
    return Annotated[_type(setting_named(name)), option(name)]


def option_default(name: str) -> Any:
    """The default of the option of a setting."""
    about = setting_named(name)
    return None if _is_left_out(about) else about.flag_default or about.default


def choice(names: Callable[[], tuple[str, ...]], value: str) -> str:
    """Parses an option whose choices are the names of a dict, at the time of the call."""
    if value not in names():
        raise typer.BadParameter(f"{value!r:.80} is not one of {', '.join(map(repr, names()))}.")
    return value


def _type(about: Setting) -> Any:
    if about.kind is tuple:
        return list[str] | None
    kind = about.kind if about.kind in (int, float, bool) or get_args(about.kind) else str
    return kind | None if _is_left_out(about) else kind


def _is_left_out(about: Setting) -> bool:
    return about.default in (None, ()) or isinstance(about.default, Unset)


Command = TypeVar("Command", bound=Callable[..., None])
MODEL = "model"


@dataclass(frozen=True, slots=True)
class Takes:
    """Annotation of a `ModelOptions` parameter: which settings of the model are options of the command."""

    names: str
    """Names of settings, between spaces."""
    types: Mapping[str, Any] = field(default_factory=dict)
    """Annotations of settings that mean something more special to this command."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults other than those of the settings."""
    is_model_required: bool = False

    def parameters(self) -> list[Parameter]:
        """The argument MODEL and one option per setting."""
        about = typer.Argument(help=model_help())
        model = _parameter(MODEL, Annotated[str, about], MISSING if self.is_model_required else ModelOptions().model)
        return [model, *(self._option(name) for name in self.names.split())]

    def _option(self, name: str) -> Parameter:
        annotation = self.types[name] if name in self.types else option_type(name)
        return _parameter(name, annotation, self.defaults.get(name, option_default(name)))

    def take(self, given: dict[str, Any]) -> ModelOptions:
        """Removes its options from all that were given."""
        model = given.pop(MODEL)
        return ModelOptions(model, {name: given.pop(name) for name in self.names.split()})


def grouped(command: Command) -> Command:
    """Returns the command for Typer, with all options of a group in place of the group.

    A parameter is a group if its type is a dataclass, each field of which is an option or an argument, or
    `Annotated[ModelOptions, Takes(...)]`. So a command has few parameters, and commands share groups.
    """
    hints = get_type_hints(command, include_extras=True)
    takers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        takes = next((part for part in get_args(hint)[1:] if isinstance(part, Takes)), None)
        if takes is not None:
            takers[name] = takes.take
            parameters += takes.parameters()
        elif is_dataclass(hint) and get_origin(hint) is None:
            takers[name] = _taker(hint)
            parameters += _fields(hint)
        else:
            parameters.append(parameter.replace(annotation=hint, kind=Parameter.KEYWORD_ONLY))

    parameters.sort(key=lambda each: each.name != MODEL)  # the first argument of every command

    @wraps(command)
    def run(**given: Any) -> None:
        taken = {name: take(given) for name, take in takers.items()}
        command(**given, **taken)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run  # type: ignore[return-value]


def _taker(group: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda given: group(**{each.name: given.pop(each.name) for each in fields(group)})


def _fields(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_parameter(each.name, hints[each.name], each.default) for each in fields(group)]


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    value = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=annotation)


PromptText = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="A prompt as it is, or see --chunk-separator; - reads standard input."),
]
Documents = Annotated[
    Path | None, typer.Option("--documents", metavar="DIR", help="A folder of documents, one per file.")
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
TenantName = Annotated[
    str,
    typer.Option("--tenant", metavar="NAME", help="Whose prompts, on a server with several tenants. Default: the one."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write JSON, Markdown and plots here.")
]
AsReport = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]
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
        typer.Option(metavar="PATTERN", help="Which files, such as '**/*.md'. Default: all that can be read."),
    ] = None
    tenant: TenantName = ""
