"""`kvmosaic check --vllm` in a fork, with faults or without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

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
    from kvmosaic.vllm.worker.key_rotation import KeyRotation

    factors = KeyRotation.factors
    KeyRotation.factors = lambda self, old, new, dtype: factors(self, new, old, dtype)


def _shift_nothing() -> None:
    from kvmosaic.vllm.worker.position_shift import PositionShift

    PositionShift.begin = lambda self, shifts: None


def _repair_nothing() -> None:
    from kvmosaic.vllm.worker.extra_forward import Repairer

    Repairer.run = lambda self, repairs, *, compiled=True: 0


def _read_nothing() -> None:
    from kvmosaic.vllm.worker import composing_worker

    composing_worker.document_reader = lambda places, **how: "no layer reads"


FAULTS = {
    "read nothing": _read_nothing,
    "turn back": _turn_back,
    "shift nothing": _shift_nothing,
    "repair nothing": _repair_nothing,
}


def checked(
    model: str,
    *,
    faults: Sequence[str] = (),
    dtype: str = "float32",
    environment: dict[str, str] | None = None,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """What the check found, in a fork of this process."""

    def main(end: Any) -> None:
        from kvmosaic.vllm.check import check_engine
        from kvmosaic.vllm.worker import composing_worker
        from kvmosaic.vllm.worker.self_check import StartCheck

        for fault in faults:
            FAULTS[fault]()
        if faults:
            composing_worker.check_at_start = lambda *arguments: StartCheck("", "")  # would find some of them first
        found = check_engine(model, [*OPTIONS, *options, "--dtype", dtype, "--num-gpu-blocks-override", "64"])
        end.sendall(json.dumps({**asdict(found), "passed": found.passed}).encode() + b"\n")

    fork = Fork(main, environment or {})
    try:
        line = fork.socket.makefile().readline()
        assert line, fork.output()
        return json.loads(line)
    finally:
        fork.stop()
