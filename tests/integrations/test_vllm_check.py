from __future__ import annotations

import importlib.util
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvmosaic.cli import app
from kvmosaic.errors import pip_install
from kvmosaic.vllm.check import (
    CheckResult,
    EngineCheck,
    WorkerDiagnostics,
    engine_table,
    finding_table,
    reading_findings,
    verdict,
    worker_table,
)

WORKER = WorkerDiagnostics(
    "0.1", "npu:1", 2, ("2 x ascend, blocks of 128",), ("2 x 64 of 64",), "", "no [metadata] here", ""
)
GOOD = CheckResult("keys", "computed there", "1e-07", "1e-06", True)
CHECK = EngineCheck("0.23.0", "npu", "models/m", "bfloat16", 128, "", (WORKER,), (GOOD,))


def printed(check: EngineCheck) -> str:
    console = Console(width=120, record=True, file=StringIO())
    for part in (engine_table(check), worker_table(check), finding_table(check), verdict(check)):
        console.print(part)
    return console.export_text()


def test_everything_that_was_found_is_printed() -> None:
    text = printed(CHECK)
    for said in (
        "0.23.0 on npu",
        "models/m in bfloat16",
        "0.1 on npu:1, 2 layers",
        "2 x ascend, blocks of 128",
        "1e-07",
    ):
        assert said in text
    assert "no: no [metadata] here" in text, "brackets are no markup"
    assert text.rstrip().endswith("passed: documents are composed here.")


def test_trouble_a_failed_test_and_no_test_fail() -> None:
    bad = replace(CHECK, findings=(GOOD, replace(GOOD, what="values", passed=False)))
    assert CHECK.passed and not bad.passed
    assert "failed: values." in printed(bad)
    trouble = replace(CHECK, trouble="the cache is fp8", findings=())
    assert not trouble.passed and "failed: the cache is fp8." in printed(trouble)
    assert not replace(CHECK, findings=()).passed


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="there is a vLLM here")
def test_without_vllm_it_says_what_to_install() -> None:
    result = CliRunner().invoke(app, ["check", "--vllm", "some/model"])
    assert result.exit_code == 2
    assert pip_install("vllm") in " ".join(result.output.split())


def test_options_of_vllm_need_vllm() -> None:
    result = CliRunner().invoke(app, ["check", "reader", "--", "--tensor-parallel-size", "2"])
    assert result.exit_code == 2
    assert "say --vllm as well" in result.output


@pytest.mark.parametrize(
    ("counts", "reason", "passed"),
    [
        ([None], "", []),
        ([None, None], "its graphs are full", [False]),
        ([3, 2], "", [True]),
        ([3, 0], "", [False]),
    ],
)
def test_where_reading_in_place_is_chosen_it_must_happen(counts: list[Any], reason: str, passed: list[bool]) -> None:
    workers = [replace(WORKER, no_reading=reason) for _ in counts]
    found = reading_findings(workers, counts)
    assert [each.passed for each in found] == passed
    assert not reason or reason in found[0].found
    if reason:
        assert f"no: {reason}" in printed(replace(CHECK, workers=tuple(workers)))
