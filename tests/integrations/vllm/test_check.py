"""`kvmosaic check --vllm`, as somebody with other hardware would run it."""

from __future__ import annotations

import pytest
from support.vllm.checking import checked


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_model_that_can_be_composed_passes(vllm_model, name, dtype):
    found = checked(str(vllm_model(name)), dtype=dtype)
    assert found["passed"], found
    (worker,) = found["workers"]
    assert worker["num_layers"] > 1 and worker["layouts"] and "halves" in worker["rotations"][0]
    assert worker["tested"] == "every layer, and the model as a whole"
    assert found["compiled"] == "NONE, graphs: NONE"
    assert [finding["what"].split()[0] for finding in found["findings"][:2]] == ["one", "ordinary"]
    compared = found["findings"][2:]
    assert len(compared) == 5
    for finding in compared:
        assert finding["compared_with"].startswith("a dense forward of the same layout"), finding
        assert float(finding["found"]) <= float(finding["allowed"])
        assert dtype == "bfloat16" or float(finding["found"]) < 1e-4


@pytest.mark.parametrize("is_refused", [False, True])
def test_documents_are_read_in_place_where_that_is_chosen(vllm_model, is_refused):
    faults = ("read nothing",) if is_refused else ()
    found = checked(str(vllm_model("llama")), faults=faults, environment={"KVMOSAIC_DOCUMENT_READS": "in-place"})
    *others, finding = found["findings"]
    assert finding["what"] == "documents read in place" and finding["passed"] != is_refused
    assert all(each["passed"] for each in others), "copies are as good"
    assert found["passed"] != is_refused
    (worker,) = found["workers"]
    assert (worker["no_reading"] == "no layer reads") == is_refused
    assert ("copied: no layer reads" in finding["found"]) == is_refused


MOVED, SHARED = "one moved", "shared positions"
REPAIRED, BETWEEN, MET = "first 8 tokens repaired", "text before and between them", "after a companion"


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ("turn back", {MOVED, MET, REPAIRED, BETWEEN}),
        ("shift nothing", {SHARED}),
        ("repair nothing", {REPAIRED, BETWEEN}),
    ],
)
def test_a_fault_does_not_pass(vllm_model, fault, failed):
    found = checked(str(vllm_model("llama")), faults=[fault])
    assert not found["passed"]
    wrong = [finding["what"] for finding in found["findings"] if not finding["passed"]]
    assert len(wrong) == len(failed)
    assert all(any(what.endswith(name) for what in wrong) for name in failed), wrong


def test_the_command_exits_with_1(monkeypatch):
    from typer.testing import CliRunner

    from kvmosaic.cli import app
    from kvmosaic.vllm import check

    bad = check.CheckResult("two documents, one moved", "a dense forward", "0.3", "0.1", passed=False)
    found = check.EngineCheck("0.32.0", "cpu", "m", "float32", 32, "", (), (bad,), "NONE, graphs: NONE")
    monkeypatch.setattr(check, "check_engine", lambda model, options: found)
    result = CliRunner().invoke(app, ["check", "m", "--vllm"])
    assert result.exit_code == 1
    assert "0.3" in result.output and "failed: two documents, one moved" in result.output
