"""What tests need beside Python packages: programs, and our C extension."""

from __future__ import annotations

import os
import shutil
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
