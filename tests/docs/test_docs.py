from __future__ import annotations

import ast
import gc
import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.server import RunningServer

from kvmosaic.eviction import POLICIES
from kvmosaic.layout.strategies import STRATEGIES
from kvmosaic.model.formats import FORMATS

ROOT = Path(__file__).parents[2]
DOCS = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for path in ROOT.glob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
]
BLOCKS = {path: re.findall(r"```(\w*)\n(.*?)```", path.read_text(), re.DOTALL) for path in DOCS}
PYTHON = {path: [text for language, text in blocks if language == "python"] for path, blocks in BLOCKS.items()}
ADDRESS = "http://localhost:8000"
RUN_BY_OTHERS = {"openai.md", "documents.md"}
"""Pages whose code is run, with more looked at, by the tests of the server's parts."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors_of(path: Path) -> set[str]:
    """The names under which the headings of a page can be linked."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(position_strategy=None, repair=None) as running:  # as a reader starts it
        yield running


@pytest.mark.filterwarnings("ignore:documents that are too long")
@pytest.mark.parametrize(
    "path", [path for path, texts in PYTHON.items() if texts and path.name not in RUN_BY_OTHERS], ids=name_of
)
def test_python_in_the_docs_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "\n".join(PYTHON[path])
    if ADDRESS in code:
        code = code.replace(ADDRESS, request.getfixturevalue("server").url)
        monkeypatch.setenv("NO_PROXY", "*")
    (tmp_path / "blocks.py").write_text(code)
    tables = (FORMATS, POLICIES, STRATEGIES)
    known = [set(table) for table in tables]
    try:
        runpy.run_path(str(tmp_path / "blocks.py"), run_name="blocks")
    finally:  # what a page adds, it adds for itself
        for table, before in zip(tables, known, strict=True):
            for added in set(table) - before:
                del table[added]
        gc.collect()  # a cache of a page is a quarter of the memory, and in a cycle


def test_readme_answers_as_it_says(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "README.md").read_text()
    example, said = re.findall(r"```python\n(.*?)```\n\n((?: {4}[^\n]*\n)+)", text, re.DOTALL)[0]
    monkeypatch.setenv("NO_PROXY", "*")
    mine = '{"documents": order, "cache_salt": "mine"}'  # nothing that other tests asked is known
    code = example.replace(ADDRESS, server.url).replace('{"documents": order}', mine)
    (tmp_path / "blocks.py").write_text(code)
    runpy.run_path(str(tmp_path / "blocks.py"))
    printed = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in printed] == [line.strip() for line in said.splitlines()]


def test_code_in_the_docs_can_be_read() -> None:
    shell = []
    for path, blocks in BLOCKS.items():
        for language, text in blocks:
            if language == "python":
                ast.parse(text, name_of(path))
            elif language == "json":
                json.loads(text)
            elif language == "yaml":
                assert yaml.safe_load(text), name_of(path)
            elif language == "sh":
                shell.append(f"{{\n{text}\n}}")
            else:
                assert language in ("", "text"), f"what is in a block of {language} of {name_of(path)}?"
    subprocess.run(["bash", "-n"], input="\n".join(shell), text=True, check=True)


def test_links_lead_to_files_and_headings() -> None:
    faults = []
    for path in DOCS:
        for link, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", path.read_text()):
            target = path.parent / link if link else path
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                faults.append(f"{name_of(path)}: {link}#{anchor}")
    assert faults == []


def test_docs_are_finished_and_name_no_path_of_one_machine() -> None:
    for path in DOCS:
        text = path.read_text()
        assert re.findall(r"(?<![\w.])/(?:work|root|home|tmp|mnt|Users)/\S*", text) == [], name_of(path)
        assert "TODO" not in text, name_of(path)


def test_commands_in_the_docs_have_flags_that_exist() -> None:
    from kvmosaic.server.settings import ServerSettings

    flags = {name.replace("_", "-") for name in ServerSettings.model_fields}
    for path in DOCS:
        for line in re.findall(r"kvmosaic serve .*", path.read_text()):
            named = set(re.findall(r"--([a-z][a-z-]+)", line.split("`")[0]))
            assert {name.removeprefix("no-") for name in named} <= flags | {"help", "help-all"}, (
                f"{name_of(path)}: {line}"
            )


def test_every_page_of_the_docs_is_linked_from_the_readme_or_the_index_of_the_server() -> None:
    linked = set()
    for index in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "server" / "README.md"):
        links = re.findall(r"\]\(([^)#:\s]+)", index.read_text())
        linked |= {(index.parent / link).resolve() for link in links}
    assert [name_of(path) for path in (ROOT / "docs").rglob("*.md") if path not in linked] == []


def test_index_of_the_server_names_the_addresses_that_it_has(server: RunningServer) -> None:
    index = (ROOT / "docs" / "server" / "README.md").read_text()
    named = {
        address for row in re.findall(r"^\| (`/.*?) \|", index, re.MULTILINE) for address in re.findall("`(.*?)`", row)
    }
    routes = set(server.app.openapi()["paths"]) | {"/openapi.json", "/docs", "/"}
    assert named <= routes
    groups = tuple(named - {"/"})
    assert [path for path in routes if not path.startswith((*groups, "/dashboard")) and path != "/"] == []


def test_every_code_of_an_error_is_in_the_page_about_running() -> None:
    from kvmosaic.api import errors

    source = [path for name in ("api", "server", "web") for path in (ROOT / "src" / "kvmosaic" / name).rglob("*.py")]
    codes = {code for path in source for code in re.findall(r'code="(\w+)"|\.full\(.*"(\w+)"\)', path.read_text())}
    codes = {code for pair in codes for code in pair if code} | {row[-1] for row in errors._ROWS if row[-1]}
    text = (ROOT / "docs" / "server" / "running.md").read_text()
    assert {"tenant_queue_full", "body_timeout", "quota_exceeded"} < codes
    assert [code for code in sorted(codes) if f"`{code}`" not in text] == []


def test_readme_shows_a_line_to_run_at_its_top() -> None:
    top = (ROOT / "README.md").read_text().splitlines()[:25]
    for command in ("pip install -c constraints.txt '.[server]' && kvmosaic serve", "make demo", "make test"):
        assert any(line.strip().startswith(command) for line in top), command


def test_tree_of_the_architecture_names_every_folder_and_no_other() -> None:
    page = ROOT / "docs" / "architecture.md"
    tree = re.search(r"```text\nsrc/kvmosaic/\n(.*?)```", page.read_text(), re.DOTALL)
    assert tree is not None
    source = ROOT / "src" / "kvmosaic"
    inside = {path.name for path in source.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(re.findall(r"^ {2}(\w+)/", tree[1], re.MULTILINE)) == inside
    for folder in re.findall(r"^(\w+)/", tree[1], re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_list_of_architectures_is_that_of_the_tests() -> None:
    from support.families import FAMILIES, HYBRIDS

    families = FAMILIES | HYBRIDS

    expected = {
        f"`{about.model_type}`" + ("" if about.model_type == name else f" ({name})") for name, about in families.items()
    }
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "architectures.md").read_text(), re.MULTILINE)
    listed = [label for row in rows for label in row.split(", ")]
    assert set(listed) == expected
    assert len(listed) == len(families)


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1_000
