"""What tests need beside Python packages: programs, and our C extension."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvmosaic.attention.native import LIBRARY

needs_extension = pytest.mark.skipif(not LIBRARY.exists(), reason="the C extension is not built")


def installed(package: str, *names: str, folders: str = "") -> str:
    """The path of a program by any of its names, also where a pattern finds folders; without it a test is skipped.

    In CI, which installs them all, it fails instead.
    """
    found = [path for name in names if (path := shutil.which(name))]
    found += [str(path) for name in names if folders for path in sorted(Path("/").glob(f"{folders}/{name}"))]
    if not found:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{names[0]} is not installed (Debian: {package})")
    return found[-1]


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem"))
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    command = (installed("openssl", "openssl"), "req", "-x509", *curve, "-nodes", "-days", "2", *names, *files)
    subprocess.run(command, check=True, capture_output=True)
    return folder / "certificate.pem", folder / "key.pem"
