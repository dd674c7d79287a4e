"""A server's documents on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from kvmosaic.console.text import printable, shrinking, size_text


def show_list(documents: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    """Prints documents as a table, or one JSON object per line."""
    if as_json:
        for each in documents:
            typer.echo(json.dumps(each, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("id", no_wrap=True, overflow="ellipsis", ratio=3)
    table.add_column("title", no_wrap=True, overflow="ellipsis", ratio=2)
    for name in ("version", "size", "hits"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("changed", no_wrap=True)
    for each in documents:
        table.add_row(
            shrinking(str(each["id"]) + (" (pinned)" if each.get("pinned") else "")),
            shrinking(str(each.get("title") or "")),
            str(each.get("version", "")),
            size_text(int(each.get("bytes", 0))),
            f"{int(each.get('hits', 0)):,}",
            _time_of(each.get("updated_at")),
        )
    if table.row_count:
        Console().print(table)
    else:
        typer.echo("no documents")


def show_document(document: Mapping[str, Any], as_json: bool) -> None:
    """Prints the text of a document, or all of it as JSON."""
    typer.echo(json.dumps(document, ensure_ascii=False) if as_json else printable(str(document["text"])))


def _time_of(seconds: object) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}" if isinstance(seconds, int) else "–"
