"""Options of `kvmosaic serve`, generated from the settings, so that the two cannot differ."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from kvmosaic.server.config_fields import ALIAS, METAVAR, Choices
from kvmosaic.server.read import ARGUMENTS, flag_of, read_settings
from kvmosaic.server.settings import ServerSettings, is_variable_only

_METAVARS: dict[Any, str] = {int: "NUMBER", float: "NUMBER", str: "TEXT", tuple: "TEXT"}


def serve_app(
    launch: Callable[[ServerSettings, Callable[[], ServerSettings]], None],
    command: type[TyperCommand] = TyperCommand,
    show_all: Callable[[typer.Context, bool], None] | None = None,
) -> typer.Typer:
    """Returns a command that reads the settings and passes them to `launch`, with a function that reads them again.

    Values are passed on as they were typed: the settings check them all, in one place, with one kind of message.
    `command` is the class of the command, `show_all` what --help-all calls.
    """

    def serve(**given: Any) -> None:
        """Serve an API like that of OpenAI and Anthropic; each document is computed once.

        kvmosaic serve reader --port 8000

        Each option is also a variable (--max-num-seqs: KVMOSAIC_MAX_NUM_SEQS) and a key of the --config file
        (max_num_seqs). An option wins over a variable, a variable over the file.
        """
        read = partial(read_settings, {name: value for name, value in given.items() if value not in (None, [])})
        launch(read(), read)

    fields = ServerSettings.model_fields.items()
    parameters = [_parameter(name, field) for name, field in fields if not is_variable_only(field)]
    if show_all is not None:
        about = typer.Option("--help-all", is_eager=True, callback=show_all, help="Show every option and exit.")
        parameters.append(
            Parameter("help_all", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[bool | None, about])
        )
    serve.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.command(name="serve", cls=command)(serve)
    return app


def _parameter(name: str, field: FieldInfo) -> Parameter:
    kind: Any = {bool: bool, tuple: list[str]}.get(_kind(field), str)
    if name in ARGUMENTS:
        about: Any = typer.Argument(help=_text(field), show_default=False)
    else:
        flag = flag_of(name)
        about = typer.Option(
            *([f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag, *_aliases(field)]),
            help=_text(field),
            metavar=None if kind is bool else _metavar(field),
            show_default=False,
            rich_help_panel=panel_of(field),
        )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, about])


def _aliases(field: FieldInfo) -> list[str]:
    assert isinstance(field.json_schema_extra, dict)
    return [str(alias)] if (alias := field.json_schema_extra.get(ALIAS)) else []


def panel_of(field: FieldInfo) -> str:
    """Returns the help panel of a setting."""
    assert isinstance(field.json_schema_extra, dict)
    return str(field.json_schema_extra["panel"])


def _kind(field: FieldInfo) -> Any:
    """Returns int, str, bool, tuple, Path, or the values of a choice."""
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    for part in (*field.metadata, *get_args(annotation)):
        if isinstance(part, Choices):
            return part.names()
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    return origin or annotation


def _metavar(field: FieldInfo) -> str:
    kind = _kind(field)
    if isinstance(kind, tuple):
        return "[" + "|".join(kind) + "]"
    assert isinstance(field.json_schema_extra, dict)
    return str(field.json_schema_extra.get(METAVAR) or _METAVARS.get(kind, "FILE"))


def _text(field: FieldInfo) -> str:
    """Returns the description of a setting, with its default unless the description states it."""
    description = field.description or ""
    if field.default in (None, (), "", False):
        return description
    if field.default is True:
        return f"{description} On by default."
    value = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
    return f"{description} Default: {value}."
