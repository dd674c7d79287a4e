"""Options made from settings, with their help, bounds and choices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, get_args

import typer

from kvmosaic.config import Setting, Unset, flag_of, setting_named


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
        help=about.flag_help(),
        metavar="|".join(about.names()) or about.metavar or None,
        min=about.low if has_bounds else None,
        max=about.high if has_bounds else None,
        parser=partial(choice, about.names) if has_parser else None,
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
