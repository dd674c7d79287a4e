"""Settings for every test: one torch thread, no network, repeatable random examples."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck
from support.examples import register_profiles

_DATA = tempfile.mkdtemp(prefix="kvmosaic-data-")
_PROCESS = os.getpid()


@atexit.register
def _remove_data() -> None:
    """Removes the data folder of this run; a forked child leaves it."""
    if os.getpid() == _PROCESS:
        shutil.rmtree(_DATA, ignore_errors=True)


# Read when torch and tokenizers are first imported, and by the processes that tests start. Two workers with one thread
# each are faster than many threads that wait for each other.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # each server of a test has documents of its own, and none are those of the user who runs the tests
    "KVMOSAIC_DOCUMENTS_DIR": "none",
    "XDG_DATA_HOME": _DATA,
    # what a test changes is seen by the next start
    "KVMOSAIC_CACHE_DIR": "none",
    # GPU kernels run on the CPU; on a machine with a GPU, set it to 0 to run them there
    "TRITON_INTERPRET": "1",
}.items():
    os.environ.setdefault(name, value)

# A shell starts what runs in its background with Ctrl+C ignored, and nohup ignores a closed terminal; processes inherit
# it, and tests send both signals to some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine may take longer to answer than the five seconds of httpx; what hangs is found all the same.
for name, seconds in httpx.Timeout(60).as_dict().items():
    setattr(DEFAULT_TIMEOUT_CONFIG, name, seconds)

# Timing is not what these tests are about: a busy machine must not fail them.
register_profiles(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    **({"derandomize": True, "print_blob": True} if os.environ.get("CI") else {}),
)


@pytest.fixture
def seen_by_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was started before in this process keeps the messages of kvmosaic to itself."""
    monkeypatch.setattr(logging.getLogger("kvmosaic"), "propagate", True)


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there can be one, for tests that make thousands of files."""
    path = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) / f"kvmosaic-test-{os.getpid()}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    yield path
    shutil.rmtree(path)


pytest_plugins = ["support.times"]
