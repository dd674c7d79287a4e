"""Profile: settings that were tuned on one model, and the measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, TypeVar, get_args

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidConfig, InvalidProfile
from kvmosaic.layout import ChunkContext
from kvmosaic.layout.strategies import strategy_names
from kvmosaic.repair import repair_policy

Choice = TypeVar("Choice", bound=str)
FORMAT = 4
FORMAT_FIELD = "kvmosaic_profile"
SETTINGS = ("position_strategy", "chunk_context", "repair")
"""Fields of `ChunkCacheConfig` that a profile sets unless the caller did."""
MAX_TASKS = 100
MAX_CASES = 10**7
MAX_WORK = 100.0
"""Upper bound: repairing may cost more than computing all documents once, though that is never useful."""
MAX_NAME_CHARACTERS = 4_096
MAX_NATS = 1e6
_DIGEST = ("[0-9a-f]{64}", "64 hexadecimal digits")


class Fields:
    """A JSON object that is read field by field; `end` refuses fields that were not read.

    Every method raises InvalidProfile, with the name of the field, its value and what it should be.
    """

    def __init__(self, content: object, place: str = "") -> None:
        self._place = place
        if not isinstance(content, Mapping):
            raise InvalidProfile(f"{place.rstrip('.') or 'the file'} must be a JSON object, got {content!r:.80}")
        self._content = content
        self._read: set[str] = set()

    def version(self, name: str, known: int) -> None:
        """Checks the version of the format."""
        found = self._take(name)
        if found != known or isinstance(found, bool):
            raise InvalidProfile(f"its format {name} is {found!r:.80}, and this version reads {known}; tune again")

    def text(self, name: str, most: int) -> str:
        """A printable text of at most `most` characters."""
        value = self._take(name)
        if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
            raise self._wrong(name, value, f"1 to {most} printable characters")
        return value

    def matching(self, name: str, pattern: str, what: str) -> str:
        """A text that matches a pattern."""
        value = self._take(name)
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
            raise self._wrong(name, value, what)
        return value

    def choice(self, name: str, choices: tuple[Choice, ...]) -> Choice:
        """One of these texts."""
        value = self._take(name)
        for known in choices:
            if value == known:
                return known
        raise self._wrong(name, value, " or ".join(choices))

    def read(self, name: str, reader: Callable[[str], str]) -> str:
        """A text that `reader` validates."""
        value = self.text(name, 200)
        try:
            return reader(value)
        except InvalidConfig as error:
            raise InvalidProfile(f"{self._place}{name}: {error}") from None

    def number(self, name: str, low: float, high: float) -> float:
        """A number within limits."""
        value = self._take(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise self._wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def number_if_known(self, name: str, low: float, high: float) -> float | None:
        """A number within limits; None if the field is missing or null."""
        if self._content.get(name) is None:
            self._read.add(name)
            return None
        return self.number(name, low, high)

    def whole(self, name: str, low: int, high: int) -> int:
        """A whole number within limits."""
        value = self._take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._take(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def inner(self, name: str) -> Fields:
        """An object within this one."""
        return Fields(self._take(name), f"{self._place}{name}.")

    def inner_if_known(self, name: str) -> Fields | None:
        """An object within this one; None if the field is missing."""
        return self.inner(name) if name in self._content else None

    def several(self, name: str, most: int) -> list[Fields]:
        """A list of objects, at least one."""
        value = self._take(name)
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise self._wrong(name, value, f"a list of 1 to {most} objects")
        return [Fields(each, f"{self._place}{name}.{number}.") for number, each in enumerate(value)]

    def end(self) -> None:
        """Refuses unread fields: a mistyped name must not count as an absent field."""
        if unknown := sorted(str(name) for name in self._content if name not in self._read):
            raise InvalidProfile(f"{self._place}{unknown[0]:.80} is unknown; remove it, or look at how it is spelled")

    def _take(self, name: str) -> Any:
        if name not in self._content:
            raise InvalidProfile(f"{self._place}{name} is missing")
        self._read.add(name)
        return self._content[name]

    def _wrong(self, name: str, value: object, what: str) -> InvalidProfile:
        return InvalidProfile(f"{self._place}{name} is {value!r:.80}; it must be {what}")


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Measurements on one task."""

    task: str
    cases: int
    accuracy: float | None
    """Mean score from 0 to 1 with the settings of the profile; None if answers were not scored."""
    full_accuracy: float | None
    """The same with full attention."""
    divergence: float | None = None
    """From full attention, in nats per token of its own answers; None in profiles without it."""
    agreement: float | None = None
    """With full attention's greedy tokens, from 0 to 1."""
    loss_increase: float | None = None
    """Increase of the accepted answers' loss over full attention, in nats per token."""

    @property
    def ratio(self) -> float | None:
        """Accuracy relative to full attention; 1 where that scores 0, since nothing can be lost."""
        if self.accuracy is None or self.full_accuracy is None:
            return None
        return self.accuracy / self.full_accuracy if self.full_accuracy else 1.0


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits on the loss of accuracy and on the work of repairing."""

    loss: float | None
    """Max loss, as a share of full attention's accuracy, of all tasks together and of each; None: any."""
    max_work: float
    """max_work of choosing and repairing; 1 is the cost of computing all documents once."""
    is_reached: bool = True
    """False: no settings reach it, and the best ones were accepted nonetheless."""
    max_divergence: float | None = None
    """Max divergence from full attention, in nats per token; None: any."""
    min_agreement: float | None = None
    """Min agreement with full attention's greedy tokens, from 0 to 1; None: any."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings for placing and repairing a model's documents, and their measurements."""

    model: str
    """Name of the model when it was measured."""
    fingerprint: str
    """Fingerprint of the model: it differs for another checkpoint or dtype."""
    position_strategy: str
    chunk_context: ChunkContext
    repair: str
    goal: Goal
    date: str
    """The day of the measurement, such as "2026-03-31"."""
    seed: int
    work: float
    """Mean work of choosing and repairing; 1 is the cost of computing all documents once."""
    tasks: tuple[TaskResult, ...]
    adapter: str = ""
    """Folder of the adapter that it was measured with, as seen from the profile's folder; empty: the base model."""
    adapter_digest: str = ""
    """SHA-256 (hex) of that adapter's content."""

    @property
    def ratio(self) -> float | None:
        """Mean accuracy over all tasks relative to full attention; None if answers were not scored."""
        pairs = [(task.accuracy, task.full_accuracy) for task in self.tasks]
        known = [(own, full) for own, full in pairs if own is not None and full is not None]
        if not known:
            return None
        full = fmean(full for _, full in known)
        return fmean(own for own, _ in known) / full if full else 1.0

    @property
    def reached(self) -> str:
        """Describes the measurements."""
        parts = [] if self.ratio is None else [f"{self.ratio:.1%} of full attention"]
        nearness = [(task.divergence, task.agreement) for task in self.tasks]
        known = [(nats, share) for nats, share in nearness if nats is not None and share is not None]
        if known:
            parts.append(f"divergence {fmean(nats for nats, _ in known):.3f} nats")
            parts.append(f"{fmean(share for _, share in known):.1%} of the greedy tokens")
        return f"{', '.join(parts)} on {', '.join(task.task for task in self.tasks)}"

    def applied_to(self, config: ChunkCacheConfig) -> ChunkCacheConfig:
        """The settings, with those of the profile where the caller set none."""
        return replace(config, **{name: getattr(self, name) for name in SETTINGS if not config.says(name)})

    def overruled_by(self, config: ChunkCacheConfig) -> tuple[str, ...]:
        """The fields in which the caller set something else."""
        said = (name for name in SETTINGS if config.says(name))
        return tuple(name for name in said if str(getattr(config, name)) != getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return {
            FORMAT_FIELD: FORMAT,
            "model": self.model,
            "fingerprint": self.fingerprint,
            **({"adapter": {"folder": self.adapter, "digest": self.adapter_digest}} if self.adapter else {}),
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
        """Creates a profile from names and values.

        Raises:
            InvalidProfile: another format, or a field is missing, unknown or out of range.
        """
        fields = Fields(content)
        fields.version(FORMAT_FIELD, FORMAT)
        goal, measured = fields.inner("goal"), fields.inner("measured")
        adapter = fields.inner_if_known("adapter")
        profile = cls(
            model=fields.text("model", MAX_NAME_CHARACTERS),
            fingerprint=fields.matching("fingerprint", *_DIGEST),
            position_strategy=fields.choice("position_strategy", strategy_names(offsets=False)),
            chunk_context=fields.choice("chunk_context", get_args(ChunkContext)),
            repair=fields.read("repair", lambda text: str(repair_policy(text))),
            goal=Goal(
                loss=goal.number_if_known("loss", 0, 1),
                max_work=goal.number("max_work", 0, MAX_WORK),
                is_reached=goal.flag("is_reached"),
                max_divergence=goal.number_if_known("max_divergence", 0, MAX_NATS),
                min_agreement=goal.number_if_known("min_agreement", 0, 1),
            ),
            date=measured.matching("date", r"\d{4}-\d\d-\d\d", "a day such as 2026-03-31"),
            seed=measured.whole("seed", -(2**63), 2**63 - 1),
            work=measured.number("work", 0, MAX_WORK),
            tasks=tuple(_task(task) for task in measured.several("tasks", MAX_TASKS)),
            adapter=adapter.text("folder", MAX_NAME_CHARACTERS) if adapter else "",
            adapter_digest=adapter.matching("digest", *_DIGEST) if adapter else "",
        )
        for part in (fields, goal, measured, *([adapter] if adapter else [])):
            part.end()
        return profile


def _task(fields: Fields) -> TaskResult:
    result = TaskResult(
        task=fields.text("task", 200),
        cases=fields.whole("cases", 1, MAX_CASES),
        accuracy=fields.number_if_known("accuracy", 0, 1),
        full_accuracy=fields.number_if_known("full_accuracy", 0, 1),
        divergence=fields.number_if_known("divergence", 0, MAX_NATS),
        agreement=fields.number_if_known("agreement", 0, 1),
        loss_increase=fields.number_if_known("loss_increase", -MAX_NATS, MAX_NATS),
    )
    fields.end()
    return result
