"""Engine: the loop that runs requests with continuous batching, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from kvmosaic.advice import ReuseAdvisor
from kvmosaic.cache import KVCache
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.engine.engine_core import EngineCore
from kvmosaic.engine.likelihood import Scoring, scoring_of
from kvmosaic.engine.placement import OversizedPrompts, PlacedPrompt, Placer
from kvmosaic.engine.priorities import WARM_PRIORITY, check_priority
from kvmosaic.engine.request import Request
from kvmosaic.engine.request_table import RequestTable
from kvmosaic.engine.rolling_window import check_memory, window_of
from kvmosaic.engine.scheduler import Scheduler
from kvmosaic.engine.sleep import SleepState
from kvmosaic.engine.swap_space import SwapSpace
from kvmosaic.errors import EngineStopped, InvalidPrompt, InvalidSampling, QueueFull, RequestTooLarge
from kvmosaic.layout import ChunkContext, Layout
from kvmosaic.prompt import Prompt, check_length
from kvmosaic.repair import RepairPolicy
from kvmosaic.sampling import GrammarCompiler, SamplingParams

if TYPE_CHECKING:
    from kvmosaic.engine.chunk_offloader import ChunkOffloader
    from kvmosaic.engine.model_runner import StepRunner


logger = logging.getLogger("kvmosaic")


class Engine:
    """Runs requests together: continuous batching over composed prompts.

        add_request ──▶ scheduler ──▶ step ──▶ runner (one forward) ──▶ sampler ──▶ answers
                             ▲                                             │
                             └──────────────── next step ◀─────────────────┘

    Not thread-safe: one thread calls `step`. Between two calls every block is free, cached, or owned by an unfinished
    request; `check_invariants` proves it.
    """

    core_type: ClassVar[type[EngineCore]] = EngineCore

    def __init__(
        self,
        runner: StepRunner,
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
        max_tokens = min(config.max_num_batched_tokens, model.max_forward_tokens or config.max_num_batched_tokens)
        swap = None
        if config.preemption != "recompute" and config.swap_bytes and not kv_cache.has_states:
            swap = SwapSpace(runner.storages["request"], kv_cache, config, clock)
        self.runner = runner
        self.kv_cache = kv_cache
        self.chunk_config = chunk_config
        self.config = config
        self.clock = clock
        self.offloader = offloader
        """Offloads chunks to the tiers, if there are any."""
        self.max_positions = min(limits, default=None)
        self.placer = Placer(model, chunk_config, self.max_positions, clock, kv_cache)
        """Places prompts."""
        self.scheduler = Scheduler(
            kv_cache, replace(config, max_num_batched_tokens=max_tokens), clock, offloader=offloader, swap=swap
        )
        self.grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
        """Compiles structured outputs, from any thread; requests with a compiled grammar are queued at once."""
        self.is_stopped = False
        self._sleep = SleepState(runner, kv_cache, offloader)
        self._requests = RequestTable(model, self.max_positions)
        is_on = chunk_config.oversized_prompts == "ordinary"
        self._oversized = OversizedPrompts(self.placer, kv_cache, is_on=is_on)
        advisor = ReuseAdvisor(self.placer.reads_in_full)
        self._core = self.core_type(
            runner, kv_cache, self.scheduler, self._requests, offloader, self._oversized, advisor, clock
        )
        self._log_time = clock()

    def arrange(
        self, prompt: Prompt, position_strategy: str | None = None, chunk_context: ChunkContext | None = None
    ) -> Layout:
        """Returns the layout of a tokenized prompt, as a request for it is placed before any repair.

        Raises:
            InvalidPrompt, NotMovable: see `add_request`.
        """
        return self.placer.arrange(prompt, position_strategy, chunk_context)

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
        self.scheduler.is_paused = True

    def wake(self) -> None:
        """Reallocates the memory and resumes all waiting requests; does nothing while awake.

        If there is not enough memory, this raises what torch raises, and the engine stays asleep.
        """
        self._sleep.wake()
        self.scheduler.is_paused = False

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
            priority: higher runs first, from -100 to 100; waiting requests age, so that none starves.
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
        elif (ordinary := self._oversized.as_ordinary(placed)) is not None:
            placed, note = ordinary
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
        num_likely: int | None = None,
        priority: int = 0,
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
            num_likely: how many of the most likely tokens are kept, too; None: none, and no ranks.
            priority: higher runs first, from -100 to 100.

        Raises:
            InvalidPrompt: the prompt, or prompt and continuation together, do not fit; see its subclasses.
            QueueFull, EngineStopped: see `add_request`.
        """
        scoring = scoring_of(
            continuation,
            self.runner.model.vocab_size,
            keeps_distributions=keeps_distributions,
            num_likely=num_likely,
        )
        placed = self.placer.place(prompt, repair=repair, strategy=position_strategy, context=chunk_context)
        if self.max_positions is not None:
            check_length(placed.layout.last.end, self.max_positions, scoring.num_tokens)
        if placed.repair is None or not placed.repair.is_measuring:
            placed = replace(placed, layout=scoring.continued(placed.layout))
        return self._queue(placed, SamplingParams(max_tokens=1), request_id, priority=priority, scoring=scoring)

    def add_warm_up(
        self,
        prompt: Prompt,
        *,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
        priority: int = WARM_PRIORITY,
    ) -> Request:
        """Queues the prefill of a prompt's uncached chunks, without an answer; its question is not used.

        It gives way to other requests, until it has waited for `-priority` minutes.
        """
        if not prompt.chunks:
            raise InvalidPrompt("a warm-up needs at least one document; got none")
        layout = self.placer.arrange(prompt, position_strategy, chunk_context, chunks_only=True)
        return self._queue(PlacedPrompt(prompt, layout), SamplingParams(max_tokens=1), None, priority=priority)

    def reset_prefix_cache(self, *, reset_external: bool = False) -> bool:
        """Drops all that is cached and not in use, pinned chunks too; returns whether nothing is left.

        With `reset_external`, also the entries in tiers that this engine has stored or loaded.
        """
        if reset_external and self.offloader is not None:
            self.offloader.delete_known()
        return self.kv_cache.reset()

    @property
    def advisor(self) -> ReuseAdvisor:
        """Explains misses, and counts lost reuse."""
        return self._core.advisor

    def abort(self, request_id: str) -> None:
        """Ends a request now; its blocks are freed when this returns.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        self._core.abort(self._requests.find(request_id))

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
        num_finished = -1
        try:
            added.extend(requests)  # an iterator may raise midway: what it gave before must be aborted
            while True:
                for request in added:
                    if request.error is not None:
                        raise request.error
                before, num_finished = num_finished, sum(request.is_finished for request in added)
                if progress is not None and before != num_finished:
                    progress(num_finished, len(added))
                if num_finished == len(added):
                    return added
                self.step()
        except BaseException:
            self.abort_all(added)
            raise

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
        self.runner.close()

    def step(self) -> list[Request]:
        """Runs one forward; returns the requests with new output (tokens, an end, or an error).

        An exception on the way (a failing device) ends the requests in the step: whatever the step was to compute is
        dropped from the caches, so that no later prompt can hit it. Waiting requests stay, except after an interrupt.
        """
        if self.is_asleep:
            return []
        try:
            news = self._core.step()
            if self._sleep.is_falling_asleep and not self.scheduler.running:
                self._fall_asleep()
        except BaseException as error:
            self._core.give_up(error)
            raise
        self._log_statistics()
        return news

    def check_invariants(self) -> None:
        """Checks pools, tables and caches for consistency."""
        self.kv_cache.check_invariants()
        if self.scheduler.preemption.swap is not None:
            self.scheduler.preemption.swap.check_invariants()

    def _fall_asleep(self) -> None:
        try:
            self._sleep.fall_asleep()
        except BaseException:
            self.wake()  # otherwise every step would try again
            raise

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
        _check_readable(placed.prompt, self.runner.max_chunk_tokens)
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
            scoring=scoring,
        )
        sequence = self._requests.add(request)
        try:
            self.scheduler.add(sequence)
        except BaseException:  # an interrupt: the caller does not get the request, so it cannot abort it
            self._core.end(request)
            raise
        return request

    def _log_statistics(self) -> None:
        interval, now = self.chunk_config.log_stats_seconds, self.clock()
        if interval is not None and now - self._log_time >= interval:
            self._log_time = now
            logger.info("chunk cache: %s", self.kv_cache.statistics().summary())


def _check_readable(prompt: Prompt, max_chunk_tokens: int | None) -> None:
    """Raises RequestTooLarge if the chunks of a prompt have more tokens than can be read at once."""
    num_tokens = sum(chunk.num_tokens for chunk in prompt.chunks)
    if max_chunk_tokens is not None and num_tokens > max_chunk_tokens:
        raise RequestTooLarge(
            f"the prompt's documents have {num_tokens:,} tokens, and this engine reads at most {max_chunk_tokens:,} "
            "cached tokens at once; send fewer documents"
        )
