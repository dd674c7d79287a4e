from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
BLOCKS = [
    pytest.param(block, id=f"{path.stem}-{index}")
    for path in DOCS
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_in_the_docs_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block)
    runpy.run_path(str(tmp_path / "block.py"), run_name="block")


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
