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
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import groupby

from kvmosaic.cache import KVCache, SpanAllocation
from kvmosaic.config import EngineConfig
from kvmosaic.engine.chunk_offloader import ChunkOffloader
from kvmosaic.engine.likelihood import MAX_LOGIT_ROWS
from kvmosaic.engine.preemption import Preemption
from kvmosaic.engine.priorities import MAX_PRIORITY
from kvmosaic.engine.rolling_window import max_at_once
from kvmosaic.engine.sequence import Sequence, SequenceState
from kvmosaic.engine.shares import Shares
from kvmosaic.engine.step import ScheduledTokens, Step
from kvmosaic.engine.step_budget import StepBudget
from kvmosaic.engine.waiting_queue import WaitingQueue
from kvmosaic.errors import ChunkCacheFull, KVMosaicError, OutOfBlocks, QuotaInUse, RequestTooLarge

SHARED_STEP_SECONDS = 0.015
"""Target time of a prefill step while there is more than one tenant."""
SMALL_STEP = 4
"""Tokens of a step that takes hardly longer than an empty one."""
LEAST_ANSWERS = 8
"""min_answers for which a step always has a token each."""
LEAST_TOKENS = 128
"""min_tokens that a step may always have."""
SEEN_SECONDS = 60.0
"""A tenant counts as present if it had unfinished requests within this time."""
MAX_TENANTS_TRIED = 8
"""max_tenants for which one step tries to preempt others."""


class Scheduler:
    """Waiting and running sequences, and the policy that selects them for steps.

    Running sequences hold blocks; waiting ones hold none, or their swapped-out tokens in host memory.
    """

    def __init__(self, kv_cache: KVCache, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.kv_cache = kv_cache
        self.config = config
        self.clock = clock
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.fetching: list[Sequence] = []
        """Sequences that wait for chunks from the tiers."""
        self.offloader: ChunkOffloader | None = None
        """Prefetches chunks from the tiers, if there are any."""
        self.admitting: Sequence | None = None
        """The sequence that is being planned and allocated."""
        self.is_paused = False
        """Whether no sequence is admitted, so that the running ones can finish."""
        self.shares = Shares()
        self.preemption = Preemption(kv_cache, config, self.shares, clock)
        self._num_running: Counter[str] = Counter()
        """Running sequences by tenant."""
        self._seen: dict[str, float] = {}
        """By tenant: when it last had unfinished requests."""
        self._least_seconds: float | None = None
        """Recent duration of steps with hardly any tokens."""
        self._token_seconds: float | None = None
        """Additional time per token in steps of many tokens."""
        self._answer_seconds: float | None = None
        """Additional time per answer in steps of many answers."""
        self._num_steps = 0
        self._served: dict[str, float] = {}
        """By tenant: when one of its sequences was last admitted."""
        self._passed_over: set[str] = set()
        """Tenants with no room in the step being assembled."""
        self._refused: set[Sequence] = set()
        """Sequences that found no blocks in it."""
        self._made_way_for: Sequence | None = None
        """The sequence for which others were preempted in this step."""
        self._is_full = False
        """Whether no further sequence can be admitted to it."""

    @property
    def num_preemptions(self) -> int:
        """Preemptions of running sequences, for any reason."""
        return sum(self.preemption.counts.values())

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room, or for chunks from the tiers."""
        return len(self.waiting) + len(self.fetching)

    @property
    def num_free_seats(self) -> int:
        """Sequences that may still be admitted. Answers leave a quarter of every step to prompts."""
        max_tokens = self.config.max_num_batched_tokens
        return min(self.config.max_num_seqs, max(max_tokens - max_tokens // 4, 1)) - len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence after those of the same priority."""
        if self.offloader is not None and self.offloader.prefetch(sequence):
            self.fetching.append(sequence)
        else:
            self.waiting.add(sequence)

    def start(self, sequence: Sequence) -> None:
        """Admits a sequence that holds its blocks already."""
        self.running.append(sequence)
        self._num_running[sequence.tenant] += 1
        self._served[sequence.tenant] = self.clock()
        sequence.time_slice.begin(self.clock())

    def _leave(self, sequence: Sequence) -> None:
        """Frees the running slot of a sequence, whatever becomes of it."""
        self.running.remove(sequence)
        self._num_running[sequence.tenant] -= 1
        if not self._num_running[sequence.tenant]:
            del self._num_running[sequence.tenant]

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence and frees its blocks; removing it twice is safe."""
        if sequence in self.running:
            self._leave(sequence)
        self.waiting.remove(sequence)
        if sequence in self.fetching:
            self.fetching.remove(sequence)
        if self.offloader is not None:
            self.offloader.cancel(sequence)
        if self.preemption.swap is not None:
            self.preemption.swap.drop(sequence)
        self._release(sequence)
        sequence.state = SequenceState.FINISHED

    def replan(self, sequence: Sequence) -> None:
        """Frees a running sequence's blocks and queues it again: its layout has changed."""
        self._leave(sequence)
        self._release(sequence)
        sequence.replanned()
        self.add(sequence)

    def schedule(self) -> Step:
        """Selects what the next forward computes, and allocates room for it."""
        step = Step()
        self.admitting = None
        self.kv_cache.begin_step()
        self._collect_fetched()
        self._note_present()
        budget = StepBudget(self._max_tokens)
        self._passed_over, self._is_full, self._made_way_for = set(), False, None
        self._make_way()
        self._refused.clear()
        ahead, behind = self._ahead()
        if ahead:
            others = (self._num_running.keys() | set(self.waiting.tenants)) - ahead
            self._passed_over = set(ahead)
            self._schedule(budget, step, others)
            self._passed_over, self._is_full = set(), False
        if not ahead or not any(work.sequence.tenant in behind for work in step.works):
            self._schedule(budget, step, ahead or None)  # the tenants served least have no room: an ordinary step
        self.admitting = None
        return step

    def _lengthen(self, num_answers: int) -> bool:
        """Whether `num_answers` make a step longer by a quarter or more.

        With a large model they do not, because reading the weights dominates: leaving answers out gains nothing.
        """
        if self._least_seconds is None or self._answer_seconds is None:
            return False
        return num_answers * self._answer_seconds > self._least_seconds / 4

    def _answering(self, only: Collection[str] | None) -> list[Sequence]:
        """Answers that may decode a token in this step.

        A step for some tenants omits answers of others where they would make it longer. While there are several
        tenants, a step has no more answers than take about `SHARED_STEP_SECONDS`: the ones that have waited longest for
        a token. Tenants with few answers have all of theirs in every step.
        """
        self._num_steps += 1
        answering = [sequence for sequence in self._in_order() if sequence.pending is not None]
        if only is not None and self._lengthen(sum(sequence.tenant not in only for sequence in answering)):
            answering = [sequence for sequence in answering if sequence.tenant in only]
        if len(self._seen) < 2 or not self._lengthen(len(answering)):
            return answering
        assert self._answer_seconds is not None and self._least_seconds is not None
        room = SHARED_STEP_SECONDS - self._least_seconds
        most = max(LEAST_ANSWERS, int(room / self._answer_seconds))
        if len(answering) <= most or room <= 0:
            return answering
        few = {tenant for tenant, num in self._num_running.items() if num <= most // len(self._seen)}
        chosen = sorted(answering, key=lambda sequence: (sequence.tenant not in few, sequence.last_step))[:most]
        return [sequence for sequence in answering if sequence in chosen]

    def note_step(self, step: Step, seconds: float) -> None:
        """Records the duration of a step, and charges it to its tenants by their tokens."""
        num_tokens = step.num_tokens
        if num_tokens <= SMALL_STEP:
            self._least_seconds = 0.8 * (self._least_seconds or seconds) + 0.2 * seconds
        elif num_tokens == len(step.works) >= LEAST_ANSWERS and self._least_seconds is not None:
            each = max(seconds - self._least_seconds, 0.0) / num_tokens
            self._answer_seconds = each if self._answer_seconds is None else 0.8 * self._answer_seconds + 0.2 * each
        self.shares.note_step(seconds)
        for work in step.works:
            self.shares.note_served(work.sequence.tenant, seconds * work.num_tokens / num_tokens)
        if num_tokens >= LEAST_TOKENS // 2:
            each = max(seconds - (self._least_seconds or 0.0), 0.0) / num_tokens
            self._token_seconds = each if self._token_seconds is None else 0.8 * self._token_seconds + 0.2 * each

    def _note_present(self) -> None:
        """Records which tenants have unfinished requests, and drops tenants that have had none for long."""
        now, present = self.clock(), self._num_running.keys() | set(self.waiting.tenants)
        self._seen.update(dict.fromkeys(present, now))
        for tenant in [tenant for tenant, seen in self._seen.items() if now - seen > SEEN_SECONDS]:
            del self._seen[tenant]
            self._served.pop(tenant, None)
        self.shares.note_present(present, self._seen)

    @property
    def _max_tokens(self) -> int:
        """Token budget of the next step: smaller with more than one tenant, so that none waits long for its end.

        It takes about `SHARED_STEP_SECONDS`, or twice as long as an empty one: shorter ones would cost too much.
        """
        most = self.config.max_num_batched_tokens
        if len(self._seen) < 2 or not self._token_seconds:
            return most
        least = self._least_seconds or 0.0
        return min(most, max(LEAST_TOKENS, int(max(SHARED_STEP_SECONDS - least, least) / self._token_seconds)))

    def _ahead(self) -> tuple[set[str], set[str]]:
        """Tenants omitted from this step, and the tenants with prompts to compute for which they are.

        The latter have received less time, at the same priority or higher.
        """
        wanting = self._wanting()
        if len(self._num_running.keys() | wanting) < 2:
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
            is_answering = sequence.state is SequenceState.RUNNING and sequence.pending is not None
            if is_answering and budget.num_tokens > 0 and self._grow(sequence, step):
                self._schedule_spans(sequence, budget, step)
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
        if len(self._num_running) == 1 or self.kv_cache.num_spare_blocks >= len(ranked):
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
        return running if self.is_paused or self.num_free_seats <= 0 else running.union(self.waiting.tenants)

    def _schedule_prompts(self, budget: StepBudget, step: Step, only: Collection[str] | None) -> None:
        """Adds prefill work of running and waiting prompts, as far as the budget allows."""
        for sequence in sorted(self.running, key=lambda running: running.sort_key):
            if only is not None and sequence.tenant not in only:
                continue
            if sequence.state is SequenceState.RUNNING and not sequence.is_prefilled:
                if step.has(sequence) and (sequence.window is not None or sequence.is_stale):
                    continue  # what is in the step must keep its blocks
                self._admit(budget, step, before=sequence)
                num_tokens = budget.tokens_of(sequence.tenant)
                if sequence.must_roll and not (num_tokens and self._grow(sequence, step, num_tokens)):
                    continue
                self._schedule_spans(sequence, budget, step)
        self._admit(budget, step)

    def _collect_fetched(self) -> None:
        """Queues sequences whose chunks have arrived, or are not worth waiting for any longer."""
        if self.offloader is not None and self.fetching:
            settled = [sequence for sequence in self.fetching if self.offloader.check_fetches(sequence)]
            for sequence in settled:
                self.fetching.remove(sequence)
                self.waiting.add(sequence)

    def _make_way(self) -> None:
        """Preempts running sequences for a waiting one, if that makes room for it."""
        passed_over: set[str] = set()
        while not self.is_paused and len(passed_over) < MAX_TENANTS_TRIED:
            waiting = self._first_waiting(passed_over)
            if waiting is None:
                return
            chosen = self.preemption.select_victims(
                waiting,
                self.running,
                self._num_running,
                is_full=self.num_free_seats <= 0,
                was_refused=waiting in self._refused,
            )
            for sequence in chosen:
                self._preempt(sequence)
            if chosen:
                self._made_way_for = waiting
                return
            passed_over.add(waiting.tenant)

    def _first_waiting(self, passed_over: Collection[str]) -> Sequence | None:
        if (first := self._made_way_for) is not None and first in self.waiting and first.tenant not in passed_over:
            return first

        def load(tenant: str) -> float:
            return self.shares.load(tenant, self._num_running[tenant] + 1)

        return self.waiting.first(passed_over, load, self._served)

    def _admit(self, budget: StepBudget, step: Step, before: Sequence | None = None) -> None:
        """Admits waiting sequences: in a priority, tenants with the fewest running sequences first, then by sort key.

        Args:
            budget: remaining budget of the step.
            step: the step being assembled.
            before: a running sequence that is computed next; only sequences that sort before it are admitted.
        """
        spent: set[str] = set()
        while not self.is_paused and not budget.is_spent and self.num_free_seats > 0 and not self._is_full:
            sequence = self._first_waiting(self._passed_over | spent)
            if sequence is None or (before is not None and sequence.sort_key >= before.sort_key):
                return
            if not budget.tokens_of(sequence.tenant) or not budget.looks_of(sequence.tenant):
                spent.add(sequence.tenant)
                continue
            self.admitting = sequence
            begin = self.clock()
            prompt = sequence.request.prompt
            plan = self.kv_cache.plan(sequence.layout, prompt.salt, prompt.tenant)
            if self.offloader is not None:
                if self.fetching and not self.offloader.reserve_staging(sequence, plan):
                    self._is_full = True
                    return  # fetching sequences continue soon, then it is next
                if self.offloader.prefetch(sequence, plan):
                    self.waiting.remove(sequence)
                    self.fetching.append(sequence)
                    continue
            try:
                allocation = self.kv_cache.allocate(plan, again=sequence.was_replanned)
            except OutOfBlocks as error:
                self._refused.add(sequence)
                if self.running and isinstance(error, QuotaInUse):
                    self._passed_over.add(prompt.tenant)  # the others need not wait for this tenant
                    continue
                if self.running:
                    self._is_full = True
                    return
                self._refuse(sequence, RequestTooLarge(f"the request cannot run even alone: {error}"), step)
                continue
            except (ChunkCacheFull, RequestTooLarge) as error:
                self._refuse(sequence, error, step)
                continue
            self.waiting.remove(sequence)
            sequence.set_allocation(allocation)
            step.copies.extend(allocation.copies)
            sequence.allocate_seconds = self.clock() - begin
            if self.offloader is not None:
                self.offloader.load(sequence)
            if self.preemption.swap is not None and (restore := self.preemption.swap.restore(sequence)) is not None:
                step.restores.append(restore)
            self.start(sequence)
            self._schedule_spans(sequence, budget, step)

    def _refuse(self, sequence: Sequence, error: KVMosaicError, step: Step) -> None:
        """Removes a sequence that has no room: one with an answer ends there, one without has failed."""
        self.remove(sequence)
        if sequence.answer.token_ids:
            step.ended.append(sequence)
        else:
            step.failed.append((sequence, error))

    def _schedule_spans(self, sequence: Sequence, budget: StepBudget, step: Step) -> None:
        """Adds work for the spans of a sequence, in order, as far as its tenant's budget allows."""
        allocation = sequence.allocation
        assert allocation is not None
        if allocation.is_stale:
            # the request that computed one of its chunks dropped it: start over
            self._preempt(sequence)
            return
        for index, span in enumerate(allocation.spans):
            remaining = span.num_tokens - span.num_computed
            if not remaining:
                continue
            if span.chunk is not None and not span.is_owner:
                continue
            seen = (allocation.spans[view.span] for view in sequence.request.layout.spans[index].views)
            count = min(remaining, budget.tokens_of(sequence.tenant))
            if not count or not _are_computed(seen):
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
            step.works.append(ScheduledTokens(sequence, index, span.num_computed, count, num_logits))
            step.num_looks += count * num_seen
            self.kv_cache.advance(allocation, index, count)
            budget.spend(sequence.tenant, count, count * num_seen)
            sequence.num_worked += count
        sequence.time_slice.note(sequence.num_done, self.clock())

    def _grow(self, sequence: Sequence, step: Step, budget: int = 1) -> bool:
        """Allocates a slot for the token sampled last, if need be by preempting others; False if it cannot run now.

        For an endless text, that is the next part of what is owed, after tokens outside its window are evicted.
        """
        allocation = sequence.allocation
        assert allocation is not None
        if sequence.num_left_out:
            self.kv_cache.skip_tokens(allocation, sequence.num_left_out)
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
                self._preempt(victim)
                if victim is sequence:
                    return False
                continue
            sequence.pending = None
            return True

    def _max_rolled(self, sequence: Sequence) -> int:
        return max_at_once(sequence.window, self.kv_cache.request_pool.block_size) if sequence.window else 1

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the blocks of a running sequence; its tokens are restored or recomputed later."""
        self.preemption.save(sequence)
        sequence.time_slice.end(sequence.num_done)
        sequence.num_worked_before = sequence.num_worked
        self._leave(sequence)
        self._release(sequence)
        sequence.preempted()
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.allocation is not None:
            self.kv_cache.release(sequence.allocation)
            sequence.allocation = None


def _are_computed(spans: Iterable[SpanAllocation]) -> bool:
    return all(span.num_computed == span.num_tokens for span in spans)
