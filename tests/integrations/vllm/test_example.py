"""The example for vLLM's Python `LLM`, as it is."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from support.vllm.forking import Fork

from kvmosaic.assembly import bundled_reader

EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm_offline.py"


def test_the_example_answers_and_moves_its_documents():
    def main(end):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        sys.argv = [str(EXAMPLE), str(bundled_reader())]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        sys.stdout.flush()
        end.sendall(b"done\n")

    fork = Fork(main, {})
    try:
        assert fork.socket.makefile().readline() == "done\n", fork.output()
        said = fork.output()
    finally:
        fork.stop()
    assert "['computed', 'computed']" in said and "['reused', 'partly reused']" in said  # its first tokens are repaired
