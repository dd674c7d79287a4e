"""Signatures of a vLLM release, read from its source: a folder, or a wheel, neither of which is imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from support.vllm.releases import Use

Source = Callable[[str], str | None]
"""Text of a file of the release, by its path (`vllm/v1/request.py`); None: there is no such file."""


def source_of(place: Path) -> Source:
    """The source of a release: a folder that has `vllm/`, or a wheel."""
    if place.is_dir():
        return lambda path: (place / path).read_text() if (place / path).is_file() else None
    archive = zipfile.ZipFile(place)
    names = frozenset(archive.namelist())
    return lambda path: archive.read(path).decode() if path in names else None


def version_of(place: Path) -> str:
    """Release of that source, from `vllm/_version.py`."""
    text = source_of(place)("vllm/_version.py") or ""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if {"version", "__version__"} & set(names):
                return str(node.value.value).split("+")[0]
    raise LookupError(f"{place} names no version")


class Signatures:
    """Names of one release, looked up in its files; re-exports and base classes are followed."""

    def __init__(self, source: Source) -> None:
        self._text = source
        self._tree = cache(self._parse)

    def find(self, use: Use) -> list[str] | None:
        """Which of its members exist; None: the name itself does not."""
        owner, _, member = use.name.partition(".")
        found = self._definition(f"vllm.{use.module}", owner)
        if found is None:
            return None
        module, node = found
        if member:
            node = self._member(module, node, member)
        if node is None:
            return None
        existing = self._attributes(module, node) if isinstance(node, ast.ClassDef) else _parameters(node)
        return [name for name in use.members if name in existing]

    def _parse(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        text = self._text(f"{path}.py")
        if text is None:
            text = self._text(f"{path}/__init__.py")
        return None if text is None else ast.parse(text)

    def _definition(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        tree = self._tree(module)
        if tree is None:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return module, node
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) in (name, "*") and (origin := self._origin(module, node)) != module:
                        found = self._definition(origin, name if alias.name == "*" else alias.name)
                        if found is not None:
                            return found
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self._text(f"{module.replace('.', '/')}.py") is None
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *filter(None, [node.module])])

    def _bases(self, module: str, node: ast.ClassDef) -> Iterable[tuple[str, ast.ClassDef]]:
        yield module, node
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self._definition(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef) and found[1] is not node:
                yield from self._bases(found[0], found[1])

    def _member(self, module: str, node: ast.AST, name: str) -> ast.AST | None:
        if not isinstance(node, ast.ClassDef):
            return None
        for _, kind in self._bases(module, node):
            for each in kind.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name:
                    return each
        return None

    def _attributes(self, module: str, node: ast.ClassDef) -> set[str]:
        """Methods, fields of a dataclass, and what its methods assign to `self`."""
        found: set[str] = set()
        for _, kind in self._bases(module, node):
            for each in kind.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(each.name)
                elif isinstance(each, ast.AnnAssign | ast.Assign):
                    targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                    found |= {target.id for target in targets if isinstance(target, ast.Name)}
            for each in ast.walk(kind):
                is_set = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                if is_set and isinstance(each.value, ast.Name) and each.value.id == "self":
                    found.add(each.attr)
        return found


def _parameters(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    arguments = node.args
    return {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
