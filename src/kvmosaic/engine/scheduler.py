"""Step scheduler: selects the spans and answers that run in a step, within a token budget.

One step may hold the cache misses of several requests, their questions, and one token for every running answer: all
rows of a step write their keys before any row reads, layer by layer, so a question may be computed in the same step as
the chunks it sees. Running answers (decode) come first, then prompts (prefill), running and waiting ones, in the order
of their sort key: priority and arrival. A chunk that several requests miss is computed by the first; the others wait.

Tenants get equal shares, by weight: a free running slot goes to the tenant with the fewest, and the prefill budget of a
step is divided among the tenants with prompts to compute (see `Shares`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from kvmosaic.cache import KVCache, SpanAllocation
from kvmosaic.config import MAX_PRIORITY, EngineConfig
from kvmosaic.engine.admission import Admission, WaitingQueue
from kvmosaic.engine.likelihood import MAX_LOGIT_ROWS
from kvmosaic.engine.preemption import Preemption, computes_for_others
from kvmosaic.engine.rolling_window import max_at_once
from kvmosaic.engine.sequence import RunningSequences, Sequence, SequenceStatus
from kvmosaic.engine.shares import Shares
from kvmosaic.engine.step import WARM_STEP_SECONDS, ScheduledTokens, Step, StepBudget, StepTimes
from kvmosaic.engine.swap_space import SwapSpace
from kvmosaic.errors import OutOfBlocks

if TYPE_CHECKING:
    from kvmosaic.engine.chunk_offloader import ChunkOffloader

SEEN_SECONDS = 60.0
"""A tenant counts as present if it had unfinished requests within this time."""
MAX_TENANTS_TRIED = 8
"""Tenants for which one step tries to preempt others."""


class Scheduler:
    """Waiting and running sequences, and the policy that selects them for steps.

    Running sequences hold blocks; waiting ones hold none, or their swapped-out tokens in host memory.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        offloader: ChunkOffloader | None = None,
        swap: SwapSpace | None = None,
    ) -> None:
        """Schedules nothing yet.

        Args:
            kv_cache: plans and allocates.
            config: limits.
            clock: the engine's clock.
            offloader: prefetches chunks from the tiers, if there are any.
            swap: host memory for preempted answers, if any.
        """
        self.kv_cache = kv_cache
        self.config = config
        self.clock = clock
        self.running = RunningSequences(config, clock)
        self.shares = Shares()
        self.admission = Admission(kv_cache, self.running, self.shares, offloader, swap, clock)
        self.preemption = Preemption(kv_cache, self.shares, swap, clock)
        self.is_paused = False
        """Whether no sequence is admitted, so that the running ones can finish."""
        self._times = StepTimes()
        self._seen: dict[str, float] = {}
        """By tenant: when it last had unfinished requests."""
        self._num_steps = 0

    @property
    def num_preemptions(self) -> int:
        """Preemptions of running sequences, for any reason."""
        return sum(self.preemption.counts.values())

    @property
    def waiting(self) -> WaitingQueue:
        """Sequences that wait for a running slot or for blocks."""
        return self.admission.waiting

    @property
    def fetching(self) -> list[Sequence]:
        """Sequences that wait for chunks from the tiers."""
        return self.admission.fetching

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room, or for chunks from the tiers."""
        return len(self.waiting) + len(self.fetching)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence after those of the same priority."""
        self.admission.add(sequence)

    def start(self, sequence: Sequence) -> None:
        """Admits a sequence that holds its blocks already."""
        self.running.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence and frees its blocks; removing it twice is safe."""
        self.running.remove(sequence)
        self.admission.remove(sequence)
        finish = sequence.answer.finish
        has_ended = finish is not None and finish.reason == "stop"
        self._release(sequence, goes_on=has_ended and sequence.request.prompt.has_tools)
        sequence.status = SequenceStatus.FINISHED

    def replan(self, sequence: Sequence) -> None:
        """Frees a running sequence's blocks and queues it again: its layout has changed."""
        self.running.remove(sequence)
        sequence.replanned()
        self._release(sequence)
        self.add(sequence)

    def schedule(self) -> Step:
        """Selects what the next forward computes, and allocates room for it."""
        step, admission = Step(), self.admission
        self.kv_cache.begin_step()
        admission.begin_step()
        self._note_present()
        budget = StepBudget(self._max_tokens)
        self._preempt_for_waiting()
        admission.refused.clear()
        ahead, behind = self._ahead()
        if ahead:
            others = (self.running.num_by_tenant.keys() | set(self.waiting.tenants)) - ahead
            admission.passed_over = set(ahead)
            self._schedule(budget, step, others)
            admission.passed_over, admission.is_full = set(), False
        if not ahead or not any(work.sequence.tenant in behind for work in step.works):
            self._schedule(budget, step, ahead or None)  # the tenants served least have no room: an ordinary step
        admission.candidate = None
        return step

    def _answering(self, only: Collection[str] | None) -> list[Sequence]:
        """Answers that may decode a token in this step.

        A step for some tenants omits answers of others where they would make it longer. While there are several
        tenants, a step has no more answers than take about `SHARED_STEP_SECONDS`: the ones that have waited longest for
        a token. Tenants with few answers have all of theirs in every step.
        """
        self._num_steps += 1
        answering = [sequence for sequence in self._in_order() if sequence.pending is not None]
        if only is not None and self._times.are_longer(sum(sequence.tenant not in only for sequence in answering)):
            answering = [sequence for sequence in answering if sequence.tenant in only]
        if len(self._seen) < 2 or not self._times.are_longer(len(answering)):
            return answering
        most = self._times.max_answers()
        if most is None or len(answering) <= most:
            return answering
        few = {tenant for tenant, num in self.running.num_by_tenant.items() if num <= most // len(self._seen)}
        chosen = sorted(answering, key=lambda sequence: (sequence.tenant not in few, sequence.last_step))[:most]
        return [sequence for sequence in answering if sequence in chosen]

    def note_step(self, step: Step, seconds: float) -> None:
        """Records the duration of a step, and charges it to its tenants by their tokens."""
        num_tokens = step.num_tokens
        self._times.note(num_tokens, len(step.works), seconds)
        self.shares.note_step(seconds)
        for work in step.works:
            self.shares.note_served(work.sequence.tenant, seconds * work.num_tokens / num_tokens)
        if self.preemption.swap is not None:
            num_prefilled = sum(work.num_tokens for work in step.works if work.num_tokens > 1)
            self.preemption.swap.cost.note_step(num_tokens, num_prefilled, seconds)

    def _note_present(self) -> None:
        """Records which tenants have unfinished requests, and drops tenants that have had none for long."""
        now, present = self.clock(), self.running.num_by_tenant.keys() | set(self.waiting.tenants)
        self._seen.update(dict.fromkeys(present, now))
        for tenant in [tenant for tenant, seen in self._seen.items() if now - seen > SEEN_SECONDS]:
            del self._seen[tenant]
            self.running.served.pop(tenant, None)
        self.shares.note_present(present, self._seen)

    @property
    def _max_tokens(self) -> int:
        """Token budget of the next step: smaller where a tenant or a request to come would wait long for its end."""
        most = self.config.max_num_batched_tokens
        if len(self._seen) > 1:
            return self._times.max_tokens(most)
        firsts = map(self.waiting.first_of, self.waiting.tenants)
        if all(each is None or each.request.is_warm_up for each in (*self.running, *firsts)):
            return self._times.max_tokens(most, WARM_STEP_SECONDS)
        return most

    def _ahead(self) -> tuple[set[str], set[str]]:
        """Tenants omitted from this step, and the tenants with prompts to compute for which they are.

        The latter have received less time, at the same priority or higher.
        """
        wanting = self._wanting()
        if len(self.running.num_by_tenant.keys() | wanting) < 2:
            return set(), set()
        priorities: dict[str, int] = {}
        for tenant in wanting:
            if (first := self.waiting.first_of(tenant)) is not None:
                priorities[tenant] = first.request.priority
        for running in self.running:
            if running.tenant in wanting and running.is_reading:
                priority = running.request.priority
                priorities[running.tenant] = max(priorities.get(running.tenant, priority), priority)
        highest: dict[str, int] = {}
        for running in self.running:
            highest[running.tenant] = max(highest.get(running.tenant, -MAX_PRIORITY), running.request.priority)
        pairs = {
            (other, tenant)
            for tenant, priority in priorities.items()
            for other, most in highest.items()
            if most <= priority and self.shares.is_behind(tenant, other)
        }
        return {other for other, _ in pairs}, {tenant for _, tenant in pairs}

    def _schedule(self, budget: StepBudget, step: Step, only: Collection[str] | None = None) -> None:
        """Fills a step: answers first, then prompts.

        Args:
            budget: token and read budget of the step.
            step: the step being assembled.
            only: tenants that it is for; None: all of them.
        """
        for sequence in self._answering(only):
            is_answering = sequence.status is SequenceStatus.RUNNING and sequence.pending is not None
            if is_answering and budget.num_tokens > 0 and self._grow(sequence, step):
                self._schedule_spans(sequence, budget, step, is_prefilled=True)
                sequence.last_step = self._num_steps
        budget.keep_looks()
        wanting = self._wanting() if only is None else self._wanting() & set(only)
        if len(wanting) > 1:
            budget.share(wanting, self.shares)
            self._schedule_prompts(budget, step, only)
            budget.lift()
        self._schedule_prompts(budget, step, only)

    def _in_order(self) -> list[Sequence]:
        """Running sequences by sort key; if blocks are short, the least loaded tenants first within a priority."""
        ranked = sorted(self.running, key=lambda running: running.sort_key)
        if len(self.running.num_by_tenant) == 1 or self.kv_cache.num_spare_blocks >= len(ranked):
            return ranked
        blocks = self.preemption.blocks_by_tenant(ranked, self.kv_cache.request_pool.name)
        return [
            sequence
            for _, group in groupby(ranked, key=lambda running: running.request.priority)
            for sequence in sorted(group, key=lambda running: self.shares.load(running.tenant, blocks[running.tenant]))
        ]

    def _wanting(self) -> set[str]:
        """Tenants with prompts to compute, running or waiting."""
        running = {sequence.tenant for sequence in self.running if sequence.is_reading}
        return running if self.is_paused or self.running.num_free <= 0 else running.union(self.waiting.tenants)

    def _schedule_prompts(self, budget: StepBudget, step: Step, only: Collection[str] | None) -> None:
        """Adds prefill work of running and waiting prompts, as far as the budget allows."""
        for sequence in sorted(self.running, key=lambda running: running.sort_key):
            if only is not None and sequence.tenant not in only:
                continue
            if sequence.status is SequenceStatus.RUNNING and not sequence.is_prefilled:
                if step.has(sequence) and (sequence.window is not None or sequence.is_stale):
                    continue  # what is in the step must keep its blocks
                self._admit(budget, step, before=sequence)
                num_tokens = budget.tokens_of(sequence.tenant)
                if sequence.must_roll and not (num_tokens and self._grow(sequence, step, num_tokens)):
                    continue
                self._schedule_spans(sequence, budget, step)
        self._admit(budget, step)

    def _preempt_for_waiting(self) -> None:
        """Preempts running sequences for a waiting one, if that makes room for it."""
        passed_over: set[str] = set()
        while not self.is_paused and len(passed_over) < MAX_TENANTS_TRIED:
            waiting = self.admission.first(passed_over)
            if waiting is None:
                return
            chosen = self.preemption.select_victims(
                waiting,
                self.running,
                self.running.num_by_tenant,
                is_full=self.running.num_free <= 0,
                was_refused=waiting in self.admission.refused,
            )
            for sequence in chosen:
                self.preempt(sequence)
            if chosen:
                self.admission.preferred = waiting
                return
            passed_over.add(waiting.tenant)

    def _admit(self, budget: StepBudget, step: Step, before: Sequence | None = None) -> None:
        """Admits waiting sequences (see `Admission.admit`), and adds their work."""
        while not self.is_paused and (sequence := self.admission.admit(budget, step, before)) is not None:
            self.start(sequence)
            self._schedule_spans(sequence, budget, step)

    def _schedule_spans(
        self, sequence: Sequence, budget: StepBudget, step: Step, *, is_prefilled: bool = False
    ) -> None:
        """Adds work for the spans of a sequence, in order, as far as its tenant's budget allows.

        If its prompt is computed, only the last span has any.
        """
        allocation = sequence.allocation
        assert allocation is not None
        if step.defers(sequence) and not computes_for_others(sequence):
            return
        if allocation.is_stale:
            # the request that computed one of its chunks dropped it: start over
            self.preempt(sequence)
            return
        first = len(allocation.spans) - 1 if is_prefilled else 0
        for index, span in enumerate(allocation.spans[first:], first):
            remaining = span.num_tokens - span.num_computed
            if not remaining or not span.can_advance:
                continue
            seen = (allocation.spans[view.span] for view in sequence.request.layout.spans[index].views)
            count = min(remaining, budget.tokens_of(sequence.tenant))
            if not count or not (is_prefilled or _are_computed(seen)):
                continue
            num_seen = len(sequence.request.layout.spans[index].views) + 1
            if count > 1 and sequence.window is None:
                count = min(count, max(budget.looks_of(sequence.tenant) // num_seen, 0 if step.works else 1))
            num_logits = 0
            if span is allocation.spans[-1] and not sequence.num_owed:
                num_logits = min(count, max(count - remaining + sequence.request.num_logits, 0))
                if sequence.request.scoring is not None and num_logits > (room := MAX_LOGIT_ROWS - step.num_scored):
                    count, num_logits = count - num_logits + room, room  # the rest in a later step
            if not count:
                continue
            first_token = span.num_computed
            states = self.kv_cache.advance(allocation, index, count)
            step.works.append(ScheduledTokens(sequence, index, first_token, count, num_logits, states))
            step.num_looks += count * num_seen
            budget.spend(sequence.tenant, count, count * num_seen)
            sequence.num_worked += count
        sequence.time_slice.note(sequence.num_done, self.clock())

    def _grow(self, sequence: Sequence, step: Step, budget: int = 1) -> bool:
        """Allocates a slot for the token sampled last, if need be by preempting others; False if it cannot run now.

        For an endless text, that is the next part of what is owed, after tokens outside its window are evicted.
        """
        allocation = sequence.allocation
        assert allocation is not None
        if sequence.num_skipped:
            self.kv_cache.skip_tokens(allocation, sequence.num_skipped)
        oldest = sequence.oldest_seen
        if sequence.window is not None and oldest is not None:
            self.kv_cache.evict_window(allocation, sequence.window.sink_tokens, oldest)
        token_ids = sequence.next_tokens(min(budget, self._max_rolled(sequence)))
        while True:
            try:
                step.copies.extend(self.kv_cache.append_slots(allocation, token_ids, is_private=oldest is not None))
            except OutOfBlocks:
                victim = self.preemption.victim(sequence, self.running, step)
                if victim is None and self.kv_cache.holds_copies(allocation):
                    victim = sequence  # it resumes with fewer blocks
                if victim is None:
                    step.ended.append(sequence)
                    return False
                self.preempt(victim)
                if victim is sequence:
                    return False
                continue
            sequence.pending = None
            return True

    def _max_rolled(self, sequence: Sequence) -> int:
        return max_at_once(sequence.window, self.kv_cache.request_pool.block_size) if sequence.window else 1

    def preempt(self, sequence: Sequence) -> None:
        """Takes the blocks of a running sequence; its tokens are restored or recomputed later."""
        self.preemption.save(sequence)
        sequence.time_slice.end(sequence.num_done)
        sequence.num_worked_before = sequence.num_worked
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preempted()
        self.add(sequence)

    def _release(self, sequence: Sequence, *, goes_on: bool = False) -> None:
        if sequence.allocation is not None:
            self.kv_cache.release(sequence.allocation, goes_on=goes_on)
            sequence.allocation = None


def _are_computed(spans: Iterable[SpanAllocation]) -> bool:
    return all(span.num_computed == span.num_tokens for span in spans)
