from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvmosaic
from kvmosaic.errors import pip_install

ROOT = Path(__file__).parents[1]
HEAVY = "{'torch', 'transformers', 'numpy'} & set(sys.modules)"


def output_of(*command: str, folder: Path | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout


def test_all_is_sorted_and_every_name_leads_somewhere() -> None:
    names = kvmosaic.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    for name in names:
        assert getattr(kvmosaic, name).__name__ == name
    assert set(names) <= set(dir(kvmosaic))


def test_unknown_attribute_is_an_attribute_error() -> None:
    assert not hasattr(kvmosaic, "LargeLanguageModel")


def test_version_is_the_installed_one() -> None:
    assert kvmosaic.__version__ == version("kvmosaic")


def test_import_brings_no_heavy_package() -> None:
    assert output_of(sys.executable, "-c", f"import sys, kvmosaic; print({HEAVY})") == "set()\n"


def test_config_and_prompt_can_be_imported_from_the_top_without_torch() -> None:
    code = "import sys; from kvmosaic import ChunkCacheConfig, Prompt; print('torch' in sys.modules)"
    assert output_of(sys.executable, "-c", code) == "False\n"


def test_constraints_pin_every_dependency() -> None:
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    del extras["vllm"]  # an environment of its own, with constraints-vllm.txt
    wanted = [*project["dependencies"], *(requirement for extra in extras.values() for requirement in extra)]
    names = {re.split(r"[\[=<>;]", requirement)[0] for requirement in wanted if not requirement.startswith("kvmosaic[")}
    assert names - pinned == set()


def build_hook() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_where_there_is_a_compiler_the_extension_is_built() -> None:
    assert (ROOT / build_hook().LIBRARY).exists()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_package_is_built_without_the_extension(tmp_path: Path, compiler: str) -> None:
    hook = build_hook()
    shutil.copytree(ROOT / hook.SOURCES, tmp_path / hook.SOURCES)
    (tmp_path / hook.LIBRARY).write_bytes(b"an old one")
    os.utime(tmp_path / hook.LIBRARY, (0, 0))
    assert hook.build(tmp_path, compiler)
    assert not (tmp_path / hook.LIBRARY).exists()


def test_wheel_holds_the_package_and_its_data(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path))
    output_of(*command, folder=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    ours = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert packed >= {name for name in ours if "__pycache__" not in name}
    assert "kvmosaic/py.typed" in packed
    assert wheel.stat().st_size < 12 * 2**20


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ('{"url": "file:///a%20b/kvmosaic", "dir_info": {"editable": true}}', "-e '/a b/kvmosaic[files]'"),
        ('{"url": "file:///a/k.whl", "archive_info": {}}', "'kvmosaic[files] @ file:///a/k.whl'"),
        (None, "'kvmosaic[files]'"),
    ],
)
def test_the_line_that_adds_an_extra_fits_the_installation(
    said: str | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: said))
    assert pip_install("files") == f"pip install {line}"


EXTRAS = (
    *("bs4", "pypdfium2", "mammoth", "markdownify", "fastapi", "starlette", "uvicorn", "prometheus_client"),
    *("sqlalchemy", "multipart", "llguidance", "psycopg", "opentelemetry", "redis", "obstore", "matplotlib", "gguf"),
    *("xllamacpp", "vllm", "pydantic_settings"),
)
_ALONE = """
import importlib, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
for name in sys.argv[1].split():
    importlib.import_module(f"kvmosaic.{name}")
"""


@pytest.mark.parametrize(
    "modules",
    [
        "cli console.folder lab.capacity.output",
        pytest.param(
            "llm chunks console.answer_output console.warm_folder console.model console.documents.sync console.demo "
            "lab.bench.campaign lab.eval.measure lab.adapt.run",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_commands_without_the_server_need_no_extra(modules: str) -> None:
    command = (sys.executable, "-c", _ALONE, modules, " ".join(EXTRAS))
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
