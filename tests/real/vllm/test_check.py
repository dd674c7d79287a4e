"""`kvmosaic check --vllm` on real weights in bfloat16: the noise of the model hides no fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.vllm.checking import checked

PLACES = {"": [], "shift nothing": ["at shared"], "repair nothing": ["repaired", "between"]}


@pytest.mark.parametrize("fault", PLACES)
def test_real_weights_pass_and_faults_do_not(model_folder: Path, fault: str) -> None:
    found = checked(str(model_folder), fault=fault, dtype="bfloat16")
    wrong = [finding["what"] for finding in found["findings"] if not finding["passed"]]
    assert len(wrong) == len(PLACES[fault]), found["findings"]
    assert all(name in what for name, what in zip(PLACES[fault], wrong, strict=True)), wrong
    assert found["passed"] == (not fault)
