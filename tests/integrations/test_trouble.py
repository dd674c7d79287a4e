"""Why a prompt is not repaired inside vLLM."""

from __future__ import annotations

import pytest

from kvmosaic.integrations.vllm.contract import Composition
from kvmosaic.integrations.vllm.operations import WorkerFacts
from kvmosaic.integrations.vllm.scheduler.trouble import why_not_repaired

ABLE = WorkerFacts(can_repair=True, can_shift=True, num_positions=40)


@pytest.mark.parametrize(
    ("composition", "facts", "reason"),
    [
        (Composition(4, (10, 6), "shared", repair=2), [ABLE], ""),
        (Composition(4, (10, 6), "sequential", repair=2, texts=(0, 3)), [ABLE], ""),
        (Composition(4, (10, 6), "shared", repair=2, texts=(3, 0)), [ABLE], ""),
        (Composition(4, (10, 6), "shared", repair=2, texts=(0, 3)), [ABLE], "a text between documents"),
        (Composition(4, (30, 30), "shared", repair=2), [ABLE], "takes 64 positions; the model's rotary table has 40"),
        (Composition(4, (10, 6), "shared", repair=2), [ABLE, WorkerFacts()], "on these workers"),
    ],
)
def test_the_reason_names_what_is_in_the_way(composition: Composition, facts: list[WorkerFacts], reason: str) -> None:
    found = why_not_repaired(composition, composition.layout(range(100)), facts)
    assert reason in found and bool(reason) == bool(found)
