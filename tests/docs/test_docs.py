from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PYTHON = {path: re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL) for path in DOCS}


@pytest.mark.parametrize("path", [path for path, blocks in PYTHON.items() if blocks], ids=lambda path: path.stem)
def test_python_in_the_docs_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text("\n".join(PYTHON[path]))
    runpy.run_path(str(tmp_path / "blocks.py"), run_name="blocks")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_readme_shows_a_line_to_run_at_its_top() -> None:
    top = (ROOT / "README.md").read_text().splitlines()[:25]
    assert any(line.strip().startswith(("make demo", "pip install")) for line in top)


def test_readme_tree_names_every_folder_and_no_other() -> None:
    tree = re.search(r"```text\nsrc/kvmosaic/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert tree is not None
    named = set(re.findall(r"^ {2}(\w+)/", tree[1], re.MULTILINE))
    source = ROOT / "src" / "kvmosaic"
    assert named == {path.name for path in source.iterdir() if path.is_dir() and path.name != "__pycache__"}


def test_list_of_architectures_is_that_of_the_tests() -> None:
    from support.families import FAMILIES

    expected = {
        f"`{about.model_type}`" + ("" if about.is_refused or about.model_type == name else f" ({name})")
        for name, about in FAMILIES.items()
    }
    listed = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "architectures.md").read_text(), re.MULTILINE)
    assert set(listed) == expected
    assert len(listed) == len(FAMILIES)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_nothing_is_left_to_be_filled_in(path: Path) -> None:
    assert "TODO" not in path.read_text()
