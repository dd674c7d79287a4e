"""Step scheduler: which spans and answers run now, within a token budget.

One step may hold the missing chunks of several requests, their questions, and one token for every answer under way: all
rows of a step write their keys before any row reads, layer by layer, so a question may be computed in the same step as
the chunks it sees. Running answers come first, then prompts, running and new ones, in the order of their rank: priority
and arrival. A chunk that several requests miss is computed by the first; the others wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvmosaic.cache import AttachedSpan, Planner
from kvmosaic.config import EngineConfig
from kvmosaic.engine.keeper import Keeper
from kvmosaic.engine.preemption import Preemption
from kvmosaic.engine.rolling import most_at_once
from kvmosaic.engine.scoring import MAX_LOGIT_ROWS
from kvmosaic.engine.sequence import Sequence, SequenceState
from kvmosaic.engine.step import Step, Work
from kvmosaic.engine.waiting import WaitingQueue
from kvmosaic.errors import ChunkCacheFull, KVMosaicError, OutOfBlocks, QuotaInUse, RequestTooLarge

MAX_STEP_LOOKS = 2**18
"""Rows of a step times the spans that each reads: a query is turned for each of them, which takes memory and time."""


class Scheduler:
    """The sequences that wait and those that run, and the rule that turns them into steps.

    Running sequences hold blocks; waiting ones hold nothing, or what they had computed in the memory of the host.
    """

    def __init__(self, planner: Planner, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.planner = planner
        self.config = config
        self.clock = clock
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.fetching: list[Sequence] = []
        """Those that wait for chunks from the tiers."""
        self.keeper: Keeper | None = None
        """Brings chunks back from the tiers, if there are any."""
        self.admitting: Sequence | None = None
        """The one that is being planned and attached at this moment."""
        self.is_paused = False
        """Whether nobody is taken in, so that those who run can end."""
        self.preemption = Preemption(planner, config, clock)
        self._passed_over: set[str] = set()
        """Tenants that have no room in the step being assembled."""
        self._is_full = False
        """Whether nobody else can be taken into it."""

    @property
    def num_preemptions(self) -> int:
        """Times that a running sequence gave its blocks away, whatever for."""
        return sum(self.preemption.counts.values())

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room, or for chunks from the tiers."""
        return len(self.waiting) + len(self.fetching)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence behind those of the same priority."""
        if self.keeper is not None and self.keeper.begin(sequence):
            self.fetching.append(sequence)
        else:
            self.waiting.add(sequence)

    def start(self, sequence: Sequence) -> None:
        """Takes in a sequence that holds its blocks already."""
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out and gives its blocks back; removing it twice is safe."""
        if sequence in self.running:
            self.running.remove(sequence)
        self.waiting.remove(sequence)
        if sequence in self.fetching:
            self.fetching.remove(sequence)
        if self.keeper is not None:
            self.keeper.drop(sequence)
        if self.preemption.swap is not None:
            self.preemption.swap.drop(sequence)
        self._release(sequence)
        sequence.state = SequenceState.FINISHED

    def replan(self, sequence: Sequence) -> None:
        """Gives a running sequence's blocks back and queues it again: its layout has changed."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.replanned()
        self.add(sequence)

    def schedule(self) -> Step:
        """Chooses what the next forward computes, and makes room for it."""
        step = Step()
        self.admitting = None
        self.planner.begin_step()
        budget = self.config.max_batched_tokens
        self._collect_fetched()
        self._passed_over, self._is_full = set(), False
        self._make_way()
        for sequence in sorted(self.running, key=lambda running: running.rank):
            is_answering = sequence.state is SequenceState.RUNNING and sequence.pending is not None
            if is_answering and budget and self._grow(sequence, step):
                budget -= self._schedule_spans(sequence, budget, step)
        for sequence in sorted(self.running, key=lambda running: running.rank):
            if sequence.state is SequenceState.RUNNING and not sequence.is_prefilled:
                budget = self._admit(budget, step, before=sequence)
                if sequence.must_roll and not (budget and self._grow(sequence, step, budget)):
                    continue
                budget -= self._schedule_spans(sequence, budget, step)
        self._admit(budget, step)
        self.admitting = None
        return step

    def _collect_fetched(self) -> None:
        """Queues those whose chunks have come, or are not worth waiting for any longer."""
        if self.keeper is not None and self.fetching:
            settled = [sequence for sequence in self.fetching if self.keeper.is_settled(sequence)]
            for sequence in settled:
                self.fetching.remove(sequence)
                self.waiting.add(sequence)

    def _make_way(self) -> None:
        """Has running sequences give way to a waiting one of much higher priority, if that makes room for it."""
        waiting = None if self.is_paused else self.waiting.first()
        if waiting is None:
            return
        for sequence in self.preemption.make_way(waiting, self.running):
            self._preempt(sequence)
            sequence.num_worked_before = sequence.num_worked

    def _admit(self, budget: int, step: Step, before: Sequence | None = None) -> int:
        """Takes in those that wait, in the order of their rank; returns what is left of the budget.

        Args:
            budget: tokens that the step may still have.
            step: the one being assembled.
            before: a running one that is computed next; only those that come before it.
        """
        while not self.is_paused and budget > 0 and len(self.running) < self.config.max_running and not self._is_full:
            if step.num_looks >= MAX_STEP_LOOKS:
                return budget
            sequence = self.waiting.first(self._passed_over)
            if sequence is None or (before is not None and sequence.rank >= before.rank):
                return budget
            self.admitting = sequence
            begin = self.clock()
            prompt = sequence.request.prompt
            plan = self.planner.plan(sequence.layout, prompt.salt, prompt.tenant)
            if self.keeper is not None:
                if self.fetching and not self.keeper.has_room(sequence, plan):
                    self._is_full = True
                    return budget  # those who fetch go on soon, and then it has its turn
                if self.keeper.begin(sequence, plan):
                    self.waiting.remove(sequence)
                    self.fetching.append(sequence)
                    continue
            try:
                attachment = self.planner.attach(plan, again=sequence.was_replanned)
            except OutOfBlocks as error:
                if self.running and isinstance(error, QuotaInUse):
                    self._passed_over.add(prompt.tenant)  # the others need not wait for this tenant
                    continue
                if self.running:
                    self._is_full = True
                    return budget
                self._refuse(sequence, RequestTooLarge(f"the request cannot run even alone: {error}"), step)
                continue
            except (ChunkCacheFull, RequestTooLarge) as error:
                self._refuse(sequence, error, step)
                continue
            self.waiting.remove(sequence)
            sequence.attached(attachment)
            step.copies.extend(attachment.copies)
            sequence.attach_seconds = self.clock() - begin
            if self.keeper is not None:
                self.keeper.finish(sequence)
            if self.preemption.swap is not None and (restore := self.preemption.swap.restore(sequence)) is not None:
                step.restores.append(restore)
            self.start(sequence)
            budget -= self._schedule_spans(sequence, budget, step)
        return budget

    def _refuse(self, sequence: Sequence, error: KVMosaicError, step: Step) -> None:
        """Takes out a sequence that has no room: one with an answer ends there, one without has failed."""
        self.remove(sequence)
        if sequence.answer.token_ids:
            step.ended.append(sequence)
        else:
            step.failed.append((sequence, error))

    def _schedule_spans(self, sequence: Sequence, budget: int, step: Step) -> int:
        """Adds work for the spans of a sequence, in order; returns the tokens it takes from the budget."""
        attachment = sequence.attachment
        assert attachment is not None
        if attachment.is_stale:
            # the request that computed one of its chunks gave it up: start over
            self._preempt(sequence)
            return 0
        taken = 0
        for index, span in enumerate(attachment.spans):
            remaining = span.num_tokens - span.num_computed
            if not remaining:
                continue
            if span.chunk is not None and not span.is_owner:
                continue
            seen = (attachment.spans[view.span] for view in sequence.request.layout.spans[index].views)
            if taken == budget or not _are_computed(seen):
                continue
            count = min(remaining, budget - taken)
            num_seen = len(sequence.request.layout.spans[index].views) + 1
            if count > 1 and sequence.window is None:
                count = min(count, max((MAX_STEP_LOOKS - step.num_looks) // num_seen, 0 if step.works else 1))
            num_logits = 0
            if span is attachment.spans[-1] and not sequence.num_owed:
                num_logits = min(count, max(count - remaining + sequence.request.num_logits, 0))
                if sequence.request.scoring is not None and num_logits > (room := MAX_LOGIT_ROWS - step.num_scored):
                    count, num_logits = count - num_logits + room, room  # the rest comes with a later step
            if not count:
                continue
            step.works.append(Work(sequence, index, span.num_computed, count, num_logits))
            step.num_looks += count * num_seen
            self.planner.advance(attachment, index, count)
            taken += count
        sequence.num_worked += taken
        return taken

    def _grow(self, sequence: Sequence, step: Step, budget: int = 1) -> bool:
        """Makes room for the token sampled last, if need be by preempting others; False if it cannot run now.

        For a text without end, that is the next part of what it owes, and what left its window is given back first.
        """
        attachment = sequence.attachment
        assert attachment is not None
        if sequence.num_left_out:
            self.planner.skip(attachment, sequence.num_left_out)
        oldest = sequence.oldest_seen
        if sequence.window is not None and oldest is not None:
            self.planner.roll(attachment, sequence.window.sink_tokens, oldest)
        token_ids = sequence.next_tokens(min(budget, self._most_rolled(sequence)))
        while True:
            try:
                step.copies.extend(self.planner.extend(attachment, token_ids, is_private=oldest is not None))
            except OutOfBlocks:
                victim = self.preemption.victim(sequence, self.running, step)
                if victim is None and self.planner.holds_copies(attachment):
                    victim = sequence  # it comes back with fewer blocks
                if victim is None:
                    step.ended.append(sequence)
                    return False
                self._preempt(victim)
                if victim is sequence:
                    return False
                continue
            sequence.pending = None
            return True

    def _most_rolled(self, sequence: Sequence) -> int:
        return most_at_once(sequence.window, self.planner.request_pool.block_size) if sequence.window else 1

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the blocks of a running sequence; its tokens are brought back or computed again later."""
        self.preemption.save(sequence)
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preempted()
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.attachment is not None:
            self.planner.release(sequence.attachment)
            sequence.attachment = None


def _are_computed(spans: Iterable[AttachedSpan]) -> bool:
    return all(span.num_computed == span.num_tokens for span in spans)
