"""The names of vLLM that we use, in every supported release: some cannot be imported, and are read."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from support.vllm.releases import DIFFERENCES, RELEASES, USES, Use
from support.vllm.signatures import Signatures, source_of, version_of

import kvmosaic.vllm as ours

LISTED: dict[str, dict[str, list[str] | None]] = json.loads(Path(__file__).with_name("releases.json").read_text())
"""Written by scripts/vllm_releases.py."""
INSTALLED = Path(sysconfig.get_path("purelib"))
EARLIER = Path(sys.prefix) / "earlier"
GIVEN = os.environ.get("KVMOSAIC_VLLM_SOURCE", "")
"""A wheel or a folder of another release."""
FOLDER = Path(ours.__file__).parent
ELSEWHERE = {"vllm", "vllm.platforms", "vllm.compilation.breakable_cudagraph", "vllm._custom_ops"}
"""Modules that are imported for what all releases have, or where a missing one is handled."""


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def has(use: Use, version: str) -> bool:
    return not use.since or number(use.since) <= number(version)


@pytest.mark.parametrize("version", RELEASES)
def test_every_supported_release_has_what_we_use(version: str) -> None:
    for use in USES:
        found = LISTED[version][use.key]
        assert found == (list(use.members) if has(use, version) else None), use.key
    assert list(LISTED[version]) == [use.key for use in USES]


@pytest.mark.parametrize(
    "place",
    [
        INSTALLED,
        pytest.param(EARLIER, marks=pytest.mark.skipif(not EARLIER.exists(), reason="make test-vllm brings vLLM 0.23")),
        pytest.param(
            Path(GIVEN), marks=pytest.mark.skipif(not GIVEN, reason="KVMOSAIC_VLLM_SOURCE names no wheel or folder")
        ),
    ],
    ids=["installed", "earlier", "given"],
)
def test_a_release_is_as_listed(place: Path) -> None:
    version, signatures = version_of(place), Signatures(source_of(place))
    for use in USES:
        found = signatures.find(use)
        assert found == (list(use.members) if has(use, version) else None), (version, use.key)
        assert version not in LISTED or LISTED[version][use.key] == found


def test_the_installed_release_can_be_imported_by_these_names() -> None:
    for use in USES:
        found: Any = importlib.import_module(f"vllm.{use.module}")
        for name in use.name.split("."):
            found = getattr(found, name)


def imported() -> set[tuple[str, str]]:
    """What our modules import of vLLM: modules and names in them."""
    found = set()
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(str(node.module), alias.name) for alias in node.names}
    return found


def test_every_name_that_we_import_is_listed() -> None:
    listed = {(f"vllm.{use.module}", use.name.split(".")[0]) for use in USES}
    assert {name for name in imported() if name[0] not in ELSEWHERE} <= listed


def test_what_our_connector_overrides_is_listed() -> None:
    tree = ast.parse((FOLDER / "connector.py").read_text())
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ComposingConnector")
    own = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
    listed = {use.name.partition(".")[2] for use in USES}
    assert {name for name in own if not name.startswith("_")} - {"trouble"} <= listed


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: each.what)
def test_each_difference_has_code_that_bridges_it(difference: Any) -> None:
    assert set(difference.by_release) <= set(RELEASES)
    module, _, name = f"{ours.__name__}.{difference.adapter}".rpartition(".")
    assert hasattr(importlib.import_module(module), name)
