"""Option groups: one parameter of a command for several options; and options made from settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from kvmosaic.config import Setting, Unset, flag_of, setting_named
from kvmosaic.console.model_options import ModelOptions
from kvmosaic.model.formats import model_help


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
