"""The modules of the server form no circle, and no code reaches through the services of an app."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import kvmosaic.server

ROOT = Path(kvmosaic.server.__file__).parent
MAX_ATTRIBUTES = 2
HANDED_ON = ("services", "sources", "runner")
"""Names of objects that hold several parts of the server."""


def modules() -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(ROOT.parents[1]).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvmosaic.server"):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else node.module


def chains(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields (line, names) of each whole chain of attributes that goes through one of `HANDED_ON`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        line, names, value = node.lineno, list[str](), node
        while isinstance(value, ast.Attribute):
            names.insert(0, value.attr)
            value = value.value  # type: ignore[assignment]
        names.insert(0, value.id if isinstance(value, ast.Name) else "")
        for first in HANDED_ON:
            if first in names:
                yield line, names[names.index(first) :]


def test_modules_form_no_circle() -> None:
    """Packages count as their modules: what `__init__` re-exports is no import of its own."""
    known = modules()
    packages = {name for name, path in known.items() if path.name == "__init__.py"}
    graph = {
        name: set(imported(path, known)) - packages - {name} for name, path in known.items() if name not in packages
    }
    assert len(list(TopologicalSorter(graph).static_order())) >= 40  # raises CycleError for a circle


def test_chain_through_services_has_at_most_two_attributes() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {'.'.join(names)}"
        for path in modules().values()
        for line, names in chains(path)
        if len(names) - 1 > MAX_ATTRIBUTES
    ]
    assert found == []


def test_only_the_app_its_process_and_documents_see_services() -> None:
    allowed = {"__init__.py", "app.py", "launch.py", "model_loader.py", "services.py"}
    known = modules()
    users = {
        str(path.relative_to(ROOT)) for path in known.values() if "kvmosaic.server.services" in imported(path, known)
    }
    assert {user for user in users if not user.startswith("documents/")} <= allowed
