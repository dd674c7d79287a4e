"""`kvmosaic check --vllm` on real weights in bfloat16: the noise of the model hides no fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.vllm.checking import checked

FAULTS = ("shift nothing", "repair nothing")
PLACES = ("at shared", "repaired", "between")


@pytest.mark.parametrize("faults", [(), FAULTS])
def test_real_weights_pass_and_faults_do_not(model_folder: Path, faults: tuple[str, ...]) -> None:
    found = checked(str(model_folder), faults=faults, dtype="bfloat16")
    wrong = [finding["what"] for finding in found["findings"] if not finding["passed"]]
    expected = PLACES if faults else ()
    assert len(wrong) == len(expected), found["findings"]
    assert all(name in what for name, what in zip(expected, wrong, strict=True)), wrong
    assert found["passed"] == (not faults)
