"""Instruction sets of a CPU, and the environment variable that limits them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from kvmosaic.errors import InvalidConfig

VARIABLE = "KVMOSAIC_CPU_ISA"
"""Environment variable with the best instruction set that may be used, as ONEDNN_MAX_CPU_ISA is for oneDNN."""

InstructionSet = Literal["portable", "avx2", "avx512"]
INSTRUCTION_SETS: tuple[InstructionSet, ...] = ("portable", "avx2", "avx512")
"""The worst one first. portable: what a compiler makes of plain C; avx512 includes AVX512-BF16."""


def allowed_instruction_sets(environment: Mapping[str, str] = os.environ) -> tuple[InstructionSet, ...]:
    """Returns the instruction sets that the environment allows, worst first; the CPU may lack some of them.

    Raises:
        InvalidConfig: the variable has an unknown value.
    """
    limit = environment.get(VARIABLE, "").strip().lower() or "auto"
    for count, name in enumerate(INSTRUCTION_SETS, start=1):
        if limit == name:
            return INSTRUCTION_SETS[:count]
    if limit != "auto":
        raise InvalidConfig(
            f"{VARIABLE} is {environment[VARIABLE]!r:.100}; choose {', '.join(INSTRUCTION_SETS)}, or auto for the best "
            "that this CPU has"
        )
    return INSTRUCTION_SETS
