"""Packages for a machine that has no network: downloads wheels for it, and packs them into pieces with one installer.

    python scripts/offline_bundle.py --present present.txt --python 3.12 --out bundle vllm==0.25.1 blake3 hatchling
    …                                       carry bundle/* over, in as many parts as it takes; there:
    sh bundle/install.sh [FOLDER]           joins, checks and installs the pieces; prints what PYTHONPATH needs

What is present there is not packed: `present.txt` is what `pip list --format=freeze` prints on that machine. Packages
of `--without`, and files of `--drop`, are left out with what only they need. By default that is what vLLM never loads
for text. What a program really imports:

    python scripts/offline_bundle.py --imports python -m benchmarks.gpu --dry-run

Name a package beside the others to hold it to a version, where pip would have to look for one that fits. Wheels are
stored uncompressed and packed together by xz, which makes vLLM half as large as its wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.progress import Progress

MIB = 2**20
PLATFORMS = ("manylinux_2_39", "manylinux_2_35", "manylinux_2_34", "manylinux_2_31", "manylinux_2_28", "manylinux_2_27")
PLATFORMS += ("manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
NOT_FOR_TEXT = """
    anthropic compressed-tensors cryptography depyf diskcache fastsafetensors flashinfer-cubin flashinfer-python gguf
    grpcio humming-kernels ijson lark lm-format-enforcer mcp mistral-common nixl numba nvidia-cudnn-frontend
    nvidia-cutlass-dsl nvtx opencv-python-headless opentelemetry-api opentelemetry-exporter-otlp opentelemetry-sdk
    opentelemetry-semantic-conventions-ai outlines-core pynvvideocodec quack-kernels redis sentencepiece tilelang
    tokenspeed-mla torchaudio torchcodec torchvision
"""
"""What vLLM asks for and its engine and server never import for a text model."""
NOT_ON_HOPPER = ("vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/vllm-rs", "vllm/third_party/fmha_sm100/*", "*.jpg", "*.map")
_PRINTS_IMPORTS = """
import atexit, os, sys
@atexit.register
def _write():
    with open(os.environ["IMPORTS_FILE"], "a") as file:
        file.writelines(f"{name}\\n" for name in {name.partition(".")[0] for name in list(sys.modules)})
"""
INSTALL = r"""#!/bin/sh
# Joins, checks and installs the pieces beside this file. Usage: sh install.sh [FOLDER]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
site=${1:-$here/site} python=${PYTHON:-python3}
cd "$here"
sha256sum --quiet --check pieces.sha256
mkdir -p wheels "$site"
cat piece-* | $python -c 'import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall("wheels", filter="data")'
$python -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" wheels/*.whl
rm -r wheels
echo "export PYTHONPATH=$site\${PYTHONPATH:+:\$PYTHONPATH}"
"""


def imported(command: Sequence[str]) -> int:
    """Runs a command, and prints the packages that it and its children have imported."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_PRINTS_IMPORTS)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "IMPORTS_FILE": f"{folder}/names"}
        code = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603
        names = set((Path(folder) / "names").read_text().split())
    known = packages_distributions()
    print(*sorted({canonicalize_name(each) for name in names for each in known.get(name, ())}), sep="\n")
    return code


def versions(text: str) -> dict[str, str]:
    """Package names of lines such as `name==version` or `name`, with their versions or ""."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.replace(" @ ", "==").partition("==") for line in lines if line)
    return {canonicalize_name(name): version for name, _, version in pairs}


class Download:
    """The wheels of some requirements and of all they need, for another Python."""

    def __init__(self, folder: Path, python: str, present: dict[str, str], without: set[str]) -> None:
        self.folder, self.python, self.present, self.without = folder, python, present, without
        self.warnings: list[str] = []
        self._wanted: dict[str, SpecifierSet] = {}
        self._pins: dict[str, SpecifierSet] = {}
        self._extras: dict[str, set[str]] = {}
        self._environment = {
            "python_version": python,
            "python_full_version": f"{python}.0",
            **{"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"},
            **{"implementation_name": "cpython", "platform_python_implementation": "CPython"},
        }

    def fetch(self, requirements: Sequence[str]) -> None:
        """Downloads; a package that two others want is downloaded again if the second wants another version."""
        waiting = [Requirement(each) for each in requirements]
        self._pins = {canonicalize_name(each.name): each.specifier for each in waiting}
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("downloading", total=None)
            while waiting:
                wanted = waiting.pop()
                name = canonicalize_name(wanted.name)
                progress.update(task, description=f"{len(self._wanted)} packages, {name}")
                if name in self.present:
                    version = self.present[name]
                    if version and not wanted.specifier.contains(version, prereleases=True):
                        self.warnings.append(f"{wanted} is wanted, {version} is present")
                elif name not in self.without:
                    waiting += self._add(name, wanted)

    def _add(self, name: str, wanted: Requirement) -> Iterator[Requirement]:
        before, extras = self._wanted.get(name), self._extras.setdefault(name, set())
        specifier = wanted.specifier & (self._pins.get(name, SpecifierSet()) if before is None else before)
        if before is not None and wanted.extras <= extras:
            found = self._wheel(name)
            if found is not None and specifier.contains(found.name.split("-")[1], prereleases=True):
                self._wanted[name] = specifier
                return
        self._wanted[name] = specifier
        extras |= wanted.extras
        if (old := self._wheel(name)) is not None:
            old.unlink()
        platforms = [f"--platform={each}_x86_64" for each in PLATFORMS]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={self.python}", *platforms]
        subprocess.run([*command, "--dest", self.folder, f"{name}{specifier}"], check=True)  # noqa: S603
        wheel = self._wheel(name)
        assert wheel is not None, f"pip has downloaded {name}"
        with zipfile.ZipFile(wheel) as files:
            text = next(files.read(each) for each in files.namelist() if each.endswith(".dist-info/METADATA"))
        for needed in Metadata.from_email(text, validate=False).requires_dist or ():
            environments = ({**self._environment, "extra": extra} for extra in ("", *extras))
            if needed.marker is None or any(map(needed.marker.evaluate, environments)):
                yield needed

    def _wheel(self, name: str) -> Path | None:
        return next(
            (path for path in self.folder.glob("*.whl") if canonicalize_name(path.name.split("-")[0]) == name), None
        )


def pack(wheels: Path, out: Path, piece_bytes: int, drop: Sequence[str]) -> list[Path]:
    """Writes the wheels as pieces, their hashes and the installer into a folder that holds nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    packed = out / "packed"
    paths = sorted(wheels.glob("*.whl"))
    with (
        lzma.open(packed, "wb", preset=6) as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
        tempfile.TemporaryDirectory() as folder,
        Progress(console=Console(stderr=True)) as progress,
    ):
        for path in progress.track(paths, description="packing"):
            stored = Path(folder) / path.name
            with zipfile.ZipFile(path) as source, zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as target:
                for entry in source.infolist():
                    if not any(fnmatch(entry.filename, pattern) for pattern in drop):
                        target.writestr(entry, source.read(entry), zipfile.ZIP_STORED)
            archive.add(stored, path.name)
            stored.unlink()
    pieces: list[Path] = []
    with packed.open("rb") as stream:
        while part := stream.read(piece_bytes):
            pieces.append(out / f"piece-{len(pieces):03}")
            pieces[-1].write_bytes(part)
    packed.unlink()
    sums = [f"{hashlib.sha256(piece.read_bytes()).hexdigest()}  {piece.name}\n" for piece in pieces]
    (out / "pieces.sha256").write_text("".join(sums))
    (out / "packages.json").write_text(json.dumps([path.name for path in paths], indent=1) + "\n")
    (out / "install.sh").write_text(INSTALL)
    return pieces


def main() -> int:
    """The command."""
    if sys.argv[1:2] == ["--imports"]:
        return imported(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="+")
    parser.add_argument("--present", type=Path, help="packages of that machine, as name==version or name")
    parser.add_argument("--python", default="3.12", help="its version of Python")
    parser.add_argument("--out", type=Path, default=Path("bundle"))
    parser.add_argument("--wheels", type=Path, help="a folder that keeps the wheels for the next call")
    parser.add_argument("--piece-mib", type=float, default=60.0)
    parser.add_argument("--without", default=NOT_FOR_TEXT, help="packages to leave out")
    parser.add_argument("--drop", nargs="*", default=NOT_ON_HOPPER, help="patterns of files inside wheels to leave out")
    given = parser.parse_args()
    present = versions(given.present.read_text()) if given.present else {}
    with tempfile.TemporaryDirectory() as folder:
        wheels = given.wheels or Path(folder)
        wheels.mkdir(parents=True, exist_ok=True)
        download = Download(wheels, given.python, present, {canonicalize_name(each) for each in given.without.split()})
        download.fetch(given.requirements)
        pieces = pack(wheels, given.out, round(given.piece_mib * MIB), given.drop)
    print(*download.warnings, sep="\n")
    total = sum(piece.stat().st_size for piece in pieces)
    print(f"{len(pieces)} pieces, {total / MIB:.0f} MiB in {given.out}; there: sh {given.out.name}/install.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
