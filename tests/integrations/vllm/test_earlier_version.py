"""Our modules beside the Python code of vLLM 0.23, on which vLLM-Ascend builds; its kernels need another torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EARLIER = Path(sys.prefix) / "earlier"
"""`make test-vllm` puts it there."""

pytestmark = pytest.mark.skipif(not EARLIER.exists(), reason="vLLM 0.23 is not there: make test-vllm brings it")

PROGRAM = """
import importlib, inspect, pkgutil, warnings
warnings.simplefilter("ignore")
import vllm
import kvmosaic.vllm as ours
assert vllm.__version__.startswith("0.23"), vllm.__version__
names = [module.name for module in pkgutil.walk_packages(ours.__path__, ours.__name__ + ".")]
for name in names:
    importlib.import_module(name)
from kvmosaic.vllm.plugin import NAME, register
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
kind = KVConnectorFactory._registry[NAME]()
assert not inspect.isabstract(kind), kind.__abstractmethods__
print(len(names), "modules")
"""


def test_every_module_imports_and_the_connector_is_whole():
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(EARLIER)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert int(found.stdout.split()[-2]) > 20
