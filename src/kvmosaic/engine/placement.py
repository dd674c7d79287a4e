"""Placement: from a prompt to the layout that runs first, with its rolling window and its repair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import TYPE_CHECKING, NamedTuple

from kvmosaic.cache import KVCache
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.engine.request_repair import (
    MAX_REPAIR_LOOKS,
    RequestRepair,
    repair_of,
    unsuited,
    why_not_repaired,
)
from kvmosaic.engine.rolling_window import check_positions
from kvmosaic.errors import InvalidOffset, InvalidPrompt, InvalidRepair, KVMosaicError, NotMovable, PromptTooLong
from kvmosaic.layout import (
    BASE_MODEL,
    IN_FULL,
    LATER_IN_FULL,
    MIXED_UP,
    SHORT_IN_FULL,
    ChunkContext,
    Layout,
    LayoutAdapter,
    RollingWindow,
    arrange,
    choose_strategy,
    exact_spans,
    with_kin,
)
from kvmosaic.layout.strategies import AUTO, strategy_named, strategy_names
from kvmosaic.prompt import Prompt, Segment, SegmentKind, check_length
from kvmosaic.prompt.companions import Likeness, alike_pairs, are_short, likeness_of
from kvmosaic.prompt.found_documents import is_first_question
from kvmosaic.repair import (
    ASKED_REPAIR,
    FEW_DOCUMENTS,
    MANY_ASKED_REPAIR,
    UNMEASURED_REPAIR,
    Alike,
    FullRepair,
    Names,
    NoRepair,
    RepairPolicy,
    WordFinder,
    repair_policy,
)
from kvmosaic.sampling import Period

if TYPE_CHECKING:
    from kvmosaic.engine.model_runner import EngineModel


CHOSEN_ORDER = "the cache chose the order of documents"


def in_best_order(prompt: Prompt, layout: Layout, kv_cache: KVCache, *, moves_sections: bool = True) -> Prompt:
    """A prompt in the order that computes the fewest tokens; of several such orders, the one nearest to its own.

    The prompt itself, if its order does not matter, if there are texts between its documents, or if one sees another.

    Args:
        prompt: a prompt with token ids.
        layout: of this prompt.
        kv_cache: where its documents are looked up.
        moves_sections: as for the layout.
    """
    documents = _documents(prompt)
    companions = layout.companions[: len(documents) - 1] if documents else []
    if not companions:
        return prompt
    missing = []
    for place in range(len(companions) + 1):
        after = replace(prompt.without_texts(), companions=tuple(companions[:place]), place=place)
        placed = arrange(after, layout.strategy, layout.chunk_context, moves_sections=moves_sections)
        placed = replace(placed, spans=placed.spans[:-1], adapter=layout.adapter)
        plan = kv_cache.plan(placed, prompt.salt, prompt.tenant)
        computed = (span.num_to_compute for span in plan.spans if span.is_chunk)
        missing.append([sum(islice(computed, len(chunks))) for chunks in documents])
    chosen = first_documents(missing)
    rest = (number for number in range(len(documents)) if number not in chosen)
    inner = [chunk for number in (*chosen, *rest) for chunk in documents[number]]
    before = prompt.segments.index(documents[0][0])
    return replace(prompt, segments=(*prompt.segments[:before], *inner, *prompt.segments[before + len(inner) :]))


def first_documents(missing: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Which documents come first, so that the fewest tokens are computed.

    Args:
        missing: [p][d]: tokens that document d computes after p others; the last row: after so many or more.
    """
    *places, later = missing
    gains = [[after - here for here, after in zip(row, later, strict=True)] for row in places]
    best = [sorted(range(len(later)), key=row.__getitem__, reverse=True)[: len(places)] for row in gains]
    return max(
        (numbers for numbers in product(*best) if len(set(numbers)) == len(numbers)),
        key=lambda numbers: (
            sum(row[number] for row, number in zip(gains, numbers, strict=True)),
            [-number for number in numbers],
        ),
    )


def _documents(prompt: Prompt) -> list[list[Segment]]:
    """The chunks of each document; none, if their order cannot be changed."""
    kinds = [segment.kind for segment in prompt.segments]
    chunks = prompt.chunks
    first = kinds.index(SegmentKind.CHUNK) if chunks else 0
    is_together = prompt.segments[first : first + len(chunks)] == chunks
    if not is_together or any(chunk.sees or chunk.origin for chunk in chunks):
        return []
    documents: list[list[Segment]] = []
    for chunk in chunks:
        if chunk.continues and documents:
            documents[-1].append(chunk)
        else:
            documents.append([chunk])
    return documents


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt with the layout that runs first."""

    prompt: Prompt
    layout: Layout
    window: RollingWindow | None = None
    """Rolling window over question and answer, if any."""
    repair: RequestRepair | None = None
    """Repair of its chunks, if any."""
    period: Period | None = None
    """When it was placed."""
    max_positions: int | None = None
    """Positions of the model, or fewer by the settings; None: no limit."""
    is_auto: bool = False
    """Whether the length of the prompt decided on the strategy."""
    remark: str = ""
    """On its documents, for the report."""


class _Said(NamedTuple):
    """What a request says of its placement; None: as configured."""

    repair: str | RepairPolicy | None
    strategy: str | None
    context: ChunkContext | None
    window: RollingWindow | None


class Placer:
    """Places prompts for one model, by the settings or as a request overrides them."""

    def __init__(
        self,
        model: EngineModel,
        config: ChunkCacheConfig,
        max_positions: int | None,
        clock: Callable[[], float],
        kv_cache: KVCache,
    ) -> None:
        """Places prompts of at most `max_positions`, for this cache.

        Documents that are alike are read in full where it has room for the whole prompt, or are few.

        Raises:
            InvalidRepair: the model does not support the repair policy that the settings name.
        """
        self.repair = repair_policy(config.repair)
        """Repair policy of requests that do not set one."""
        self.max_positions = max_positions
        self._model = model
        self._words = WordFinder(model.tokenizer)
        self._config = config
        self._contexts = {name: config.context_in(name) for name in strategy_names()}
        self._clock = clock
        self._kv_cache = kv_cache
        room = kv_cache.request_pool.num_blocks * kv_cache.request_pool.block_size
        self._max_in_full = min(room, max_positions or room)
        self._has_default = not config.says("repair")
        if not self._has_default and (reason := unsuited(self.repair, model, kv_cache.repaired_tokens)):
            raise InvalidRepair(reason)

    def place(
        self,
        prompt: Prompt,
        *,
        repair: str | RepairPolicy | None = None,
        strategy: str | None = None,
        context: ChunkContext | None = None,
        window: RollingWindow | None = None,
    ) -> PlacedPrompt:
        """Places a prompt and plans its repair.

        Args:
            prompt: a prompt with token ids.
            repair: overrides the configured policy, which a prompt that it does not suit ignores. Where none is
                configured, documents that are alike are read in full, or have met companions of their kind, and names
                are repaired.
            strategy: overrides the configured one.
            context: overrides the configured one.
            window: rolling window of the text.

        Raises:
            InvalidPrompt, InvalidRepair, InvalidSampling, NotMovable: see `arrange`, and `repair_of`. Not where all
                documents were found in text: then they are text.
        """
        said = _Said(repair, strategy, context, window)
        try:
            return self._place(prompt, said)
        except KVMosaicError as error:
            if not prompt.is_found:
                raise
            ordinary = self._place(prompt.joined(), said)
            return replace(ordinary, remark=f"documents in its text could not be composed: {error}")

    def _place(self, prompt: Prompt, said: _Said) -> PlacedPrompt:
        """Positions, then repair, then the order of documents, and what runs first of all this."""
        begin = self._clock()
        is_default = said.repair is None and self._has_default
        policy = NoRepair() if prompt.is_plain else self.repair if said.repair is None else repair_policy(said.repair)
        window = None if isinstance(policy, FullRepair) else said.window
        layout = self.arrange(prompt, said.strategy, said.context, window)
        likeness = likeness_of(layout.chunk_token_ids, layout.companions)
        if likeness and _is_exact(layout):
            likeness = ""
        if is_default:
            policy = self._default_repair(prompt, layout, likeness, said)
        remarks = _remarks_on(prompt, likeness, policy, is_default=is_default)
        if not isinstance(policy, FullRepair) and (ordered := self._ordered(prompt, layout)) != prompt:
            prompt, layout = ordered, self.arrange(ordered, said.strategy, said.context, said.window)
            remarks.append(CHOSEN_ORDER)
        first = self._kv_cache.repaired_tokens
        planned = repair_of(policy, layout, self._model, self._words, has_window=said.window is not None, first=first)
        if planned is not None and planned.is_full:
            whole = self.arrange(prompt.joined(), window=said.window)  # asked for, full attention is the base model's
            layout = replace(whole, adapter=layout.adapter) if is_default else whole
        elif planned is not None:
            layout = planned.first_layout()
        is_auto = self._model.is_movable and (said.strategy or self._config.position_strategy) == AUTO
        period = Period(begin, self._clock())
        return PlacedPrompt(
            prompt, layout, said.window, planned, period, self.max_positions, is_auto, ", ".join(remarks)
        )

    def _default_repair(self, prompt: Prompt, layout: Layout, likeness: Likeness, said: _Said) -> RepairPolicy:
        """The best policy for right answers that suits the prompt."""
        has_window, first = said.window is not None, self._kv_cache.repaired_tokens
        for each in self._wishes(prompt, layout, likeness, said):
            if not why_not_repaired(each, layout=layout, model=self._model, has_window=has_window, first=first):
                return each
        return NoRepair()

    @property
    def first_repair(self) -> str | RepairPolicy:
        """Repair of a first question about a few documents that are not alike."""
        return self._config.repair_after(self._config.context_in(), self._asked_repair())

    def reads_in_full(self, lengths: Sequence[int], context: ChunkContext | None = None) -> bool:
        """Whether documents of so many tokens are read in full by default, but by models made to read them apart."""
        is_usual = self._has_default and not self._config.says("chunk_context")
        return is_usual and (context or self._config.context_in()) == "companions" and are_short(lengths)

    def _ordered(self, prompt: Prompt, layout: Layout) -> Prompt:
        """A prompt with its documents in the order of the request, or in the one that reuses the most."""
        if (prompt.documents_order or self._config.documents_order) == "sent":
            return prompt
        return in_best_order(prompt, layout, self._kv_cache, moves_sections=self._model.is_movable)

    def _wishes(self, prompt: Prompt, layout: Layout, likeness: Likeness, said: _Said) -> Iterator[RepairPolicy]:
        """Default policies, the best one for right answers first; short documents cost little to read."""
        lengths = [len(ids) for ids in layout.chunk_token_ids]
        is_open = said.context is None and not likeness
        is_short = is_open and self.reads_in_full(lengths, layout.chunk_context) and not _is_exact(layout)
        in_full = likeness == "apart" or is_short or (bool(likeness) and self._model.repairs_run_by_run)
        is_free = said.window is None and not layout.rules.takes_offsets
        has_looks = len(prompt.chunks) * prompt.num_tokens <= MAX_REPAIR_LOOKS
        config, repairs_states = self._config, self._kv_cache.repaired_tokens > 0  # which companions do not help
        asked = self._asked_repair(sum(not chunk.continues for chunk in prompt.chunks))
        is_asked = has_looks and is_first_question(prompt) and prompt.num_tokens <= 2 * self._max_in_full
        after = config.repair_after(layout.chunk_context, asked if is_asked else "none")
        usual = repair_policy(config.repair if repairs_states else after)
        if in_full and is_free and prompt.num_tokens < self._max_in_full:
            yield FullRepair()
        if likeness and has_looks:
            yield Names()
        if prompt.chunks:
            yield usual

    def _asked_repair(self, num_documents: int = 1) -> str:
        measured = ASKED_REPAIR if num_documents <= FEW_DOCUMENTS else MANY_ASKED_REPAIR
        return UNMEASURED_REPAIR if self._model.no_scores_reason else measured

    def arrange(
        self,
        prompt: Prompt,
        strategy: str | None = None,
        context: ChunkContext | None = None,
        window: RollingWindow | None = None,
        *,
        chunks_only: bool = False,
    ) -> Layout:
        """Arranges a prompt, to be answered with at least one token; with `chunks_only`, without texts and question.

        With a rolling window, question and answer may be of any length.

        Raises:
            InvalidPrompt: the prompt does not fit the strategy (InvalidOffset), or (PromptTooLong) the max position.
            InvalidSampling: the window exceeds the max position.
            NotMovable: it moves documents and the model does not allow that.
        """
        strategy, model, max_positions = strategy or self._config.position_strategy, self._model, self.max_positions
        adapter = adapter_of(prompt, model.adapters)
        if strategy == AUTO:
            end = 1 if window is None else window.num_positions - prompt.segments[-1].num_tokens
            strategy = choose_strategy(prompt.num_tokens + end, max_positions, is_movable=model.is_movable)
        context = context or self._contexts[strategy_named(strategy).name]
        if context == "companions":
            prompt = with_kin(prompt)
        if chunks_only:  # texts are computed with the request
            prompt = prompt.without_texts()
        layout = arrange(prompt, strategy, context, moves_sections=model.is_movable)
        if max_positions is not None and any(span.end > max_positions for span in layout.spans[:-1]):
            # the companions have no room
            layout = arrange(replace(prompt, companions=()), strategy, context, moves_sections=model.is_movable)
        if chunks_only:
            layout = replace(layout, spans=layout.spans[:-1])
        layout = replace(layout, adapter=adapter)
        if layout.is_moved and not model.is_movable:
            raise not_movable(model, strategy, context)
        if max_positions is not None:
            _check_offsets(layout, max_positions)
        if window is not None:
            check_positions(window, layout, max_positions)
        elif max_positions is not None:
            check_length(layout.last.end, max_positions, 0 if chunks_only else 1)
        if reason := model.why_unreadable(layout):
            raise InvalidPrompt(reason)
        return layout


def _remarks_on(prompt: Prompt, likeness: Likeness, policy: RepairPolicy, *, is_default: bool) -> list[str]:
    """What the report says of documents that are alike, or were read in full without being asked for."""
    if isinstance(policy, FullRepair):
        return [f"{IN_FULL} ({_alike_ones(prompt.chunks)})" if likeness else SHORT_IN_FULL] if is_default else []
    if likeness and isinstance(policy, Alike):
        return [LATER_IN_FULL]
    return [MIXED_UP] if likeness == "apart" else []


def _alike_ones(chunks: Sequence[Segment]) -> str:
    """The first two documents that are alike, for people."""
    pair = next(alike_pairs([chunk.token_ids or () for chunk in chunks]))
    return " and ".join(f"{name!r:.60}" if (name := chunks[each].name) else f"number {each + 1}" for each in pair)


def _is_exact(layout: Layout) -> bool:
    return exact_spans(layout).issuperset(index for index, span in enumerate(layout.spans) if span.is_chunk)


def adapter_of(prompt: Prompt, adapters: Mapping[str, LayoutAdapter]) -> LayoutAdapter:
    """The adapter that computes a prompt: the named one; by default the model's first one where it has documents.

    Raises:
        InvalidPrompt: there is none of this name.
    """
    if prompt.adapter:
        if prompt.adapter not in adapters:
            known = (
                ", ".join(map(repr, adapters)) or "none; load it with --adapter NAME=FOLDER, or LLM(model, adapter=…)"
            )
            raise InvalidPrompt(f"there is no adapter {prompt.adapter!r:.80}; loaded are {known}")
        return adapters[prompt.adapter]
    if prompt.adapter is None and prompt.chunks:
        return next(iter(adapters.values()), BASE_MODEL)
    return BASE_MODEL


def _check_offsets(layout: Layout, max_positions: int) -> None:
    """Raises InvalidOffset if a chunk's own offset moves it beyond the model's max position."""
    for span in layout.spans:
        offset, most = span.segment.position_offset, max_positions - 1 - span.num_tokens
        if offset is not None and span.end > max_positions and most >= 0:
            raise InvalidOffset(
                f"{span.segment.label} has position_offset {offset} and {span.num_tokens} tokens and needs positions "
                f"up to {span.end - 1}, but the model's are 0 to {max_positions - 1}; use an offset of at most {most}, "
                "which leaves one position for the question"
            )


def not_movable(model: EngineModel, strategy: str, context: ChunkContext) -> NotMovable:
    """The error for settings that move documents on a model that does not allow that."""
    return NotMovable(
        f"position_strategy={strategy!r} with chunk_context={context!r} moves documents, and this model does not allow "
        f"that ({model.immovable_reason}); use position_strategy='shared' with chunk_context='system', "
        "preamble='all' and find_documents='none', or position_strategy='absolute'"
    )


class OversizedPrompts:
    """Places a prompt as an ordinary one if its chunks can never be in the cache together.

    Asked when a request arrives, and again if it is refused later: pins and quotas may have taken the room meanwhile.
    """

    def __init__(self, placer: Placer, kv_cache: KVCache, *, is_on: bool) -> None:
        self._placer = placer
        self._kv_cache = kv_cache
        self._is_on = is_on

    def as_ordinary(self, placed: PlacedPrompt) -> tuple[PlacedPrompt, str] | None:
        """A prompt without room as an ordinary one, and why; None: it has room, or is too long for that, too."""
        prompt, pool = placed.prompt, self._kv_cache.request_pool
        if not self._is_on or not prompt.chunks or placed.window is not None:
            return None
        limit = self._placer.max_positions
        if limit is not None and sum(segment.num_tokens for segment in prompt.segments) > limit:
            return None  # too long for that, too
        num_blocks = self._kv_cache.num_too_large(placed.layout, prompt.salt, prompt.tenant)
        if num_blocks is None:
            return None
        joined = prompt.joined()
        if pool.blocks_for(joined.num_tokens + 1) > pool.num_blocks:
            return None
        try:
            ordinary = self._placer.place(joined)
        except PromptTooLong:
            return None
        return ordinary, (
            f"its documents need {num_blocks} blocks of {pool.block_size} tokens, more than the chunk cache has for "
            "them; computed as an ordinary prompt, in which documents see each other"
        )
