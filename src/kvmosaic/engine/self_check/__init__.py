"""Findings and result of a self-check, how a pass is kept for the next start, and the text that it reads."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvmosaic.container import compute_threads, cpu_flags, this_machine
from kvmosaic.kept import keep, kept_folder

_VARIABLES = ("ATEN_CPU_CAPABILITY", "KVMOSAIC_CPU_ISA", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison: its largest difference, and the limit."""

    subject: str
    """What was compared: "rotation", "attention", …"""
    reference: str
    """What it was compared with."""
    difference: float
    limit: float
    where: str = ""
    """Location of the largest difference, such as "layer 3"."""

    @property
    def passed(self) -> bool:
        """Whether the difference is within the limit; NaN never is."""
        return self.difference <= self.limit

    def __str__(self) -> str:
        place = f" of {self.where}" if self.where else ""
        numbers = f"by {self.difference:.2g} (allowed: {self.limit:.2g})"
        return f"{self.subject}{place} differs from {self.reference} {numbers}"


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The result of a self-check."""

    findings: tuple[Comparison, ...]
    is_moved: bool
    """Whether the composed prompts had moved documents (not for models whose keys cannot be moved)."""
    error: str = ""
    """Why the check could not be finished, if so."""
    note: str = ""
    """What a reader should know beside it; empty if there is nothing."""

    @property
    def passed(self) -> bool:
        """Whether every difference is within its limit."""
        return not self.error and all(finding.passed for finding in self.findings)

    @property
    def reason(self) -> str:
        """Why it failed, as text; empty when it passed."""
        if self.error:
            return self.error
        return next((str(finding) for finding in self.findings if not finding.passed), "")


def kept_check(check: Callable[[], SelfCheck], *about: str) -> SelfCheck:
    """What `check` finds, or found when it passed with the same code, processor, threads and `about`."""
    package = Path(__file__).parents[2]
    code = b"".join(path.read_bytes() for path in sorted(package.rglob("*")) if path.suffix in (".py", ".c", ".h"))
    torch = getattr(sys.modules.get("torch"), "__version__", "")  # llama.cpp needs none
    machine = [platform.node(), platform.machine(), *sorted(cpu_flags()), compute_threads(this_machine()), torch]
    settings = [*map(os.environ.get, _VARIABLES), *about]
    folder = kept_folder("checks", code, *(str(each).encode() for each in (machine, *settings)))
    if folder is not None:
        with suppress(Exception):  # there is none, or it is damaged
            told = json.loads((folder / "verdict.json").read_text())
            found = SelfCheck(tuple(Comparison(**each) for each in told.pop("findings")), **told)
            if found.findings and found.passed:
                return found
    made = check()
    if made.findings and made.passed:
        keep(folder, lambda draft: (draft / "verdict.json").write_text(json.dumps(asdict(made))))
    return made


def worst_finding(findings: list[Comparison]) -> Comparison:
    """The finding with the largest difference relative to its limit."""
    return max(findings, key=lambda finding: _sortable(finding.difference) / max(finding.limit, 1e-30))


def _sortable(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def ordinary_tokens(tokenizer: Any, vocab_size: int, count: int) -> list[int]:
    """`count` tokens of ordinary text; random ones, which are ill-conditioned, where there are too few."""
    text = files(__package__).joinpath("ordinary_text.txt").read_text(encoding="utf-8")
    token_ids: list[int] = [] if tokenizer is None else list(tokenizer.encode(text, add_special_tokens=False))
    token_ids = [token for token in token_ids if token < vocab_size]
    if len(set(token_ids)) < 20:
        return random.Random(0).choices(range(vocab_size), k=count)  # noqa: S311 (no secret)
    return [token_ids[number % len(token_ids)] for number in range(count)]
