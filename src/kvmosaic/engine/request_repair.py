"""Repair of a request: from the prompt as arranged to the prompt with some tokens of its chunks recomputed.

    policy needs no signals     the layout is repaired at once
    policy needs signals        chunks (and the question, if attention is a signal) are computed as without repair,
                                signals are measured, the policy chooses, and the request is planned again, repaired

What is computed for measuring is what a request without repair computes, and is cached as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvmosaic.errors import InvalidRepair, KVMosaicError
from kvmosaic.layout import Layout, exact_spans, repaired
from kvmosaic.prompt.companions import like_one_before
from kvmosaic.repair import (
    MEASURED,
    ChunkSignals,
    FirstTokens,
    FullRepair,
    NoRepair,
    RepairPolicy,
    Signal,
    WordFinder,
    checked_choice,
)
from kvmosaic.sampling import RepairUse

if TYPE_CHECKING:
    from torch import Tensor

    from kvmosaic.engine.model_runner import EngineModel

MAX_REPAIRED_DOCUMENTS = 256
MAX_REPAIR_LOOKS = 2**23
"""Max repaired tokens times documents: the visible ranges of each pair are stored, and take memory and time."""


@dataclass(eq=False, slots=True)
class RequestRepair:
    """The repair of one request, and the signals measured on its chunks."""

    policy: RepairPolicy
    layout: Layout
    """As arranged, without repair."""
    num_layers: int
    words: WordFinder | None = None
    """What finds names and the question's words, for a policy that asks for them."""
    is_measuring: bool = False
    """Whether signals are still to be measured before tokens are chosen."""
    shares: dict[int, Tensor] = field(default_factory=dict)
    """By span of a chunk: [m], the attention its tokens received so far, summed over the later half of the layers."""
    deviations: dict[int, Sequence[float]] = field(default_factory=dict)
    """By span of a chunk: deviation of its tokens' keys."""
    name: str = field(init=False)
    """The policy as text."""
    signals: frozenset[Signal] = field(init=False)
    """Signals that are measured for the policy."""
    chunks: list[int] = field(init=False)
    """Span indices of the chunks."""
    open_chunks: list[int] = field(init=False)
    """Span indices of the chunks that did not see everything before them."""

    def __post_init__(self) -> None:
        self.name, self.signals = str(self.policy), MEASURED & self.policy.signals
        spans, exact = self.layout.spans, exact_spans(self.layout)
        self.chunks = [index for index, span in enumerate(spans) if span.is_chunk]
        self.open_chunks = [index for index in self.chunks if index not in exact]

    @property
    def is_full(self) -> bool:
        """Whether the whole prompt is recomputed as ordinary causal text."""
        return isinstance(self.policy, FullRepair)

    def first_layout(self) -> Layout:
        """The layout that runs first."""
        if not self.signals or not self.open_chunks:
            return self.repaired_layout()
        self.is_measuring = True
        if "attention" in self.signals:
            return replace(self.layout, fresh_tokens=self.layout.last.num_tokens)
        return replace(self.layout, spans=self.layout.spans[:-1])

    def repaired_layout(self) -> Layout:
        """The layout that answers the request.

        Raises:
            InvalidRepair: the policy failed, or chose tokens that do not exist.
        """
        self.is_measuring = False
        chunks, open_chunks = self.chunks, set(self.open_chunks)
        asks, spans = self.policy.signals, self.layout.spans
        names = self.words.names if self.words and "names" in asks else lambda _: ()
        texts, question = self.layout.chunk_token_ids, self.layout.last.token_ids
        words = self.words.weights(question, texts) if self.words and "words" in asks else [0.0] * len(chunks)
        later = like_one_before(texts) if "alike" in asks else ()
        known = [
            ChunkSignals(
                spans[index].num_tokens,
                index not in open_chunks,
                self.deviations.get(index, [0.0] * spans[index].num_tokens if self.deviations else ()),
                self.shares[index].tolist() if index in self.shares else (),
                names(spans[index].token_ids) if index in open_chunks else (),
                words[number],
                number in later,
            )
            for number, index in enumerate(chunks)
        ]
        try:
            chosen = checked_choice(known, self.policy.choose(known), self.name)
        except KVMosaicError:
            raise
        except Exception as error:
            raise InvalidRepair(f"the repair policy {self.name:.80} failed: {error!r:.200}") from error
        num_repaired = sum(map(len, chosen))
        if num_repaired * len(chunks) > MAX_REPAIR_LOOKS:
            raise InvalidRepair(
                f"repair={self.name:.80} repairs {num_repaired:,} tokens, each of which looks at {len(chunks):,} "
                f"documents; tokens times documents may be {MAX_REPAIR_LOOKS:,}: repair fewer tokens or send fewer "
                "documents"
            )
        return repaired(self.layout, dict(zip(chunks, chosen, strict=True)))

    def note_shares(self, span_index: int, first: int, shares: Tensor) -> None:
        """Adds the attention that tokens of a chunk, from number `first` on, received from some rows in one layer."""
        total = self.shares.get(span_index)
        if total is None:
            total = self.shares[span_index] = shares.new_zeros(self.layout.spans[span_index].num_tokens)
        total[first : first + len(shares)] += shares / (self.num_layers - self.num_layers // 2)

    def forget(self) -> None:
        """Discards the signals measured so far, since they will be measured again; safe once tokens are chosen."""
        if self.is_measuring:
            self.shares.clear()
            self.deviations.clear()

    def use(self, layout: Layout, num_found: int, seconds: float) -> RepairUse:
        """Returns what was repaired, and its cost.

        Args:
            layout: the one that answers.
            num_found: prefix cache hits among the repaired tokens, or the whole prompt.
            seconds: spent on choosing and repairing.
        """
        num_tokens = sum(self.layout.spans[index].num_tokens for index in self.chunks)
        num_repaired = 0
        if self.is_full:  # the hits began with the system text
            num_repaired = num_tokens
            before = sum(span.num_tokens for span in self.layout.spans[: self.chunks[0]] if not span.is_companion)
            num_found = min(max(num_found - before, 0), num_tokens)
        if (index := layout.repair) is not None:
            num_repaired = layout.spans[index].num_tokens
        num_computed = num_repaired - num_found
        work = num_computed * self.num_layers
        if self.open_chunks:
            if "deviation" in self.signals:
                work += sum(self.layout.spans[index].num_tokens for index in self.open_chunks)
            if "attention" in self.signals:
                work += self.layout.last.num_tokens * self.num_layers
        return RepairUse(
            policy=self.name,
            document_tokens=num_tokens,
            repaired_tokens=num_repaired,
            computed_tokens=num_computed,
            work_fraction=work / (num_tokens * self.num_layers),
            milliseconds=seconds * 1e3,
        )


@dataclass(frozen=True, slots=True)
class QuestionObserver:
    """Sums up, for a repair, the attention of its question's rows."""

    repair: RequestRepair
    read_tokens: tuple[tuple[int, int], ...]
    """For each read of the rows that is a span's: that span, and the number of its first token."""

    def wants_layer(self, layer_index: int) -> bool:
        """See `AttentionObserver`: early layers attend to neighbours, later ones to what the question needs."""
        return layer_index >= self.repair.num_layers // 2

    def observe(self, layer_index: int, read_index: int, shares: Tensor) -> None:
        """See `AttentionObserver`."""
        self.repair.note_shares(*self.read_tokens[read_index], shares)


def repair_of(
    policy: RepairPolicy, layout: Layout, model: EngineModel, words: WordFinder, *, has_window: bool, first: int = 0
) -> RequestRepair | None:
    """Returns the repair of a request; None if there is nothing to repair.

    Raises:
        InvalidRepair: the policy does not fit the model or the request.
    """
    if isinstance(policy, NoRepair) or not any(span.is_chunk for span in layout.spans):
        return None
    if reason := why_not_repaired(policy, layout, model, has_window=has_window, first=first):
        raise InvalidRepair(reason)
    return RequestRepair(policy, layout, len(model.layers), words)


def why_not_repaired(
    policy: RepairPolicy, layout: Layout, model: EngineModel, *, has_window: bool, first: int = 0
) -> str:
    """Why a request cannot be repaired by this policy (with states, `first(first)` only), and the way out; or empty."""
    if isinstance(policy, NoRepair | FullRepair):
        return ""
    if has_window:
        return (
            f"repair={policy} keeps some tokens of documents apart, and window_tokens moves documents along with the "
            "text; use repair='none' or 'full', or leave window_tokens out"
        )
    num_chunks = sum(span.is_chunk for span in layout.spans)
    if num_chunks > MAX_REPAIRED_DOCUMENTS:
        return (
            f"repair={policy} looks at every document from each of the others, and this prompt has {num_chunks:,}; at "
            f"most {MAX_REPAIRED_DOCUMENTS} can be repaired: send fewer, or use repair='none'"
        )
    if not model.is_movable and layout.rules.overlaps and num_chunks > 1:
        return (
            f"repair={policy} computes tokens where documents follow one another, and they are read where "
            f"documents overlap; this model does not allow that ({model.immovable_reason}); use repair='none' or "
            "'full', or position_strategy='absolute'"
        )
    if layout.rules.takes_offsets:
        first_tokens = dict.fromkeys((index for index, span in enumerate(layout.spans) if span.is_chunk), (0,))
        if reason := model.why_unreadable(repaired(layout, first_tokens)):
            return f"repair={policy}: {reason}"
    return unsuited(policy, model, first)


def unsuited(policy: RepairPolicy, model: EngineModel, first: int) -> str:
    """Why a policy does not support a model; empty if it does."""
    if isinstance(policy, NoRepair | FullRepair):
        return ""
    if reason := model.no_repair_reason:
        return f"repair={policy} computes tokens that are not contiguous, and {reason}; use repair='none' or 'full'"
    is_kept = first and policy == FirstTokens(first)
    if model.state_text and not is_kept:
        kept = f"the first {first} tokens of documents are kept apart: use 'first({first})'," if first else "use"
        wanted = policy if isinstance(policy, FirstTokens) else "first(8)"
        return (
            f"repair={policy} computes tokens of documents again, and {model.state_text}, which a document changes as "
            f"a whole; {kept} 'none' or 'full', or start with repair='{wanted}'"
        )
    needed: frozenset[Signal] = MEASURED & policy.signals
    if policy.signals & {"names", "words"} and model.tokenizer is None:
        return f"repair={policy} reads the text of tokens, and there is no tokenizer; use 'first(k)'"
    if (reason := model.no_scores_reason) and needed:
        return f"repair={policy} measures attention, and {reason}; use 'none', 'full', 'documents(k)' or 'first(k)'"
    if "deviation" in needed and len(model.layers) < 2:
        return (
            f"repair={policy} compares keys of the second layer, and this model has {len(model.layers)}; "
            "use 'first(k)' or 'query(fraction)'"
        )
    return ""
