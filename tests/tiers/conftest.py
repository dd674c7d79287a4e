from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there can be one, for tests that make thousands of files."""
    path = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) / f"kvmosaic-test-{os.getpid()}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    yield path
    shutil.rmtree(path)
