"""A function whose name is a question changes nothing: a query is pure, a command has a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/kvmosaic"
QUESTION = re.compile(r"_*(is|are|was|were|has|have|had|can|could|may|must|should|would|does|did|wants|needs|knows)_")
MUTATING = frozenset(
    "add append appendleft clear discard extend extendleft inc insert move_to_end observe pop popitem popleft push put "
    "put_nowait remove setdefault sort submit update".split()
)
HEAP = frozenset(("heappush", "heappop", "heapify", "heapreplace", "heappushpop"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_no_question_changes_state() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name} {what}"
        for path in sorted(SOURCE.rglob("*.py"))
        for name, line, what in changing_questions(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("self.count += 1", "sets self.count"),
        ("self.last = item", "sets self.last"),
        ("self.seen[item] = 1", "sets self.seen[...]"),
        ("self.seen.add(item)", "calls self.seen.add"),
        ("item.flag = True", "sets item.flag"),
        ("del self.seen[item]", "deletes self.seen[...]"),
        ("heapq.heappush(self.queue, item)", "calls heappush"),
        ("self.note(item)", "calls self.note, which changes state"),
        ("self.deeper(item)", "calls self.deeper, which changes state"),
        ("global LAST", "has a global statement"),
        ("record = self.records[item]; record.last = 1", "sets record.last"),
        ("for one in self.items: one.count += 1", "sets one.count"),
    ],
)
def test_changes_are_found(body: str, what: str) -> None:
    text = f"""
class Store:
    def is_known(self, item):
        {body}
        return True

    def note(self, item):
        self.count += 1

    def deeper(self, item):
        return self.note(item)
"""
    assert list(changing_questions(text)) == [("is_known", 3, what)]


def test_local_variables_and_commands_are_free() -> None:
    text = """
class Store:
    def is_known(self, item):
        seen = set()
        seen.add(item)
        count = 0
        count += 1
        with self.lock:
            return item in self.items

    def try_reserve(self, item):
        self.items.add(item)
"""
    assert not list(changing_questions(text))


def changing_questions(text: str) -> Iterator[tuple[str, int, str]]:
    """Yields name, line and the change of each function that is named as a question and changes state."""
    tree = ast.parse(text)
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef | ast.Module):
            functions = {one.name: one for one in owner.body if isinstance(one, Function)}
            for name, function in functions.items():
                if QUESTION.match(name) and (what := change_in(function, functions, (name,))):
                    yield name, function.lineno, what


def change_in(function: Function, siblings: dict[str, Function], path: tuple[str, ...]) -> str:
    """The first change of something that outlives the call; empty if there is none."""
    local = locals_of(function)
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target] if getattr(node, "value", None) is not None else []
        elif isinstance(node, ast.Global | ast.Nonlocal):
            return f"has a {type(node).__name__.lower()} statement"
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if outlives(target, local):
                    return f"deletes {shown(target)}"
        for target in [leaf for each in targets for leaf in leaves(each)]:
            if outlives(target, local):
                return f"sets {shown(target)}"
        if isinstance(node, ast.Call) and (what := change_by(node, local, siblings, path)):
            return what
    return ""


def change_by(call: ast.Call, local: set[str], siblings: dict[str, Function], path: tuple[str, ...]) -> str:
    """The change that a call makes, as far as its name and this file tell."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in HEAP and call.args and outlives(call.args[0], local):
        return f"calls {name}"
    if not isinstance(call.func, ast.Attribute):
        return ""
    receiver = call.func.value
    if isinstance(receiver, ast.Name) and receiver.id == "self":
        other = siblings.get(name)
        if other is not None and name not in path and change_in(other, siblings, (*path, name)):
            return f"calls self.{name}, which changes state"
    elif name in MUTATING and outlives(receiver, local):
        return f"calls {shown(receiver)}.{name}"
    return ""


def locals_of(function: Function) -> set[str]:
    """Names that the function binds itself; what they hold may be changed."""
    bound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound -= {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    for node in ast.walk(function):  # other names for parts of what the function got are not its own
        if isinstance(node, ast.Assign):
            targets, values = list(leaves(node.targets[0])), list(leaves(node.value))
            pairs = zip(targets, values, strict=False) if len(targets) == len(values) else ()
        elif isinstance(node, ast.For):
            pairs = ((target, node.iter) for target in leaves(node.target))
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Name) and isinstance(value, ast.Attribute | ast.Subscript):
                bound.discard(target.id)
    return bound


def leaves(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from leaves(element)
    else:
        yield target


def outlives(target: ast.expr, local: set[str]) -> bool:
    """Whether an attribute, element or object belongs to something that the function got, not made."""
    is_name = isinstance(target, ast.Name)
    while isinstance(target, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
        target = target.func if isinstance(target, ast.Call) else target.value
    if not isinstance(target, ast.Name):
        return False
    return target.id not in local and not (is_name and isinstance(target.ctx, ast.Store))


def shown(target: ast.expr) -> str:
    return f"{ast.unparse(target.value)}[...]" if isinstance(target, ast.Subscript) else ast.unparse(target)
