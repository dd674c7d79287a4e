"""Request: a validated and placed prompt, its parameters, and its state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvmosaic.engine.likelihood import Scoring
from kvmosaic.engine.placement import PlacedPrompt
from kvmosaic.engine.priorities import sort_key_of
from kvmosaic.engine.request_repair import RequestRepair
from kvmosaic.errors import KVMosaicError
from kvmosaic.layout import Layout, RollingWindow
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import (
    Answer,
    Grammar,
    Period,
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
    placed: PlacedPrompt
    """Its prompt with rolling window and repair."""
    params: SamplingParams
    arrival_time: float
    """Seconds on the engine's clock."""
    priority: int = 0
    """Higher runs first and is preempted last."""
    note: str = ""
    """Why this prompt was not composed, if it was not."""
    grammar: Grammar | None = None
    """Constraint on the answers, if `params.structured_outputs` is set."""
    answers: list[Answer] = field(default_factory=list)
    reuse: ReuseReport = field(default_factory=ReuseReport)
    """What was reused; set with the first token."""
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    lookup: Period | None = None
    """Its first allocation."""
    fetch_time: float | None = None
    """When its first fetch from the tiers was requested."""
    loaded_time: float | None = None
    """When the fetched chunks were in the blocks of its first allocation."""
    scoring: Scoring | None = None
    """The continuation to score, if no answer is generated."""
    error: KVMosaicError | None = None
    """Why the request failed."""
    layout: Layout = field(init=False)
    """The layout to compute; a repair changes it once its signals are measured."""
    text: str | None = field(init=False)
    """The prompt's text, if it was given as text. Joined once, since every streamed output repeats it."""
    token_ids: tuple[int, ...] = field(init=False, repr=False)
    """All tokens of the prompt, in prompt order; joined once, for the same reason."""
    sort_key: float = field(init=False, repr=False)
    """Its position in the waiting order; see `sort_key_of`."""

    def __post_init__(self) -> None:
        self._derive()

    def place_again(self, placed: PlacedPrompt, note: str) -> None:
        """Replaces the prompt before anything is answered, and says why."""
        self.placed = placed
        self.note = "; ".join(part for part in (note, self.note) if part)
        self.answers.clear()
        self._derive()

    def _derive(self) -> None:
        self.layout = self.placed.layout
        self.text = self.prompt.text
        self.sort_key = sort_key_of(self.priority, self.arrival_time)
        segments = self.prompt.segments[:-1] if self.is_warm_up else self.prompt.segments
        self.token_ids = tuple(token for segment in segments for token in segment.token_ids or ())

    @property
    def prompt(self) -> Prompt:
        """The prompt, with token ids."""
        return self.placed.prompt

    @property
    def eviction_priority(self) -> float:
        """Its priority from 0 to 1, as eviction policies take it: 0 is 0.5, higher ones go towards 1."""
        return 0.5 + 0.5 * self.priority / (1 + abs(self.priority))

    @property
    def window(self) -> RollingWindow | None:
        """Rolling window over question and answer, if any."""
        return self.placed.window

    @property
    def repair(self) -> RequestRepair | None:
        """Repair of its chunks, if any."""
        return self.placed.repair

    @property
    def is_warm_up(self) -> bool:
        """Whether chunks are only prefilled, without a question."""
        return self.layout.last.is_chunk and self.repair is None

    @property
    def is_measuring(self) -> bool:
        """Whether signals of its chunks are measured before the repair and the answer."""
        return self.repair is not None and self.repair.is_measuring

    @property
    def num_logits(self) -> int:
        """Rows at the end of its layout whose logits are needed."""
        if self.is_warm_up or self.is_measuring:
            return 0
        return 1 if self.scoring is None else self.scoring.num_tokens

    @property
    def is_finished(self) -> bool:
        """Whether all output is there."""
        return self.finished_time is not None

    @property
    def metrics(self) -> RequestMetrics:
        """Timestamps of the request so far."""
        load = None
        if self.fetch_time is not None and self.loaded_time is not None:
            load = Period(self.fetch_time, self.loaded_time)
        return RequestMetrics(
            self.arrival_time,
            self.first_scheduled_time,
            self.first_token_time,
            self.finished_time,
            self.placed.period,
            load,
            self.lookup,
        )

    def note_fetch(self, now: float) -> None:
        """Records when chunks were requested from the tiers; only the first time, and before its first allocation."""
        if self.fetch_time is None and self.lookup is None:
            self.fetch_time = now

    def note_allocation(self, begin: float, allocated: float, loaded: float) -> None:
        """Records when it was planned, when its blocks were allocated, and when fetched chunks were in them.

        Only the first allocation counts.
        """
        if self.lookup is None:
            self.lookup, self.loaded_time = Period(begin, allocated), loaded

    def score(self) -> ScoreOutput:
        """Scores of its continuation, once finished."""
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
