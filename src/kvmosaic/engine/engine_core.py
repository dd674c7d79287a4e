"""Engine core: one step of continuous batching, from the schedule to the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from itertools import groupby
from typing import TYPE_CHECKING

from kvmosaic.advice import ReuseAdvisor
from kvmosaic.cache import Chunk, KVCache
from kvmosaic.engine.placement import OversizedPrompts
from kvmosaic.engine.report import reuse_report
from kvmosaic.engine.request import Request
from kvmosaic.engine.request_table import RequestTable
from kvmosaic.engine.row_builder import rows_of
from kvmosaic.engine.scheduler import Scheduler
from kvmosaic.engine.sequence import Sequence, SequenceStatus
from kvmosaic.engine.step import ScheduledTokens, Step
from kvmosaic.errors import ChunkCacheFull, EngineError, InvalidSampling, KVMosaicError
from kvmosaic.sampling import Array, namespace, sample

if TYPE_CHECKING:
    from kvmosaic.engine.chunk_offloader import ChunkOffloader
    from kvmosaic.engine.model_runner import StepRunner

logger = logging.getLogger("kvmosaic.engine")

_FETCH_SECONDS = 0.005
"""How long a step with nothing to compute waits for chunks from the tiers."""


class EngineCore:
    """Runs the requests of a table, one step at a time.

    schedule ──▶ restore ──▶ forward ──▶ sample ──▶ finish
       ▲                                               │
       └─────────────────── next step ◀────────────────┘
    """

    def __init__(
        self,
        runner: StepRunner,
        kv_cache: KVCache,
        scheduler: Scheduler,
        requests: RequestTable,
        offloader: ChunkOffloader | None,
        oversized: OversizedPrompts,
        advisor: ReuseAdvisor,
        clock: Callable[[], float],
    ) -> None:
        self.runner = runner
        self.advisor = advisor
        self._kv_cache = kv_cache
        self._scheduler = scheduler
        self._requests = requests
        self._offloader = offloader
        self._oversized = oversized
        self._clock = clock
        self._blamed: set[Request] = set()
        """The requests of a forward in which every one fails."""

    def step(self) -> list[Request]:
        """Runs one forward; returns the requests with new output."""
        step = self._scheduler.schedule()
        news: dict[str, Request] = {}
        self._end_refused(step, news)
        self._restore(step)
        if step.works:
            logits = self._forward(step, news)
            completed = step.completed_chunks()  # before sequences that finish release their blocks
            for chunk, seconds in completed:
                self._kv_cache.record_compute(chunk, seconds * 1e3)
            self._sample(step, logits, news)
            self._offload(completed)
        else:
            self._wait(step)
        self._finish_prefilled(news)
        return list(news.values())

    def abort(self, request: Request) -> None:
        """Ends an unfinished request now; its blocks are freed."""
        for sequence in self._requests.sequences_of(request):
            if sequence.status is not SequenceStatus.FINISHED:
                sequence.answer.end("abort")
        self.end(request)

    def end(self, request: Request) -> None:
        """Removes a request and frees what it holds; safe if it has ended."""
        if request not in self._requests:
            return
        for sequence in self._requests.remove(request):
            self._scheduler.remove(sequence)
        request.finished_time = self._clock()

    def _end_refused(self, step: Step, news: dict[str, Request]) -> None:
        """Ends sequences for which there is no room, now or ever."""
        for sequence, error in step.failed:
            if not (isinstance(error, ChunkCacheFull) and self._restart_as_ordinary(sequence.request)):
                self._fail(sequence.request, error, news)
        for sequence in step.ended:
            sequence.answer.end("length")
            self._finish(sequence, news)

    def _restart_as_ordinary(self, request: Request) -> bool:
        """Queues a request whose documents have no room any more again, as an ordinary prompt; False if it cannot."""
        if request.scoring is not None or request.is_warm_up or len(request.answers) > 1:
            return False
        if (ordinary := self._oversized.as_ordinary(request.placed)) is None:
            return False
        request.place_again(*ordinary)
        self._scheduler.add(self._requests.restart(request))
        return True

    def _restore(self, step: Step) -> None:
        """Writes swapped-out blocks, after the copies: blocks that the copies read may have been freed since."""
        if not step.restores:
            return
        swap = self._scheduler.preemption.swap
        assert swap is not None
        self.runner.copy(step.copies)
        step.copies.clear()
        swap.write(step.restores)

    def _wait(self, step: Step) -> None:
        """Ends a step that computes nothing; waits for chunks from the tiers, if that is why."""
        self.runner.copy(step.copies)
        self._kv_cache.end_step()
        if self._scheduler.fetching and self._offloader is not None:
            self._offloader.wait(_FETCH_SECONDS)

    def _finish_prefilled(self, news: dict[str, Request]) -> None:
        """Finishes warm-ups, and repairs requests whose signals are measured."""
        for sequence in list(self._scheduler.running):
            if sequence.request.is_warm_up and sequence.is_prefilled:
                sequence.request.reuse = reuse_report(sequence, None)
                self._finish(sequence, news)
            elif sequence.request.is_measuring and sequence.is_prefilled:
                self._repair(sequence, news)

    def _repair(self, sequence: Sequence, news: dict[str, Request]) -> None:
        """Chooses what to repair, once everything is measured, and plans the request again."""
        from kvmosaic.engine.deviations import choose_repair  # with torch; only models of transformers repair

        begin = self._clock()
        try:
            choose_repair(sequence, self.runner, self._scheduler.config.max_num_batched_tokens)
        except KVMosaicError as error:
            self._fail(sequence.request, error, news)
            return
        sequence.note_repair(self._clock() - begin)
        self._scheduler.replan(sequence)

    def _forward(self, step: Step, news: dict[str, Request]) -> Array:
        """Computes a step, and charges its time to the sequences, spans and tenants.

        If its forward fails, only the works that can be computed are left in the step.
        """
        begin = self._clock()
        self.runner.copy(step.copies)  # once: what they read may be written by the forward
        try:
            logits = self._run(step.works)
        except Exception as error:
            logits = self._run_apart(step, error, news)
        self._kv_cache.end_step()
        seconds = self._clock() - begin
        if not step.works:
            return logits
        self._scheduler.note_step(step, seconds)
        if self._offloader is not None:
            self._offloader.note_step(step.num_tokens, seconds)
        for work in step.works:
            work.sequence.note_work(work.span, work.num_tokens * seconds / step.num_tokens, begin)
        return logits

    def _run(self, works: List[ScheduledTokens]) -> Array:
        return self.runner.run([rows for work in works for rows in rows_of(work)])

    def _run_apart(self, step: Step, error: Exception, news: dict[str, Request]) -> Array:
        """Computes the works of a failed forward request by request, in order; a request that fails alone, too, ends.

        A request that reads what another one was to compute starts over, as does one whose attention is measured: the
        failed forward may have measured some of it.

        Raises:
            Exception: `error`, if there is one request only, or all fail, as on a device that is gone.
        """
        self._blamed = {work.sequence.request for work in step.works}
        if len(self._blamed) == 1:
            raise error
        failed: dict[Request, Exception] = {}
        logits: dict[int, Array] = {}
        for request, group in groupby(step.works, key=lambda work: work.sequence.request):
            works = list(group)
            if any(work.sequence.is_stale or (work.states is not None and work.states.is_lost) for work in works):
                self._roll_back(work.sequence for work in works)
                continue
            try:
                rows = self._run(works)
                rows = namespace(rows).asarray(rows, copy=True)  # the next forward may overwrite them
            except Exception as alone:
                failed[request] = alone
                self._roll_back(self._requests.sequences_of(request))
            else:
                first = 0
                for work in works:
                    logits[id(work)] = rows[first : first + work.num_logits]
                    first += work.num_logits
        if len(failed) == len(self._blamed):
            raise error
        self._blamed = set()
        for request, cause in failed.items():
            logger.error("a forward failed with one request alone, which ends", exc_info=cause)
            self._fail(request, _public(cause, "the forward of this request failed"), news)
        for sequence in dict.fromkeys(work.sequence for work in step.works if work.sequence.request.is_measuring):
            if sequence.allocation is not None and not sequence.is_stale:
                self._scheduler.preempt(sequence)
        self._restart_stale()
        step.works = [work for work in step.works if work.sequence.allocation is not None and id(work) in logits]
        parts = [logits[id(work)] for work in step.works]
        return namespace(parts[0]).concat(parts) if parts else None

    def _roll_back(self, sequences: Iterable[Sequence]) -> None:
        """Drops what a failed step was to compute for some sequences; who reads it becomes stale."""
        for sequence in sequences:
            if sequence.allocation is not None:
                self._kv_cache.rollback_step(sequence.allocation)

    def _restart_stale(self) -> None:
        """Requeues sequences that read what was dropped."""
        while stale := [sequence for sequence in self._scheduler.running if sequence.is_stale]:
            self._roll_back(stale)  # which may make others stale
            for sequence in stale:
                self._scheduler.preempt(sequence)

    def _offload(self, completed: List[tuple[Chunk, float]]) -> None:
        """Offloads the chunks that a step has completed; from here on it cannot fail."""
        if self._offloader is not None:
            for chunk, seconds in completed:
                self._offloader.on_computed(chunk, seconds)

    def _sample(self, step: Step, logits: Array, news: dict[str, Request]) -> None:
        sequences: list[Sequence] = []
        rows: list[int] = []
        row = 0
        for work in step.works:
            if work.num_logits and work.sequence.request.scoring is not None:
                self._score(work, logits[row : row + work.num_logits], news)
            elif work.num_logits:
                family = [work.sequence, *self._fork(work.sequence)]
                sequences.extend(family)
                rows.extend([row] * len(family))
            row += work.num_logits
        if not sequences:
            return
        if len(rows) != len(logits):
            logits = logits[rows]
        tokens = sample(logits, [sequence.sampling for sequence in sequences])
        now = self._clock()
        for sequence, token in zip(sequences, tokens, strict=True):
            request = sequence.request
            if request.first_token_time is None:
                request.first_token_time = now
                request.reuse = self.advisor.explain(request.prompt, reuse_report(sequence, now - request.arrival_time))
            news[request.request_id] = request
            if token.failure:
                self._fail(request, InvalidSampling(token.failure), news)
            elif sequence.answer.append(token) is None:
                sequence.pending = token.token_id
            else:
                self._finish(sequence, news)

    def _score(self, work: ScheduledTokens, logits: Array, news: dict[str, Request]) -> None:
        """Records the scores of some tokens of a continuation; the last of them ends the request."""
        sequence, request = work.sequence, work.sequence.request
        scoring = request.scoring
        assert scoring is not None
        first = request.layout.last.num_tokens - scoring.num_tokens
        scoring.note(work.first + work.num_tokens - work.num_logits - first, logits)
        if scoring.is_complete:
            request.first_token_time = self._clock()
            seconds = request.first_token_time - request.arrival_time
            request.reuse = self.advisor.explain(request.prompt, reuse_report(sequence, seconds))
            self._finish(sequence, news)

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """The other n - 1 answers, once the first has its prompt computed; those beyond max_num_seqs wait."""
        request = sequence.request
        if sequence.answer.token_ids or len(request.answers) == request.params.n:
            return []
        assert sequence.allocation is not None
        forks = self._requests.fork(request)
        num_seats = max(self._scheduler.running.num_free, 0)
        for fork in forks[:num_seats]:
            fork.set_allocation(self._kv_cache.fork(sequence.allocation))
            self._scheduler.start(fork)
        for fork in forks[num_seats:]:
            self._scheduler.add(fork)
        return forks[:num_seats]

    def _finish(self, sequence: Sequence, news: dict[str, Request]) -> None:
        """Removes a sequence; ends its request with the last one. Safe if the request has already ended."""
        request = sequence.request
        if request not in self._requests:
            return
        news[request.request_id] = request
        self._scheduler.remove(sequence)
        if all(other.status is SequenceStatus.FINISHED for other in self._requests.sequences_of(request)):
            self.end(request)

    def _fail(self, request: Request, error: KVMosaicError, news: dict[str, Request]) -> None:
        """Ends a request with an error."""
        request.error = error
        news[request.request_id] = request
        self.end(request)

    def give_up(self, error: BaseException) -> None:
        """Cleans up after a failed step: nothing it was to compute may be found.

        The requests of a failed forward end. If something else failed, all end but waiting ones, and after an
        interrupt these, too.
        """
        blamed, self._blamed = self._blamed, set()
        if not isinstance(error, Exception):
            blamed = set()
        running = [sequence for sequence in self._scheduler.running if not blamed or sequence.request in blamed]
        self._roll_back(running)
        for request in self._requests.unfinished:
            if blamed and request not in blamed:
                continue
            if isinstance(error, Exception) and self._only_waits(request):
                continue
            request.error = _public(error, "a step failed, and with it the requests that took part in it")
            self.end(request)
        self._restart_stale()

    def _only_waits(self, request: Request) -> bool:
        """Whether a request holds no blocks and was not part of the last step."""
        admission = self._scheduler.admission
        return all(
            (sequence in admission.waiting or sequence in admission.fetching) and sequence is not admission.candidate
            for sequence in self._requests.sequences_of(request)
        )


def _public(error: BaseException, text: str) -> KVMosaicError:
    """The error that a client gets: no detail of ours in it."""
    if isinstance(error, KVMosaicError):
        return error
    public = EngineError(text)
    public.__cause__ = error
    return public
