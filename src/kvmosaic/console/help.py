"""Help texts of commands: tables where the terminal is wide enough, else one option after the other, never cut."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from shutil import get_terminal_size
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

WIDE_COLUMNS = 150
"""Columns from which tables have room for every option."""
_INDENT = " " * 6
_ALL = "kvmosaic.help.all"
_CLAUSE = re.compile(r"[.;:] ")
Function = TypeVar("Function", bound=Callable[..., Any])


class HelpCommand(TyperCommand):
    """A command whose help fits its terminal."""

    def format_help(self, context: Any, formatter: Any) -> None:
        """Writes the help."""
        mode = self.rich_markup_mode
        if get_terminal_size().columns < WIDE_COLUMNS:
            self.rich_markup_mode = None
        try:
            super().format_help(context, formatter)
        finally:
            self.rich_markup_mode = mode

    def format_options(self, context: Any, formatter: Any) -> None:
        """Writes arguments and options under their headings."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(context):
            if (record := parameter.get_help_record(context)) is not None:
                heading = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or heading, []).append(record)
        for panel, records in panels.items():
            if not records:
                continue
            with formatter.section(panel):
                for usage, text in records:
                    formatter.write(_filled(_breakable(usage, formatter.width), "  ", formatter.width))
                    formatter.write(_filled(text, _INDENT, formatter.width))


class ShortHelpCommand(HelpCommand):
    """A command with many options: --help shows the common ones, each in a line or two, and --help-all every one."""

    common: tuple[str, ...] = ()
    """Their names."""

    def format_help(self, context: Any, formatter: Any) -> None:
        """Writes the help."""
        if not context.meta.get(_ALL):
            self.rich_markup_mode = None
        super().format_help(context, formatter)

    def format_options(self, context: Any, formatter: Any) -> None:
        """Writes the arguments and the common options, or all of them under their headings."""
        if context.meta.get(_ALL):
            super().format_options(context, formatter)
            return
        known = {each.opts[0]: each for each in self.get_params(context)}
        arguments = [name for name, each in known.items() if each.param_type_name == "argument"]
        records = []
        for name in (*arguments, *self.common, "--help-all"):
            kind = "" if getattr(known[name], "is_flag", False) else known[name].metavar or ""
            text = _CLAUSE.split(getattr(known[name], "help", None) or "")[0].rstrip(".")
            records.append((f"{name} {kind}", f"{text}."))
        with formatter.section("Options"):
            formatter.write_dl(records)


def show_all(context: typer.Context, value: bool) -> None:
    """What --help-all does."""
    if value and not context.resilient_parsing:
        context.meta[_ALL] = True
        typer.echo(context.get_help(), color=context.color)
        raise typer.Exit


class CommandGroup(typer.Typer):
    """A group of commands whose help fits their terminal."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = HelpCommand, **options: Any
    ) -> Callable[[Function], Function]:
        """Adds a command."""
        return super().command(name, cls=cls, **options)


def _breakable(usage: str, width: int) -> str:
    return usage.replace("|", "| ") if len(usage) > width - 2 else usage


def _filled(text: str, indent: str, width: int) -> str:
    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return "\n".join(lines) + "\n"
