"""Engine: the loop that runs requests with continuous batching, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import replace

import torch

from kvmosaic.cache import Chunk, KVCache
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.engine.chunk_offloader import ChunkOffloader
from kvmosaic.engine.deviations import choose_repair
from kvmosaic.engine.likelihood import Scoring, scoring_of
from kvmosaic.engine.placement import PlacedPrompt, Placer
from kvmosaic.engine.priorities import check_priority
from kvmosaic.engine.report import reuse_report
from kvmosaic.engine.request import Request
from kvmosaic.engine.request_table import RequestTable
from kvmosaic.engine.rolling_window import check_memory, window_of
from kvmosaic.engine.row_builder import rows_of
from kvmosaic.engine.scheduler import Scheduler
from kvmosaic.engine.sequence import Sequence, SequenceState
from kvmosaic.engine.sleep import SleepState
from kvmosaic.engine.step import ScheduledTokens, Step
from kvmosaic.engine.swap_space import SwapSpace
from kvmosaic.errors import EngineError, EngineStopped, InvalidPrompt, InvalidSampling, KVMosaicError, QueueFull
from kvmosaic.layout import ChunkContext
from kvmosaic.model.runner import Runner
from kvmosaic.prompt import Prompt, check_length
from kvmosaic.repair import RepairPolicy
from kvmosaic.sampling import GrammarCompiler, SamplingParams, sample

logger = logging.getLogger("kvmosaic")

_FETCH_SECONDS = 0.005
"""How long a step with nothing to compute waits for chunks from the tiers."""


class Engine:
    """Runs requests together: continuous batching over composed prompts.

        add_request ──▶ scheduler ──▶ step ──▶ runner (one forward) ──▶ sampler ──▶ answers
                             ▲                                             │
                             └──────────────── next step ◀─────────────────┘

    Not thread-safe: one thread calls `step`. Between two calls every block is free, cached, or owned by an unfinished
    request; `check_invariants` proves it.
    """

    def __init__(
        self,
        runner: Runner,
        kv_cache: KVCache,
        chunk_config: ChunkCacheConfig,
        config: EngineConfig,
        *,
        offloader: ChunkOffloader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Runs nothing yet.

        Args:
            runner: computes steps.
            kv_cache: plans and allocates blocks of the runner's pools.
            chunk_config: how documents are placed and repaired.
            config: limits of steps, queues and preemption.
            offloader: offloads chunks to the tiers, if there are any.
            clock: seconds, monotonic.

        Raises:
            InvalidRepair: the model does not support the repair policy that the settings name.
        """
        model = runner.model
        limits = [limit for limit in (config.max_model_len, model.max_positions) if limit]
        max_tokens = min(config.max_batched_tokens, model.max_forward_tokens or config.max_batched_tokens)
        swap = None
        if config.preemption != "recompute" and config.swap_bytes:
            swap = SwapSpace(runner.storages["request"], kv_cache, config, clock)
        self.runner = runner
        self.kv_cache = kv_cache
        self.chunk_config = chunk_config
        self.config = config
        self.clock = clock
        self.offloader = offloader
        """Offloads chunks to the tiers, if there are any."""
        self.max_positions = min(limits, default=None)
        self.placer = Placer(model, chunk_config, self.max_positions)
        """Places prompts."""
        self.scheduler = Scheduler(
            kv_cache, replace(config, max_batched_tokens=max_tokens), clock, offloader=offloader, swap=swap
        )
        self.grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
        """Compiles structured outputs, from any thread; requests with a compiled grammar are queued at once."""
        self.is_stopped = False
        self._sleep = SleepState(runner, kv_cache, offloader)
        self._requests = RequestTable(model, self.max_positions)
        self._log_time = clock()

    @property
    def repair(self) -> RepairPolicy:
        """Repair policy of requests that do not set one."""
        return self.placer.repair

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is unfinished; while the engine sleeps they wait."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._sleep.is_falling_asleep or (bool(self._requests) and not self.is_asleep)

    @property
    def is_asleep(self) -> bool:
        """Whether its pools hold no device memory; see `sleep`."""
        return self._sleep.is_asleep

    @property
    def sleep_level(self) -> int:
        """1 or 2 while it sleeps, or is about to; 0 otherwise."""
        return self._sleep.level

    @property
    def refuses(self) -> bool:
        """Whether requests are refused while it sleeps; otherwise they wait."""
        return self._sleep.refuses

    def sleep(self, level: int = 1, *, refuse: bool = False) -> None:
        """Releases the device memory of both pools once the running requests have finished; `step` does it.

        Args:
            level: 1 offloads chunks and prefixes to host memory; 2 drops them (tiers keep theirs). While asleep or
                falling asleep, the level stays, and only `refuse` changes.
            refuse: whether requests that arrive meanwhile are refused; otherwise they wait for `wake`.

        Raises:
            InvalidConfig: another level.
            EngineStopped: after `close`.
        """
        if self.is_stopped:
            raise EngineStopped("the engine is closed; create a new LLM")
        self._sleep.begin(level, refuse=refuse)
        self.scheduler.pause()

    def wake(self) -> None:
        """Reallocates the memory and resumes all waiting requests; does nothing while awake.

        If there is not enough memory, this raises what torch raises, and the engine stays asleep.
        """
        self._sleep.wake()
        self.scheduler.resume()

    @property
    def unfinished_requests(self) -> list[Request]:
        """Unfinished requests, in the order in which they were added."""
        return self._requests.unfinished

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        note: str = "",
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
        arrival_time: float | None = None,
    ) -> Request:
        """Validates, places and queues a tokenized prompt.

        Args:
            prompt: a prompt with token ids.
            params: sampling parameters.
            request_id: a name of your own; None generates one.
            priority: higher runs first, from -100 to 100; waiting requests age, so that none starves (see
                `EngineConfig.priority_aging_seconds`).
            note: why this prompt was not composed, for its report.
            position_strategy: overrides the configured one.
            chunk_context: overrides the configured one.
            arrival_time: on the engine's clock; None: now.

        Raises:
            InvalidPrompt: the prompt does not fit the model or the strategy; see its subclasses.
            InvalidPriority: a priority outside its range.
            InvalidSampling: the parameters do not fit the model.
            QueueFull: too many requests wait.
            EngineStopped: after `close`.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidSampling(f"sampling parameters must be SamplingParams, got {type(params).__name__}")
        window = window_of(params, self.runner.model)
        placed = self.placer.place(
            prompt, repair=params.repair, strategy=position_strategy, context=chunk_context, window=window
        )
        if window is not None:
            check_memory(window, self.kv_cache.request_pool)
        return self._queue(placed, params, request_id, priority=priority, note=note, arrival_time=arrival_time)

    def add_score(
        self,
        prompt: Prompt,
        continuation: List[int],
        *,
        repair: str | RepairPolicy | None = None,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
        request_id: str | None = None,
        keeps_distributions: bool = False,
    ) -> Request:
        """Queues a prompt with a given continuation; the request's `scoring` has the likelihood of each of its tokens.

        Args:
            prompt: a prompt with token ids.
            continuation: token ids that follow the prompt.
            repair: overrides the configured policy.
            position_strategy: overrides the configured one.
            chunk_context: overrides the configured one.
            request_id: a name of your own; None generates one.
            keeps_distributions: whether the full distributions are kept, too.

        Raises:
            InvalidPrompt: the prompt, or prompt and continuation together, do not fit; see its subclasses.
            QueueFull, EngineStopped: see `add_request`.
        """
        scoring = scoring_of(continuation, self.runner.model.vocab_size, keeps_distributions=keeps_distributions)
        placed = self.placer.place(prompt, repair=repair, strategy=position_strategy, context=chunk_context)
        if self.max_positions is not None:
            check_length(placed.layout, self.max_positions, scoring.num_tokens)
        if placed.repair is None or not placed.repair.is_measuring:
            placed = replace(placed, layout=scoring.continued(placed.layout))
        return self._queue(placed, SamplingParams(max_tokens=1), request_id, scoring=scoring)

    def add_warm_up(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
    ) -> Request:
        """Queues the prefill of a prompt's uncached chunks, without an answer; its question is not used."""
        if not prompt.chunks:
            raise InvalidPrompt("a warm-up needs at least one document; got none")
        layout = self.placer.arrange(prompt, position_strategy, chunk_context, chunks_only=True)
        return self._queue(PlacedPrompt(prompt, layout), SamplingParams(max_tokens=1), request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request now; its blocks are freed when this returns.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        request = self._requests.find(request_id)
        for sequence in self._requests.sequences_of(request):
            if sequence.state is not SequenceState.FINISHED:
                sequence.answer.end("abort")
        self._end(request)

    def run(self, requests: Iterable[Request], progress: Callable[[int, int], None] | None = None) -> list[Request]:
        """Steps until all of `requests` have finished; other unfinished requests continue as well.

        Args:
            requests: requests of this engine; an iterator may add them as it goes.
            progress: called with the numbers of finished and of all requests whenever another one has finished.

        Raises:
            KVMosaicError: the error of the first failed request. Then, and whenever something else is raised (while
                they are added, too), all of them are aborted.
        """
        added: list[Request] = []
        try:
            added.extend(requests)  # an iterator may raise midway: what it gave before must be aborted
            self._run(added, progress)
        except BaseException:
            self.abort_all(added)
            raise
        return added

    def _run(self, requests: list[Request], progress: Callable[[int, int], None] | None) -> None:
        num_finished = -1
        while True:
            if failed := next((request for request in requests if request.error is not None), None):
                assert failed.error is not None
                raise failed.error
            before, num_finished = num_finished, sum(request.is_finished for request in requests)
            if progress is not None and before != num_finished:
                progress(num_finished, len(requests))
            if num_finished == len(requests):
                return
            self.step()

    def abort_all(self, requests: Iterable[Request]) -> None:
        """Aborts the unfinished ones of `requests`."""
        for request in requests:
            if request in self._requests:
                self.abort(request.request_id)

    def close(self) -> None:
        """Aborts everything and refuses further requests; pending writes to the tiers are flushed first.

        Calling it again is safe.
        """
        self.abort_all(self.unfinished_requests)
        self.is_stopped = True
        if self.offloader is not None:
            self.offloader.tiered_store.close()

    def step(self) -> list[Request]:
        """Runs one forward; returns the requests with new output (tokens, an end, or an error).

        An exception on the way (a failing device) ends the requests in the step: whatever the step was to compute is
        dropped from the caches, so that no later prompt can hit it. Waiting requests stay, except after an interrupt.
        """
        try:
            return self._step()
        except BaseException as error:
            self._give_up(error)
            raise

    def _step(self) -> list[Request]:
        if self.is_asleep:
            return []
        step = self.scheduler.schedule()
        news: dict[str, Request] = {}
        self._end_refused(step, news)
        self._restore(step)
        if step.works:
            logits = self._forward(step)
            completed = step.completed_chunks()  # before sequences that finish release their blocks
            self._sample(step, logits, news)
            self._offload(completed)
        else:
            self._wait(step)
        self._finish_prefilled(news)
        if self._sleep.is_falling_asleep and not self.scheduler.running:
            self._sleep.fall_asleep(on_failure=self.wake)
        self._log_statistics()
        return list(news.values())

    def _end_refused(self, step: Step, news: dict[str, Request]) -> None:
        """Ends sequences for which there is no room, now or ever."""
        for sequence, error in step.failed:
            self._fail(sequence.request, error, news)
        for sequence in step.ended:
            sequence.answer.end("length")
            self._finish(sequence, news)

    def _restore(self, step: Step) -> None:
        """Writes swapped-out blocks, after the copies: blocks that the copies read may have been freed since."""
        if not step.restores:
            return
        swap = self.scheduler.preemption.swap
        assert swap is not None
        self.runner.copy(step.copies)
        step.copies.clear()
        swap.write(step.restores)

    def _wait(self, step: Step) -> None:
        """Ends a step that computes nothing; waits for chunks from the tiers, if that is why."""
        self.runner.copy(step.copies)
        self.kv_cache.end_step()
        if self.scheduler.fetching and self.offloader is not None:
            self.offloader.wait(_FETCH_SECONDS)

    def _finish_prefilled(self, news: dict[str, Request]) -> None:
        """Finishes warm-ups, and repairs requests whose signals are measured."""
        for sequence in list(self.scheduler.running):
            if sequence.request.is_warm_up and sequence.is_prefilled:
                sequence.request.reuse = reuse_report(sequence, None)
                self._finish(sequence, news)
            elif sequence.request.is_measuring and sequence.is_prefilled:
                self._repair(sequence, news)

    def _repair(self, sequence: Sequence, news: dict[str, Request]) -> None:
        """Chooses what to repair, once everything is measured, and plans the request again."""
        begin = self.clock()
        try:
            choose_repair(sequence, self.runner, self.scheduler.config.max_batched_tokens)
        except KVMosaicError as error:
            self._fail(sequence.request, error, news)
            return
        sequence.note_repair(self.clock() - begin)
        self.scheduler.replan(sequence)

    def check_invariants(self) -> None:
        """Checks pools, tables and caches for consistency."""
        self.kv_cache.check_invariants()
        if self.scheduler.preemption.swap is not None:
            self.scheduler.preemption.swap.check_invariants()

    def _queue(
        self,
        placed: PlacedPrompt,
        params: SamplingParams,
        request_id: str | None,
        *,
        priority: int = 0,
        note: str = "",
        arrival_time: float | None = None,
        scoring: Scoring | None = None,
    ) -> Request:
        if self.is_stopped:
            raise EngineStopped("the engine is closed; create a new LLM")
        self._sleep.check_admits()
        if self.scheduler.num_waiting >= self.config.max_waiting:
            raise QueueFull(f"{self.scheduler.num_waiting} requests wait already (max_waiting); wait, or raise it")
        priority, structure = check_priority(priority), params.structured_outputs
        request = Request(
            self._requests.new_id(request_id),
            placed,
            params,
            self.clock() if arrival_time is None else arrival_time,
            priority,
            "; ".join(part for part in (note, self.runner.model.frequency_note) if part),
            grammar=None if structure is None else self.grammars.compile(structure),
            aging_seconds=self.config.priority_aging_seconds,
            scoring=scoring,
        )
        sequence = self._requests.add(request)
        try:
            self.scheduler.add(sequence)
        except BaseException:  # an interrupt: the caller does not get the request, so it cannot abort it
            self._end(request)
            raise
        return request

    def _forward(self, step: Step) -> torch.Tensor:
        """Computes a step, and charges its time to the sequences, spans and tenants."""
        begin = self.clock()
        logits = self.runner.run([rows for work in step.works for rows in rows_of(work)], step.copies)
        self.kv_cache.end_step()
        seconds = self.clock() - begin
        self.scheduler.note_step(step, seconds)
        if self.offloader is not None:
            self.offloader.note_step(step.num_tokens, seconds)
        for work in step.works:
            work.sequence.note_work(work.span, work.num_tokens * seconds / step.num_tokens, begin)
        for chunk, spent in step.completed_chunks():
            self.kv_cache.record_compute(chunk, spent * 1e3)
        return logits

    def _offload(self, completed: List[tuple[Chunk, float]]) -> None:
        """Offloads the chunks that a step has completed; from here on it cannot fail."""
        if self.offloader is not None:
            for chunk, seconds in completed:
                self.offloader.on_computed(chunk, seconds)

    def _sample(self, step: Step, logits: torch.Tensor, news: dict[str, Request]) -> None:
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
            logits = logits[torch.tensor(rows, device=logits.device)]
        tokens = sample(logits, [sequence.sampling for sequence in sequences])
        now = self.clock()
        for sequence, token in zip(sequences, tokens, strict=True):
            request = sequence.request
            if request.first_token_time is None:
                request.first_token_time = now
                request.reuse = reuse_report(sequence, now - request.arrival_time)
            news[request.request_id] = request
            if token.failure:
                self._fail(request, InvalidSampling(token.failure), news)
            elif sequence.answer.append(token) is None:
                sequence.pending = token.token_id
            else:
                self._finish(sequence, news)

    def _score(self, work: ScheduledTokens, logits: torch.Tensor, news: dict[str, Request]) -> None:
        """Records the scores of some tokens of a continuation; the last of them ends the request."""
        sequence, request = work.sequence, work.sequence.request
        scoring = request.scoring
        assert scoring is not None
        first = request.layout.last.num_tokens - scoring.num_tokens
        scoring.note(work.first + work.num_tokens - work.num_logits - first, logits)
        if scoring.is_complete:
            request.first_token_time = self.clock()
            request.reuse = reuse_report(sequence, request.first_token_time - request.arrival_time)
            self._finish(sequence, news)

    def _log_statistics(self) -> None:
        interval, now = self.chunk_config.log_stats_seconds, self.clock()
        if interval is not None and now - self._log_time >= interval:
            self._log_time = now
            logger.info("%s", self.kv_cache.statistics())

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """The other n - 1 answers, once the first has its prompt computed; those beyond max_num_seqs wait."""
        request = sequence.request
        if sequence.answer.token_ids or len(request.answers) == request.params.n:
            return []
        assert sequence.allocation is not None
        forks = self._requests.fork(request)
        num_seats = max(self.scheduler.running.num_free, 0)
        for fork in forks[:num_seats]:
            fork.set_allocation(self.kv_cache.fork(sequence.allocation))
            self.scheduler.start(fork)
        for fork in forks[num_seats:]:
            self.scheduler.add(fork)
        return forks[:num_seats]

    def _finish(self, sequence: Sequence, news: dict[str, Request]) -> None:
        """Removes a sequence; ends its request with the last one. Safe if the request has already ended."""
        request = sequence.request
        if request not in self._requests:
            return
        news[request.request_id] = request
        self.scheduler.remove(sequence)
        if all(other.state is SequenceState.FINISHED for other in self._requests.sequences_of(request)):
            self._end(request)

    def _fail(self, request: Request, error: KVMosaicError, news: dict[str, Request]) -> None:
        """Ends a request with an error."""
        request.error = error
        news[request.request_id] = request
        self._end(request)

    def _end(self, request: Request) -> None:
        """Removes a request and frees what it holds; safe if it has ended."""
        if request not in self._requests:
            return
        for sequence in self._requests.remove(request):
            self.scheduler.remove(sequence)
        request.finished_time = self.clock()

    def _give_up(self, error: BaseException) -> None:
        """Cleans up after a failed step: nothing it was to compute may be found, and no request holds a block."""
        for sequence in list(self.scheduler.running):
            if sequence.allocation is not None:
                self.kv_cache.rollback_step(sequence.allocation)
        for request in self.unfinished_requests:
            if isinstance(error, Exception) and self._only_waits(request):
                continue
            if isinstance(error, KVMosaicError):
                request.error = error
            else:
                request.error = EngineError("a step failed, and with it the requests that took part in it")
                request.error.__cause__ = error
            self._end(request)

    def _only_waits(self, request: Request) -> bool:
        """Whether a request holds no blocks and was not part of the last step."""
        admission = self.scheduler.admission
        return all(
            (sequence in admission.waiting or sequence in admission.fetching) and sequence is not admission.candidate
            for sequence in self._requests.sequences_of(request)
        )
