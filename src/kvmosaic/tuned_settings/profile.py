"""Profile: settings that were tuned on one model, and the measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import fmean
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidConfig, InvalidProfile, first_fault
from kvmosaic.layout import ChunkContext
from kvmosaic.layout.strategies import strategy_names
from kvmosaic.repair import repair_policy

FORMAT = 5
FORMAT_FIELD = "kvmosaic_profile"
SETTINGS = ("position_strategy", "chunk_context", "repair")
"""Fields of `ChunkCacheConfig` that a profile sets unless the caller did."""


def _check(is_right: Callable[[str], bool], what: str) -> AfterValidator:
    def checked(value: str) -> str:
        if not is_right(value):
            raise ValueError(what)
        return value

    return AfterValidator(checked)


def _policy(text: str) -> str:
    try:
        return str(repair_policy(text))
    except InvalidConfig as error:
        raise ValueError(str(error)) from None


Name = Annotated[str, Field(min_length=1, max_length=4_096), _check(str.isprintable, "it must be printable characters")]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
Share = Annotated[float, Field(ge=0, le=1)]
Nats = Annotated[float, Field(ge=-1e6, le=1e6)]
Work = Annotated[float, Field(ge=0, le=100)]
"""Repairing may cost more than computing all documents once, though that is never useful."""
_strategies = strategy_names(offsets=False)
Strategy = Annotated[str, _check(lambda name: name in _strategies, f"it must be {' or '.join(_strategies)}")]
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, config=_STRICT)
class TaskResult:
    """Measurements on one task."""

    task: Name
    cases: Annotated[int, Field(ge=1, le=10**7)]
    accuracy: Share | None
    """Mean score from 0 to 1 with the settings of the profile; None if answers were not scored."""
    full_accuracy: Share | None
    """The same with full attention."""
    divergence: Nats | None = None
    """From full attention, in nats per token of its own answers; None in profiles without it."""
    agreement: Share | None = None
    """With full attention's greedy tokens, from 0 to 1."""
    loss_increase: Nats | None = None
    """Increase of the accepted answers' loss over full attention, in nats per token."""

    @property
    def ratio(self) -> float | None:
        """Accuracy relative to full attention; 1 where that scores 0, since nothing can be lost."""
        if self.accuracy is None or self.full_accuracy is None:
            return None
        return self.accuracy / self.full_accuracy if self.full_accuracy else 1.0


@dataclass(frozen=True, slots=True, config=_STRICT)
class Goal:
    """Limits on the loss of accuracy and on the work of repairing."""

    loss: Share | None
    """Max loss, as a share of full attention's accuracy, of all tasks together and of each; None: any."""
    max_work: Work
    """Most work for choosing and repairing; 1 is the cost of computing all documents once."""
    is_reached: bool = True
    """False: no settings reach it, and the best ones were accepted nonetheless."""
    max_divergence: Nats | None = None
    """Max divergence from full attention, in nats per token; None: any."""
    min_agreement: Share | None = None
    """Min agreement with full attention's greedy tokens, from 0 to 1; None: any."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class Profile:
    """Settings for placing and repairing a model's documents, and their measurements."""

    model: Name
    """Name of the model when it was measured."""
    fingerprint: Digest
    """Fingerprint of the model: it differs for another checkpoint or dtype."""
    position_strategy: Strategy
    chunk_context: ChunkContext
    repair: Annotated[str, AfterValidator(_policy)]
    goal: Goal
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    """The day of the measurement, such as "2026-03-31"."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    work: Work
    """Mean work of choosing and repairing; 1 is the cost of computing all documents once."""
    tasks: Annotated[tuple[TaskResult, ...], Field(min_length=1, max_length=100)]
    adapter: Annotated[str, Field(max_length=4_096)] = ""
    """Folder of the adapter that it was measured with, as seen from the profile's folder; empty: the base model."""
    adapter_digest: Digest = ""
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
        return {FORMAT_FIELD: FORMAT, **asdict(self), "tasks": [asdict(task) for task in self.tasks]}

    @classmethod
    def from_dict(cls, content: object) -> Profile:
        """Creates a profile from names and values.

        Raises:
            InvalidProfile: another format, or a field is missing, unknown or out of range.
        """
        fields = dict(content) if isinstance(content, dict) else {}
        if (found := fields.pop(FORMAT_FIELD, None)) != FORMAT or isinstance(found, bool):
            raise InvalidProfile(
                f"its format {FORMAT_FIELD} is {found!r:.80}, and this version reads {FORMAT}; tune again"
            )
        try:
            return TypeAdapter(cls).validate_json(json.dumps(fields))
        except ValidationError as error:
            raise InvalidProfile(first_fault(error.errors(include_url=False))) from None
