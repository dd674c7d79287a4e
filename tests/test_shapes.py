"""Shapes are types: public tensor functions say the shapes of their tensors, and real calls keep to them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/kvmosaic"
PACKAGES = ("attention", "rope", "memory", "layers")
KINDS = frozenset(("Bool", "Float", "Int", "Num", "Shaped", "UInt8"))
CHECKED = (
    *("kvmosaic.attention", "kvmosaic.rope", "kvmosaic.memory", "kvmosaic.layers"),
    "beartype.beartype",
)
RIGHT_SHAPES = (
    "tests/attention/test_reads.py",
    "tests/attention/test_bias.py",
    "tests/rope",
    "tests/memory",
    "tests/parity/test_biases.py::test_blind_chunks_moved_behind_each_other_equal_unmodified_transformers",
    "tests/parity/test_biases.py::test_plain_prompts_give_the_tokens_of_transformers_generate",
    "tests/parity/test_promises.py::test_dense_cold_and_warm_agree_in_float64",
)
"""Tests that call the functions as they are meant to be called; others pass wrong shapes on purpose."""


def modules(package: str) -> list[Path]:
    return sorted((*SOURCE.glob(f"{package}.py"), *(SOURCE / package).rglob("*.py")))


def test_public_tensor_functions_carry_shapes() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for package in PACKAGES
        for path in modules(package)
        for name, line in without_shapes(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_what_lacks_a_shape_is_found() -> None:
    text = "\n".join(
        (
            "def good(x: Float[Tensor, 'R H'], y: Int[Tensor, ' R'] | None) -> tuple[Float[Tensor, 'R'], int]: ...",
            "def bad(x: Tensor) -> int: ...",
            "def worse(x: int) -> tuple[Tensor, Tensor]: ...",
            "def _private(x: Tensor) -> Tensor: ...",
            "class Open:",
            "    field: Tensor | None",
            "    _own: Tensor",
            "    def method(self, x: list[Tensor]) -> None: ...",
            "class _Closed:",
            "    def method(self, x: Tensor) -> None: ...",
        )
    )
    assert [name for name, _ in without_shapes(text)] == ["bad", "worse", "field", "method"]


def test_real_calls_keep_to_the_shapes() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not alone and not real")
    hook = "--jaxtyping-packages=" + ",".join(CHECKED)
    random = "-Wignore::hypothesis.errors.HypothesisDeprecationWarning"  # beartype looks at a random item of a list
    result = subprocess.run(
        (*command, hook, random, *RIGHT_SHAPES), cwd=ROOT, capture_output=True, text=True, timeout=1_800
    )
    assert result.returncode == 0, result.stdout[-4_000:]


def test_wrong_shapes_are_noticed() -> None:
    code = (
        "from jaxtyping import install_import_hook\n"
        f"with install_import_hook({list(CHECKED[:-1])!r}, {CHECKED[-1]!r}):\n"
        "    from kvmosaic.attention import merge_partials\n"
        "import torch\n"
        "merge_partials(torch.zeros(3, 2, 4), torch.zeros(3, 5), torch.zeros(3).long(), 1)\n"
    )
    result = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)
    assert result.returncode == 1 and "TypeCheckError" in result.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_there_is_something_to_check(package: str) -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in modules(package))
    assert any(f"{kind}[Tensor" in texts for kind in KINDS)


def without_shapes(text: str) -> Iterator[tuple[str, int]]:
    """Yields public functions and fields of a module that mention a tensor without its shape."""
    yield from bare_names(ast.parse(text).body)


def bare_names(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from bare_names(node.body)
        elif isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__call__"):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if any(map(is_bare, [argument.annotation for argument in arguments] + [node.returns])):
                yield node.name, node.lineno
        elif isinstance(node, ast.AnnAssign) and is_bare(node.annotation):
            name = ast.unparse(node.target)
            if not name.startswith("_"):
                yield name, node.lineno


def is_bare(annotation: ast.expr | None) -> bool:
    """Whether an annotation has a `Tensor` outside `Float[Tensor, "..."]` and its like."""
    if annotation is None:
        return False
    if (
        isinstance(annotation, ast.Subscript)
        and isinstance(annotation.value, ast.Name)
        and annotation.value.id in KINDS
    ):
        return False
    if isinstance(annotation, ast.Name):
        return annotation.id == "Tensor"
    return any(is_bare(child) for child in ast.iter_child_nodes(annotation) if isinstance(child, ast.expr))
