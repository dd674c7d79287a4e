"""Terminal view of the prefix tree of a running server's cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from kvmosaic.console.cache.list import age_text
from kvmosaic.console.server_call import fields_of_server, no_kvmosaic
from kvmosaic.console.text import one_line

PATH = "/v1/cache/tree"
MAX_TREE_BYTES = 2**23
MAX_TEXT_CHARACTERS = 60
Fields = Mapping[str, Any]


def show_tree(url: str, limits: Mapping[str, int], timeout: float, as_json: bool) -> None:
    """Prints the cache tree of a server.

    Raises:
        KVMosaicError: it cannot be reached, or refuses.
    """
    query = "&".join(f"{name}={value}" for name, value in limits.items())
    fields = fields_of_server(url, f"{PATH}?{query}", timeout, method="GET", max_bytes=MAX_TREE_BYTES)
    if not isinstance(fields.get("systems"), list):
        raise no_kvmosaic(url)
    if as_json:
        print(json.dumps(fields))
        return
    console = Console()
    try:
        trees = [_system_tree(system) for system in fields["systems"]]
        hidden = _hidden(fields["num_hidden"], "system text", "system texts")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise no_kvmosaic(url) from error
    if not trees:
        console.print("nothing is cached", style="dim")
    for tree in trees:
        console.print(tree)
    if hidden:
        console.print(hidden)


def _system_tree(system: Fields) -> Tree:
    """Returns a system text with its documents and the conversations after them."""
    if system["num_tokens"]:
        head = _line("system", _said(system), _counted(system["num_tokens"], "token"))
    else:
        head = Text("from the beginning", style="bold")
    if system["tenant"] not in ("", "default"):
        head.append(f"  tenant {one_line(system['tenant'])}", style="dim")
    if system["is_salted"]:
        head.append("  salted", style="dim")
    tree = Tree(head, guide_style="dim")
    for document in system["documents"]:
        tree.add(_document_line(document))
    if hidden := _hidden(system["num_hidden_documents"], "document", "documents"):
        tree.add(hidden)
    for place in system["places"]:
        branch = tree
        if place["documents"]:
            names = one_line(", ".join(place["documents"]), MAX_TEXT_CHARACTERS)
            branch = tree.add(Text.assemble(("conversations", "bold"), " over ", (names, "cyan")))
        elif system["num_tokens"]:
            branch = tree.add(Text("conversations without documents", style="bold"))
        _add_runs(branch, place["runs"], place["num_hidden"])
    if hidden := _hidden(system["num_hidden_places"], "set of documents", "sets of documents"):
        tree.add(hidden)
    return tree


def _add_runs(tree: Tree, runs: list[Fields], num_hidden: int) -> None:
    for run in runs:
        numbers = f"{_counted(run['num_tokens'], 'token')}, {_counted(run['num_blocks'], 'block')}"
        _add_runs(tree.add(_line("", _said(run), numbers, run)), run["children"], run["num_hidden"])
    if hidden := _hidden(num_hidden, "run", "runs"):
        tree.add(hidden)


def _document_line(document: Fields) -> Text:
    numbers = f"{_counted(document['num_tokens'], 'token')}, {_counted(document['num_blocks'], 'block')}"
    states = [
        word for word, is_so in (("pinned", document["pinned"]), ("computing", not document["is_ready"])) if is_so
    ]
    return _line("document", document["name"], ", ".join([numbers, *states]), document)


def _line(kind: str, said: str | None, numbers: str, used: Fields | None = None) -> Text:
    """Returns a line: kind, text or name, and numbers."""
    line = Text(f"{kind} " if kind else "", style="bold" if kind == "system" else "")
    if said:
        line.append(one_line(said, MAX_TEXT_CHARACTERS), style="cyan")
    line.append(f"  {numbers}", style="none")
    if used is not None:
        line.append(f", {_times(used['hits'])}")
        if used["users"]:
            line.append(f", read by {used['users']:,}", style="green")
        else:
            line.append(f", idle {age_text(used['idle_seconds'])}", style="dim")
    return line


def _said(fields: Fields) -> str | None:
    """Returns the text of the first tokens, or their ids if they were not decoded."""
    if fields["text"] is not None:
        return str(fields["text"])
    return " ".join(map(str, fields["token_ids"])) or None


def _hidden(count: int, one: str, many: str) -> Text | None:
    return Text(f"… {count:,} more {one if count == 1 else many}", style="dim") if count else None


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _times(count: int) -> str:
    return {0: "never found", 1: "found once", 2: "found twice"}.get(count, f"found {count:,} times")
