"""Packages whose names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import kvmosaic

SOURCE = Path(kvmosaic.__file__).parents[1]
PACKAGES = sorted(
    ".".join(path.parent.relative_to(SOURCE).parts)
    for path in SOURCE.rglob("__init__.py")
    if "lazy_names(" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_is_found_and_hidden_by_no_module(name: str) -> None:
    package = import_module(name)
    names = [each for names in package._HOMES.values() for each in names]
    assert set(names) <= set(dir(package))
    assert not set(names) & {path.stem for path in Path(str(package.__file__)).parent.iterdir()}
    for each in names:
        assert getattr(package, each) is getattr(import_module(name), each)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"module '{name}' has no attribute 'nothing_like_it'"):
        _ = import_module(name).nothing_like_it
