"""`kvmosaic check --vllm`, as somebody with other hardware would run it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from support.vllm.forking import Fork

OPTIONS = [
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--block-size",
    "32",
    "--enforce-eager",
    "--max-num-seqs",
    "4",
]


def checked(model: str, *, turn_wrongly: bool = False) -> dict[str, Any]:
    """What the check found, in a fork of this process."""

    def main(end: Any) -> None:
        from kvmosaic.integrations.vllm.check import check_engine
        from kvmosaic.integrations.vllm.worker import composing_worker
        from kvmosaic.integrations.vllm.worker.key_rotation import KeyRotation

        if turn_wrongly:
            factors = KeyRotation.factors
            KeyRotation.factors = lambda self, old, new, dtype: factors(self, new, old, dtype)
            composing_worker.check = lambda *arguments: ""  # would find it first
        found = check_engine(model, [*OPTIONS, "--num-gpu-blocks-override", "64"])
        end.sendall(json.dumps({**asdict(found), "passed": found.passed}).encode() + b"\n")

    fork = Fork(main, {})
    try:
        line = fork.socket.makefile().readline()
        assert line, fork.output()
        return json.loads(line)
    finally:
        fork.stop()


@pytest.mark.parametrize("name", ["llama"])
def test_a_model_that_can_be_composed_passes(vllm_model, name):
    found = checked(str(vllm_model(name)))
    assert found["passed"], found
    (worker,) = found["workers"]
    assert worker["num_layers"] > 1 and worker["layouts"] and "halves" in worker["rotations"][0]
    assert [finding["what"].split()[0] for finding in found["findings"][:3]] == ["keys", "values", "one"]
    assert sum(finding["found"] == "composed" for finding in found["findings"]) == 4


def test_keys_turned_wrongly_do_not_pass(vllm_model):
    found = checked(str(vllm_model("llama")), turn_wrongly=True)
    assert not found["passed"]
    keys, values = found["findings"][:2]
    assert not keys["passed"] and values["passed"]
