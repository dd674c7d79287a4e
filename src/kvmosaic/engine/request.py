"""A request: what was sent, checked and placed, and what has become of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvmosaic.engine.priorities import sort_key_of
from kvmosaic.engine.repairing import Repair
from kvmosaic.engine.scoring import Scoring
from kvmosaic.errors import KVMosaicError
from kvmosaic.layout import Layout, RollingWindow
from kvmosaic.prompt import Prompt, SegmentKind
from kvmosaic.sampling import (
    Answer,
    Grammar,
    RequestMetrics,
    RequestOutput,
    ReuseReport,
    SamplingParams,
    ScoreOutput,
)


@dataclass(eq=False, slots=True)
class Request:
    """One prompt with its sampling parameters; `params.n` answers belong to it.

    A layout that ends with a chunk is a warm-up: its chunks are computed, nothing is sampled.
    """

    request_id: str
    prompt: Prompt
    layout: Layout
    params: SamplingParams
    arrival_time: float
    """Seconds on the engine's clock."""
    priority: int = 0
    """Higher runs first and is preempted last."""
    note: str = ""
    """Why this prompt was not composed, if it was not."""
    grammar: Grammar | None = None
    """What the answers must follow, if `params.structured_outputs` say so."""
    aging_seconds: float | None = None
    """Waiting so long counts as much as one more step of priority; None: it never counts."""
    window: RollingWindow | None = None
    """What tokens see of question and answer, if `params.window_tokens` limit that."""
    answers: list[Answer] = field(default_factory=list)
    reuse: ReuseReport = field(default_factory=ReuseReport)
    """What was reused; filled in when the first token is there."""
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    repair: Repair | None = None
    """What of its chunks is computed again, if anything."""
    scoring: Scoring | None = None
    """The continuation to score, if nothing is to be answered."""
    error: KVMosaicError | None = None
    """Why the request could not run."""
    text: str | None = field(init=False)
    """The prompt's text, if it was given as text. Joined once: every streamed output repeats it."""
    token_ids: tuple[int, ...] = field(init=False, repr=False)
    """All tokens of the prompt, in prompt order; put together once, for the same reason."""
    sort_key: float = field(init=False, repr=False)
    """Its place in the line; see `turn_of`."""

    def __post_init__(self) -> None:
        self.text = self.prompt.text
        self.sort_key = sort_key_of(self.priority, self.arrival_time, self.aging_seconds)
        segments = self.prompt.segments[:-1] if self.is_warm_up else self.prompt.segments
        self.token_ids = tuple(token for segment in segments for token in segment.token_ids or ())

    @property
    def is_warm_up(self) -> bool:
        """Whether chunks are only computed, and nothing is asked."""
        return self.layout.last.segment.kind is SegmentKind.CHUNK and self.repair is None

    @property
    def is_measuring(self) -> bool:
        """Whether signals of its chunks are measured before they are repaired and the question is answered."""
        return self.repair is not None and self.repair.is_measuring

    @property
    def num_logits(self) -> int:
        """Rows at the end of its layout whose logits are wanted."""
        if self.is_warm_up or self.is_measuring:
            return 0
        return 1 if self.scoring is None else self.scoring.num_tokens

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finished_time is not None

    @property
    def metrics(self) -> RequestMetrics:
        """When things happened to it so far."""
        return RequestMetrics(self.arrival_time, self.first_scheduled_time, self.first_token_time, self.finished_time)

    def score(self) -> ScoreOutput:
        """What was found of its continuation, when it has ended."""
        assert self.scoring is not None
        return replace(self.scoring.output(), reuse=self.reuse)

    def output(self) -> RequestOutput:
        """The answers so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.text,
            prompt_token_ids=self.token_ids,
            outputs=tuple(answer.output() for answer in self.answers),
            finished=self.is_finished,
            reuse=self.reuse,
            metrics=self.metrics,
        )
