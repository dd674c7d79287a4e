"""A profile: settings that were measured on one model, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.layout import ChunkContext
from kvmosaic.profile.fields import Fields
from kvmosaic.repair import repair_policy

FORMAT = 1
FORMAT_FIELD = "kvmosaic_profile"
SETTINGS = ("position_strategy", "chunk_context", "repair")
"""Fields of `ChunkCacheConfig` that a profile sets where nobody said otherwise."""
MAX_TASKS = 100
MAX_CASES = 10**7
MAX_WORK = 100.0
"""Repairing may cost more than computing all documents once, though nobody would want it."""
MAX_NAME_CHARACTERS = 4_096

Strategy = Literal["shared", "sequential"]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What one task showed."""

    task: str
    cases: int
    accuracy: float
    """Mean score from 0 to 1 with the settings of the profile."""
    full_accuracy: float
    """The same with full attention."""

    @property
    def ratio(self) -> float:
        """Accuracy by that of full attention; 1 where that answers nothing, since nothing can be lost."""
        return self.accuracy / self.full_accuracy if self.full_accuracy else 1.0


@dataclass(frozen=True, slots=True)
class Goal:
    """How much may be lost, and how much work may be spent on that."""

    loss: float
    """Share of full attention's accuracy that may be lost, tasks together."""
    task_loss: float
    """The same for each task."""
    max_work: float
    """Most work for choosing and repairing; 1 is what computing all documents once costs."""
    is_reached: bool = True
    """False: nothing reaches it, and the best there is was wanted all the same."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How a model's documents are placed and repaired, and what was measured that way."""

    model: str
    """What it was called when it was measured."""
    fingerprint: str
    """Of the model: another checkpoint, dtype or quantization has another one."""
    position_strategy: Strategy
    chunk_context: ChunkContext
    repair: str
    goal: Goal
    date: str
    """The day of the measurement, such as "2026-03-31"."""
    seed: int
    work: float
    """For choosing and repairing, on average; 1 is what computing all documents once costs."""
    tasks: tuple[TaskResult, ...]

    @property
    def ratio(self) -> float:
        """Mean accuracy over all tasks by that of full attention."""
        full = fmean(task.full_accuracy for task in self.tasks)
        return fmean(task.accuracy for task in self.tasks) / full if full else 1.0

    def applied_to(self, config: ChunkCacheConfig) -> ChunkCacheConfig:
        """The settings, with those of the profile where the caller chose none."""
        return replace(config, **{name: getattr(self, name) for name in SETTINGS if not config.says(name)})

    def overruled_by(self, config: ChunkCacheConfig) -> tuple[str, ...]:
        """The fields in which the caller chose something else."""
        said = (name for name in SETTINGS if config.says(name))
        return tuple(name for name in said if str(getattr(config, name)) != getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return {
            FORMAT_FIELD: FORMAT,
            "model": self.model,
            "fingerprint": self.fingerprint,
            **{name: getattr(self, name) for name in SETTINGS},
            "goal": asdict(self.goal),
            "measured": {
                "date": self.date,
                "seed": self.seed,
                "work": self.work,
                "tasks": [asdict(task) for task in self.tasks],
            },
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Profile:
        """A profile from names and values.

        Raises:
            InvalidProfile: of another format, or a field is missing, unknown or outside its limits.
        """
        fields = Fields(content)
        fields.version(FORMAT_FIELD, FORMAT)
        goal, measured = fields.inner("goal"), fields.inner("measured")
        profile = cls(
            model=fields.text("model", MAX_NAME_CHARACTERS),
            fingerprint=fields.matching("fingerprint", "[0-9a-f]{64}", "64 hexadecimal digits"),
            position_strategy=fields.choice("position_strategy", ("shared", "sequential")),
            chunk_context=fields.choice("chunk_context", ("system", "none")),
            repair=fields.read("repair", lambda text: str(repair_policy(text))),
            goal=Goal(
                loss=goal.number("loss", 0, 1),
                task_loss=goal.number("task_loss", 0, 1),
                max_work=goal.number("max_work", 0, MAX_WORK),
                is_reached=goal.flag("is_reached"),
            ),
            date=measured.matching("date", r"\d{4}-\d\d-\d\d", "a day such as 2026-03-31"),
            seed=measured.whole("seed", -(2**63), 2**63 - 1),
            work=measured.number("work", 0, MAX_WORK),
            tasks=tuple(_task(task) for task in measured.several("tasks", MAX_TASKS)),
        )
        for part in (fields, goal, measured):
            part.end()
        return profile


def _task(fields: Fields) -> TaskResult:
    result = TaskResult(
        task=fields.text("task", 200),
        cases=fields.whole("cases", 1, MAX_CASES),
        accuracy=fields.number("accuracy", 0, 1),
        full_accuracy=fields.number("full_accuracy", 0, 1),
    )
    fields.end()
    return result
