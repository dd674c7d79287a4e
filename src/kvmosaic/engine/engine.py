"""Engine: the loop that runs requests with continuous batching, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import replace
from itertools import count

import torch

from kvmosaic.cache import Chunk, KVCache
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.engine.chunk_offloader import ChunkOffloader
from kvmosaic.engine.deviations import measure_deviations
from kvmosaic.engine.likelihood import Scoring, scoring_of
from kvmosaic.engine.placement import place
from kvmosaic.engine.priorities import check_priority
from kvmosaic.engine.report import reuse_report
from kvmosaic.engine.request import Request
from kvmosaic.engine.request_repair import RequestRepair, check_model, repair_of, why_not_repaired
from kvmosaic.engine.rolling_window import check_memory, window_of
from kvmosaic.engine.scheduler import Scheduler
from kvmosaic.engine.sequence import Sequence, SequenceState
from kvmosaic.engine.step import ScheduledTokens, Step
from kvmosaic.engine.swap_space import SwapSpace
from kvmosaic.errors import (
    EngineAsleep,
    EngineError,
    EngineStopped,
    InvalidConfig,
    InvalidPrompt,
    InvalidSampling,
    KVMosaicError,
    QueueFull,
    UnknownRequest,
)
from kvmosaic.layout import ChunkContext, Layout, RollingWindow
from kvmosaic.model.runner import Runner
from kvmosaic.prompt import Prompt, check_length
from kvmosaic.repair import FullRepair, NoRepair, RepairPolicy, repair_policy
from kvmosaic.sampling import MAX_TOKENS, Answer, GrammarCompiler, SamplingParams, SamplingState, sample

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.kv_cache = kv_cache
        max_tokens = min(
            config.max_num_batched_tokens, runner.model.max_forward_tokens or config.max_num_batched_tokens
        )
        self.scheduler = Scheduler(kv_cache, replace(config, max_num_batched_tokens=max_tokens), clock)
        if config.preemption != "recompute" and config.swap_bytes:
            self.scheduler.preemption.swap = SwapSpace(runner.storages["request"], kv_cache, config, clock)
        self.chunk_config = chunk_config
        self.repair = repair_policy(chunk_config.repair)
        """Repair policy of requests that do not set one."""
        if chunk_config.says("repair"):
            check_model(self.repair, runner.model)
        self.config = config
        self.clock = clock
        model = runner.model
        self.grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
        """Compiles structured outputs, from any thread; requests with a compiled grammar are queued at once."""
        self.is_stopped = False
        self.sleep_level = 0
        """1 or 2 while it sleeps, or is about to; see `sleep`."""
        self.refuses = False
        """Whether requests are refused while it sleeps; otherwise they wait."""
        self._requests: dict[str, Request] = {}
        self._sequences: dict[str, list[Sequence]] = {}
        self._names = (f"request-{number}" for number in count())
        self._log_time = clock()
        limits = [limit for limit in (config.max_model_len, runner.model.max_positions) if limit]
        self.max_positions = min(limits, default=None)

    @property
    def offloader(self) -> ChunkOffloader | None:
        """Offloads chunks to the tiers, if there are any; set it before the first request."""
        return self.scheduler.offloader

    @offloader.setter
    def offloader(self, offloader: ChunkOffloader) -> None:
        self.scheduler.offloader = offloader

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is unfinished; while the engine sleeps they wait."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._is_falling_asleep or (bool(self._requests) and not self.is_asleep)

    @property
    def is_asleep(self) -> bool:
        """Whether its pools hold no device memory; see `sleep`."""
        return self.runner.is_asleep

    @property
    def _is_falling_asleep(self) -> bool:
        return self.sleep_level > 0 and not self.is_asleep

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
        if level not in (1, 2):
            raise InvalidConfig(f"a sleep has level 1 (keep caches in host memory) or 2 (drop them), got {level!r}")
        if self.is_stopped:
            raise EngineStopped("the engine is closed; create a new LLM")
        self.sleep_level = self.sleep_level or level
        self.refuses = refuse
        self.scheduler.is_paused = True

    def wake(self) -> None:
        """Reallocates the memory and resumes all waiting requests; does nothing while awake.

        If there is not enough memory, this raises what torch raises, and the engine stays asleep.
        """
        self.runner.wake()
        self.sleep_level, self.refuses, self.scheduler.is_paused = 0, False, False

    def _fall_asleep(self) -> None:
        try:
            if self.offloader is not None:
                self.offloader.flush()
            if self.sleep_level == 2:
                self.kv_cache.reset()
            self.runner.sleep(*self.kv_cache.used_blocks())
        except BaseException:
            self.wake()  # not retried in every step
            raise

    @property
    def unfinished_requests(self) -> list[Request]:
        """Unfinished requests, in the order in which they were added."""
        return list(self._requests.values())

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
        layout, repair = self._arrange(prompt, params.repair, position_strategy, chunk_context, window)
        if window is not None:
            check_memory(window, self.kv_cache.request_pool)
        return self._queue(prompt, layout, params, request_id, priority, note, arrival_time, window, repair)

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
        layout, plan = self._arrange(prompt, repair, position_strategy, chunk_context, None)
        if self.max_positions is not None:
            check_length(layout, self.max_positions, scoring.num_tokens)
        if plan is None or not plan.is_measuring:
            layout = scoring.continued(layout)
        params = SamplingParams(max_tokens=1)
        return self._queue(prompt, layout, params, request_id, repair=plan, scoring=scoring)

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
        layout = self.arrange(prompt, position_strategy, chunk_context=chunk_context, chunks_only=True)
        return self._queue(prompt, layout, SamplingParams(max_tokens=1), request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request now; its blocks are freed when this returns.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        if request_id not in self._requests:
            raise UnknownRequest(f"no request {request_id!r} is under way; it may have finished already")
        for sequence in self._sequences[request_id]:
            if sequence.state is not SequenceState.FINISHED:
                sequence.answer.end("abort")
        self._end(self._requests[request_id])

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
            if self._requests.get(request.request_id) is request:
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
        for sequence, error in step.failed:
            sequence.request.error = error
            self._end(sequence.request)
            news[sequence.request.request_id] = sequence.request
        for sequence in step.ended:
            sequence.answer.end("length")
            self._finish(sequence, news)
        if step.restores:
            self._restore(step)
        if step.works:
            self._forward(step, news)
        else:
            self.runner.copy(step.copies)
            self.kv_cache.end_step()
            if self.scheduler.fetching and self.offloader is not None:
                self.offloader.wait(_FETCH_SECONDS)
        for sequence in list(self.scheduler.running):
            if sequence.request.is_warm_up and sequence.is_prefilled:
                sequence.request.reuse = reuse_report(sequence, None)
                self._finish(sequence, news)
            elif sequence.request.is_measuring and sequence.is_prefilled:
                self._repair(sequence, news)
        if self._is_falling_asleep and not self.scheduler.running:
            self._fall_asleep()
        self._log_statistics()
        return list(news.values())

    def _repair(self, sequence: Sequence, news: dict[str, Request]) -> None:
        """Chooses what to repair, once everything is measured, and plans the request again."""
        request, repair = sequence.request, sequence.request.repair
        assert repair is not None
        begin = self.clock()
        try:
            if "deviation" in repair.signals:
                max_tokens = self.scheduler.config.max_num_batched_tokens
                repair.deviations = measure_deviations(sequence, self.runner, max_tokens)
            request.layout = repair.repaired_layout()
            if request.scoring is not None:
                request.layout = request.scoring.continued(request.layout)
        except KVMosaicError as error:
            request.error = error
            news[request.request_id] = request
            self._end(request)
            return
        spent = sequence.span_seconds
        index = len(repair.layout.spans) - 1
        spent[index] = spent.get(index, 0.0) + self.clock() - begin
        self.scheduler.replan(sequence)

    def check_invariants(self) -> None:
        """Checks pools, tables and caches for consistency."""
        self.kv_cache.check_invariants()
        if self.scheduler.preemption.swap is not None:
            self.scheduler.preemption.swap.check_invariants()

    def _arrange(
        self,
        prompt: Prompt,
        policy: str | RepairPolicy | None,
        strategy: str | None,
        context: ChunkContext | None,
        window: RollingWindow | None,
    ) -> tuple[Layout, RequestRepair | None]:
        """The layout that runs first, and the repair of the prompt."""
        is_default = policy is None and not self.chunk_config.says("repair")
        policy = self.repair if policy is None else repair_policy(policy)
        if prompt.is_plain:
            policy = NoRepair()  # nothing to repair
        first_window = None if isinstance(policy, FullRepair) else window
        layout = self.arrange(prompt, strategy, first_window, chunk_context=context)
        if is_default and why_not_repaired(policy, layout, self.runner.model, has_window=window is not None):
            policy = NoRepair()
        repair = repair_of(policy, layout, self.runner.model, has_window=window is not None)
        if repair is not None:
            layout = self.arrange(prompt.joined(), None, window) if repair.is_full else repair.first_layout()
        return layout, repair

    def arrange(
        self,
        prompt: Prompt,
        strategy: str | None = None,
        window: RollingWindow | None = None,
        *,
        chunk_context: ChunkContext | None = None,
        chunks_only: bool = False,
    ) -> Layout:
        """Places a tokenized prompt, as a request for it is placed before any repair.

        Args:
            prompt: a prompt with token ids.
            strategy: overrides the configured one.
            window: rolling window of the text.
            chunk_context: overrides the configured one.
            chunks_only: whether the question is omitted.

        Raises:
            InvalidPrompt, NotMovable: see `add_request`.
        """
        config = self.chunk_config
        strategy, context = strategy or config.position_strategy, chunk_context or config.chunk_context
        model = self.runner.model
        return place(prompt, strategy, context, model, self.max_positions, chunks_only=chunks_only, window=window)

    def _queue(
        self,
        prompt: Prompt,
        layout: Layout,
        params: SamplingParams,
        request_id: str | None,
        priority: int = 0,
        note: str = "",
        arrival_time: float | None = None,
        window: RollingWindow | None = None,
        repair: RequestRepair | None = None,
        scoring: Scoring | None = None,
    ) -> Request:
        if self.is_stopped:
            raise EngineStopped("the engine is closed; create a new LLM")
        if self.sleep_level and self.refuses:
            raise EngineAsleep(f"the engine sleeps (level {self.sleep_level}) and takes no requests; wake it first")
        if self.scheduler.num_waiting >= self.config.max_waiting:
            raise QueueFull(f"{self.scheduler.num_waiting} requests wait already (max_waiting); wait, or raise it")
        check_priority(priority)
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidPrompt(f"request_id must be a text, got {request_id!r:.80}")
        if not request_id:
            request_id = next(name for name in self._names if name not in self._requests)
        if request_id in self._requests:
            raise InvalidPrompt(f"a request {request_id!r} is under way already; choose another request_id")
        arrival_time = self.clock() if arrival_time is None else arrival_time
        aging = self.config.priority_aging_seconds
        request = Request(
            request_id,
            prompt,
            layout,
            params,
            arrival_time,
            priority,
            "; ".join(part for part in (note, self.runner.model.frequency_note) if part),
            aging_seconds=aging,
            window=window,
            repair=repair,
            scoring=scoring,
        )
        if params.structured_outputs is not None:
            request.grammar = self.grammars.compile(params.structured_outputs)
        sequence = self._new_sequence(request, 0)
        self._requests[request_id], self._sequences[request_id] = request, [sequence]
        try:
            self.scheduler.add(sequence)
        except BaseException:  # an interrupt: the caller does not get the request, so it cannot abort it
            self._end(request)
            raise
        return request

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        model = self.runner.model
        layout = request.repair.layout if request.is_measuring and request.repair is not None else request.layout
        room = None if self.max_positions is None else self.max_positions - layout.last.end
        if request.window is not None:
            room = MAX_TOKENS
        answer = Answer(request.params, model.tokenizer, model.eos_token_ids, index=index, max_tokens=room)
        prompt_ids = request.token_ids if request.params.has_penalties else ()
        sampling = SamplingState(
            request.params,
            prompt_ids,
            vocab_size=model.vocab_size,
            index=index,
            ending_ids=answer.rules.ending_ids,
            device=model.device,
            matcher=request.grammar.start() if request.grammar else None,
        )
        if not request.is_warm_up:
            request.answers.append(answer)
        return Sequence(request, answer, sampling)

    def _restore(self, step: Step) -> None:
        """Writes restored blocks, after the copies: blocks that the copies read may have been freed since."""
        swap = self.scheduler.preemption.swap
        assert swap is not None
        self.runner.copy(step.copies)
        step.copies.clear()
        swap.write(step.restores)

    def _forward(self, step: Step, news: dict[str, Request]) -> None:
        rows = [
            part
            for work in step.works
            for part in work.sequence.rows(work.span, work.first, work.num_tokens, work.num_logits)
        ]
        begin = self.clock()
        logits = self.runner.run(rows, step.copies)
        self.kv_cache.end_step()
        seconds = (self.clock() - begin) / step.num_tokens
        self.scheduler.note_step(step, seconds * step.num_tokens)
        if self.offloader is not None:
            self.offloader.note_step(step.num_tokens, seconds * step.num_tokens)
        if self.scheduler.preemption.swap is not None:
            num_prefilled = sum(work.num_tokens for work in step.works if work.num_tokens > 1)
            self.scheduler.preemption.swap.cost.note_step(step.num_tokens, num_prefilled, seconds * step.num_tokens)
        computed: list[tuple[Chunk, float]] = []
        for work in step.works:
            spent = work.sequence.span_seconds
            spent[work.span] = spent.get(work.span, 0.0) + seconds * work.num_tokens
            work.sequence.request.first_scheduled_time = work.sequence.request.first_scheduled_time or begin
            assert work.sequence.allocation is not None
            chunk = work.sequence.allocation.spans[work.span].chunk
            if chunk is not None and work.first + work.num_tokens == chunk.num_tokens:
                self.kv_cache.record_compute(chunk, spent[work.span] * 1e3)
                computed.append((chunk, spent[work.span]))
        self._sample(step, logits, news)
        if self.offloader is not None:  # from here on the step cannot fail
            for chunk, spent_seconds in computed:
                self.offloader.on_computed(chunk, spent_seconds)

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
                request.error = InvalidSampling(token.failure)
                self._end(request)
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
        forks = [self._new_sequence(request, index) for index in range(1, request.params.n)]
        self._sequences[request.request_id].extend(forks)
        num_seats = max(self.scheduler.num_free_seats, 0)
        for fork in forks[:num_seats]:
            fork.set_allocation(self.kv_cache.fork(sequence.allocation))
            self.scheduler.start(fork)
        for fork in forks[num_seats:]:
            self.scheduler.add(fork)
        return forks[:num_seats]

    def _finish(self, sequence: Sequence, news: dict[str, Request]) -> None:
        """Removes a sequence; ends its request with the last one. Safe if the request has already ended."""
        request = sequence.request
        if request.request_id not in self._requests:
            return
        news[request.request_id] = request
        self.scheduler.remove(sequence)
        if all(other.state is SequenceState.FINISHED for other in self._sequences[request.request_id]):
            self._end(request)

    def _end(self, request: Request) -> None:
        if request.request_id not in self._requests:
            return
        for sequence in self._sequences.pop(request.request_id):
            self.scheduler.remove(sequence)
        del self._requests[request.request_id]
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
        sequences = self._sequences[request.request_id]
        scheduler = self.scheduler
        waits = (*scheduler.fetching, *(s for s in sequences if s in scheduler.waiting))
        return all(sequence in waits and sequence is not self.scheduler.admitting for sequence in sequences)
