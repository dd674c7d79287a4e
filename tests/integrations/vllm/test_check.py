"""`kvmosaic check --vllm`, as somebody with other hardware would run it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from support.vllm.forking import Fork

OPTIONS = [
    "--max-model-len",
    "512",
    "--block-size",
    "32",
    "--enforce-eager",
    "--max-num-seqs",
    "4",
]


def _turn_back() -> None:
    from kvmosaic.integrations.vllm.worker.key_rotation import KeyRotation

    factors = KeyRotation.factors
    KeyRotation.factors = lambda self, old, new, dtype: factors(self, new, old, dtype)


def _shift_nothing() -> None:
    from kvmosaic.integrations.vllm.worker.position_shift import PositionShift

    PositionShift.begin = lambda self, shifts: None


def _repair_nothing() -> None:
    from kvmosaic.integrations.vllm.worker.extra_forward import Repairer

    Repairer.run = lambda self, repairs, *, compiled=True: 0


FAULTS = {"turn back": _turn_back, "shift nothing": _shift_nothing, "repair nothing": _repair_nothing}


def checked(model: str, *, fault: str = "", dtype: str = "float32") -> dict[str, Any]:
    """What the check found, in a fork of this process."""

    def main(end: Any) -> None:
        from kvmosaic.integrations.vllm.check import check_engine
        from kvmosaic.integrations.vllm.worker import composing_worker
        from kvmosaic.integrations.vllm.worker.self_check import StartCheck

        if fault:
            FAULTS[fault]()
            composing_worker.check_at_start = lambda *arguments: StartCheck("", "")  # would find some of them first
        found = check_engine(model, [*OPTIONS, "--dtype", dtype, "--num-gpu-blocks-override", "64"])
        end.sendall(json.dumps({**asdict(found), "passed": found.passed}).encode() + b"\n")

    fork = Fork(main, {})
    try:
        line = fork.socket.makefile().readline()
        assert line, fork.output()
        return json.loads(line)
    finally:
        fork.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_model_that_can_be_composed_passes(vllm_model, name, dtype):
    found = checked(str(vllm_model(name)), dtype=dtype)
    assert found["passed"], found
    (worker,) = found["workers"]
    assert worker["num_layers"] > 1 and worker["layouts"] and "halves" in worker["rotations"][0]
    assert worker["tested"] == "every layer, and the model as a whole"
    assert found["compiled"] == "NONE, graphs: NONE"
    assert [finding["what"].split()[0] for finding in found["findings"][:4]] == ["keys", "values", "one", "three"]
    compared = found["findings"][4:]
    assert len(compared) == 4
    for finding in compared:
        assert finding["compared_with"].startswith("a dense forward of the same layout"), finding
        assert float(finding["found"]) <= float(finding["allowed"])
        assert dtype == "bfloat16" or float(finding["found"]) < 1e-4


KEYS, MOVED, SHARED = "keys of the first layer, moved by 35", "one moved", "shared positions"
REPAIRED, BETWEEN = "first 8 tokens repaired", "text before and between them"


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ("turn back", {KEYS, MOVED, REPAIRED, BETWEEN}),
        ("shift nothing", {SHARED}),
        ("repair nothing", {REPAIRED, BETWEEN}),
    ],
)
def test_a_fault_does_not_pass(vllm_model, fault, failed):
    found = checked(str(vllm_model("llama")), fault=fault)
    assert not found["passed"]
    wrong = [finding["what"] for finding in found["findings"] if not finding["passed"]]
    assert len(wrong) == len(failed)
    assert all(any(what.endswith(name) for what in wrong) for name in failed), wrong


def test_the_command_exits_with_1(monkeypatch):
    from typer.testing import CliRunner

    from kvmosaic.cli import app
    from kvmosaic.integrations.vllm import check

    bad = check.CheckResult("two documents, one moved", "a dense forward", "0.3", "0.1", passed=False)
    found = check.EngineCheck("0.32.0", "cpu", "m", "float32", 32, "", (), (bad,), "NONE, graphs: NONE")
    monkeypatch.setattr(check, "check_engine", lambda model, options: found)
    result = CliRunner().invoke(app, ["check", "m", "--vllm"])
    assert result.exit_code == 1
    assert "0.3" in result.output and "failed: two documents, one moved" in result.output
