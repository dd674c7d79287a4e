"""Scheduler side of the connector: finds chunks, requests missing ones, and plans what a step moves."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.request import RequestStatus

from kvmosaic.errors import KVMosaicError
from kvmosaic.vllm.contract import FIELD, UPDATE, Composition, trained_positions
from kvmosaic.vllm.operations import Operations, ShiftedTokens, WorkerFacts
from kvmosaic.vllm.report import ComposedReport, ReportSender
from kvmosaic.vllm.report_counters import ReportCounters
from kvmosaic.vllm.scheduler.block_store import KV_GROUP, BlockStore
from kvmosaic.vllm.scheduler.chunk_prompts import (
    first_private_block,
    recomputed_runs,
    take_apart,
)
from kvmosaic.vllm.scheduler.chunk_requests import ChunkRequests
from kvmosaic.vllm.scheduler.composed import (
    ChunkLookup,
    ComposedHasher,
    ComposedRequest,
    FirstOperations,
    OwnTokensHasher,
    admit,
    hide_documents,
    move_in,
    report_of,
    show_documents,
)
from kvmosaic.vllm.scheduler.document_pool import read_claims
from kvmosaic.vllm.scheduler.eviction_order import EvictionOrder
from kvmosaic.vllm.scheduler.in_place import InPlacePlan
from kvmosaic.vllm.scheduler.tier_side import LoadedChunk, Tiering
from kvmosaic.vllm.scheduler.trouble import (
    Bypass,
    connectors_trouble,
    default_repair,
    engine_trouble,
    reads_in_place,
    request_trouble,
    why_copied,
    with_default_repair,
    workers_trouble,
)
from kvmosaic.vllm.settings import is_composing_required, require_composing

_MAX_ASKED = 8
"""Most retries of a chunk for one request, if it is evicted each time before all others are there."""

_log = logging.getLogger(__name__)


class SchedulerSide:
    """Tracks every request with segments from arrival to finish.

        arrival          boundaries are read; chunks are looked up; missing ones are requested
        being scheduled  waits (`match` gives None) until every piece was found before this step; then its blocks are
                         held until the step is complete
        admitted         its pieces become moves into its own blocks
        step complete    `operations` for the workers

    Nothing here raises once vLLM is up: its engine would die. What cannot be composed is bypassed, with the reason in
    its report.
    """

    def __init__(self, config: Any, kv_cache_config: Any, scheduler: Any) -> None:
        self._config = config
        self._scheduler = scheduler
        extra = config.kv_transfer_config.kv_connector_extra_config
        self._is_required = is_composing_required(extra, os.environ)
        connectors = scheduler.vllm_config.kv_transfer_config, config.kv_transfer_config
        self._trouble = engine_trouble(config, kv_cache_config) or connectors_trouble(*connectors)
        self._is_alone = connectors[0] is connectors[1]
        """Whether there is no other connector."""
        self._facts: tuple[WorkerFacts, ...] = ()
        self._default_repair = 0
        self._num_workers = config.parallel_config.tensor_parallel_size * config.parallel_config.pipeline_parallel_size
        self._block_size = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._digest = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        self._requests: dict[str, ComposedRequest] = {}
        self._invalid: dict[str, str] = {}
        """Requests with invalid boundaries, and the reason."""
        self.tiering = Tiering.of(config, kv_cache_config, self._num_workers, lambda: self.store)
        self._chunks = ChunkRequests(scheduler.add_request, self.tiering)
        self._waiters: dict[Any, set[str]] = {}
        """In-flight chunk prompts, and the composed requests that wait for them."""
        self._admitted: dict[str, FirstOperations] = {}
        """Operations of requests that are admitted in the step being scheduled."""
        self._failed: list[int] = []
        """Blocks of requests that are given up in the step being scheduled, which vLLM counts as computed."""
        self._moved: dict[str, int] = {}
        """Tokens moved or loaded into requests that begin in the step being scheduled."""
        self._lookup = ChunkLookup(lambda: self.store, self._block_size)
        self._retrying: str | None = None
        """The one request that may submit a chunk again: if all did, they would evict each other's."""
        self._num_asked = 0
        self.tally = ReportCounters()
        self._sender = ReportSender()
        self._store: BlockStore | None = None
        self._order = EvictionOrder(config, kv_cache_config, scheduler)

    @property
    def store(self) -> BlockStore:
        """The scheduler's block pool; it is created after the connector."""
        if self._store is None:
            self._store = BlockStore(self._scheduler.kv_cache_manager.block_pool)
            self._order.open(self._store)
        return self._store

    @property
    def order(self) -> EvictionOrder:
        """The order in which vLLM evicts blocks."""
        _ = self.store
        return self._order

    @property
    def trouble(self) -> str:
        """Why no request is composed here; empty: they are."""
        return self._trouble.reason if self._trouble else ""

    def on_handshake(self, facts: Mapping[Any, WorkerFacts]) -> None:
        """Handles the workers' capabilities, once at startup.

        Raises:
            InvalidConfig: documents cannot be composed, and that is required: vLLM does not start.
        """
        self._facts = tuple(facts[rank] for rank in sorted(facts))
        self._trouble = self._trouble or workers_trouble(self._facts, self._num_workers)
        if self._trouble:
            _log.warning("kvmosaic: documents are not composed: %s", self._trouble.reason)
            if self._is_required:
                require_composing(self._trouble.reason)
            return
        self._default_repair = default_repair(self._facts)
        _log.info("kvmosaic: documents are composed; kvmosaic tune measures how near answers are to full attention")
        if self.tiering is not None:
            self.tiering.on_handshake(dict(enumerate(fact.fingerprint for fact in self._facts)))

    # Arrival and finish

    def on_request(self, request: Any) -> None:
        """Handles an added request; if it has segments, they are looked up, and missing ones are requested."""
        if request.request_id in self._chunks:
            return
        if update := _update_of(request):
            self.order.update(read_claims(update))
            return
        try:
            composition = Composition.from_params(
                request.kv_transfer_params,
                request.num_prompt_tokens,
                trained_positions=trained_positions(self._config.model_config),
                vocab_size=self._config.model_config.get_vocab_size(),
                default_repair=self._default_repair,
            )
        except KVMosaicError as error:
            _log.debug("kvmosaic: request %s is answered as an ordinary prompt: %s", request.request_id, error)
            self._invalid[request.request_id] = str(error)
            self.tally.bypassed("invalid")
            return
        if composition is None:
            return
        token_ids = request.prompt_token_ids or range(request.num_prompt_tokens)
        layout = composition.layout(token_ids)
        longest = max((span.end for span in layout.spans if span.is_chunk), default=0) + self._block_size
        if composition.companions and longest > self._config.model_config.max_model_len:  # they have no room
            composition = composition.without_companions(self._default_repair)
            layout = composition.layout(token_ids)
        composition = with_default_repair(composition, layout, self._facts)
        composed = ComposedRequest(request, composition, layout, request._block_hasher)
        self._requests[request.request_id] = composed
        in_place = reads_in_place(request, composition, layout, self._facts, is_alone=self._is_alone)
        composed.bypass = self._trouble or request_trouble(request, composition, layout, self._facts, in_place=in_place)
        if composed.bypass is None:
            if not in_place:
                composed.copied = why_copied(request, composition, self._facts, is_alone=self._is_alone)
                composed.cache_format = next((fact.cache_format for fact in self._facts if fact.cache_format), "")
            self._take_apart(composed, in_place=in_place)
        if composed.bypass is not None:
            self.tally.bypassed(composed.bypass.code)
        else:
            self._rehash(composed, self._hasher(composed))
            composed.num_cached = self.store.num_leading(request.block_hashes) * self._block_size
            if composed.in_place is not None:  # own tokens are counted like the prompt's up to the first document
                composed.num_cached = min(composed.num_cached, composed.in_place.num_before_documents)
            self._lookup.look(composed, range(len(composed.pieces)), self._lookup.step - 1)
            self._lookup.look_at_prefix(composed, composed.num_cached, self._lookup.step - 1)
            self._ask(composed, range(len(composed.pieces)))

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Handles a finished request; returns the fields for its answer."""
        composed = self._requests.pop(request.request_id, None)
        has_copies = composed is not None and composed.bypass is None and composed.in_place is None
        self.order.on_finish(request.request_id, composed if has_copies else None)
        if request.request_id in self._chunks:
            self._chunk_finished(*self._chunks.finished(request))
            return None
        if (reason := self._invalid.pop(request.request_id, None)) is not None:
            return {FIELD: {"bypass": reason}}
        if composed is None:
            return None
        self._end_retry(composed)
        self.store.unpin(request.request_id)
        self._sender.forget(request.request_id)
        for waiters in self._waiters.values():
            waiters.discard(request.request_id)
        return {FIELD: self._report_of(composed).to_json()}

    def _report_of(self, composed: ComposedRequest) -> ComposedReport:
        return report_of(composed, trained_positions(self._config.model_config))

    def _chunk_finished(self, name: Any, loaded: LoadedChunk | None) -> None:
        for request_id in self._waiters.pop(name, ()):
            composed = self._requests[request_id]
            pieces = [i for i, piece in enumerate(composed.pieces) if composed.hashes[piece.prompt][-1] == name]
            self._lookup.look(composed, pieces, self._lookup.step - 1)
            if loaded is not None:
                composed.loaded[composed.pieces[pieces[-1]].prompt] = loaded

    def _take_apart(self, composed: ComposedRequest, *, in_place: bool) -> None:
        """Computes pieces and hashes of a request, or the reason why there is no room for them."""
        request, size = composed.request, self._block_size
        composed.prompts, composed.pieces = take_apart(composed.layout, size, composed.composition.repair)
        num_own = request.num_tokens
        plan = None
        if in_place:
            plan = InPlacePlan.of(composed.layout, composed.pieces, composed.composition.repair)
            composed.pieces, num_own = plan.pieces, plan.num_own
        longest = max(len(prompt.token_ids) for prompt in composed.prompts)
        if longest + 1 > self._config.model_config.max_model_len:
            composed.bypass = Bypass(
                "too_long",
                f"system text, its longest document and padding are {longest} tokens; the model takes "
                f"{self._config.model_config.max_model_len - 1}",
            )
            return
        needed = sum(len(prompt.token_ids) // size for prompt in composed.prompts) + num_own // size + 1
        if needed > self.store.num_blocks:
            composed.bypass = Bypass(
                "no_room",
                f"its documents and their copies need {needed} blocks of KV cache at once; there are "
                f"{self.store.num_blocks}",
            )
            return
        built = [self._chunks.build(composed, prompt) for prompt in composed.prompts]
        composed.hashes = tuple(tuple(chunk.block_hashes) for chunk in built)
        if plan is not None:
            composed.in_place, composed.whole_prompt = plan, request.prompt_token_ids
            hide_documents(request, plan, self._config.model_config.max_model_len)

    def _hasher(self, composed: ComposedRequest) -> Any:
        if composed.in_place is None:
            return ComposedHasher(composed.composition, composed.layout, self._block_size, self._digest)
        marks = composed.in_place.marks([hashes[-1] for hashes in composed.hashes])
        return OwnTokensHasher(marks, self._block_size, self._digest)

    def _rehash(self, composed: ComposedRequest, hasher: Any) -> None:
        request = composed.request
        request._block_hasher = hasher
        request.block_hashes.clear()
        request.update_block_hashes()

    # Lookup of chunks and requests for missing ones

    def _ask(self, composed: ComposedRequest, pieces: Any) -> None:
        """Submits the chunk prompts of missing pieces, and waits for them."""
        missing = {composed.pieces[index].prompt for index in pieces if index not in composed.sightings}
        for number in sorted(missing):
            name = composed.hashes[number][-1]
            # others read the names of a request's blocks once, so it cannot have other names later, and a request that
            # reads in place cannot have another prompt once it ran
            may_give_up = composed.num_offered is None or (self._is_alone and composed.in_place is None)
            if composed.asked.get(number, 0) >= _MAX_ASKED and may_give_up:
                reason = f"a document was evicted {_MAX_ASKED} times before the others were there"
                self._give_up(composed, Bypass("evicted", reason))
                return
            if composed.asked.setdefault(number, 0):
                if self._retrying not in (None, composed.request.request_id):
                    continue
                self._retrying = composed.request.request_id
            if not self._chunks.is_under_way(name):
                composed.asked[number] += 1
                self._num_asked += 1
                prompt = composed.prompts[number]
                self._chunks.ask(self._chunks.build(composed, prompt), prompt)
            self._waiters.setdefault(name, set()).add(composed.request.request_id)

    def _give_up(self, composed: ComposedRequest, bypass: Bypass) -> None:
        composed.bypass = bypass
        self._end_retry(composed)
        if composed.in_place is not None:
            composed.in_place = None
            show_documents(composed.request, composed.whole_prompt)
        self._rehash(composed, composed.ordinary_hasher)
        composed.num_cached = 0
        self.tally.bypassed(bypass.code)

    def _end_retry(self, composed: ComposedRequest) -> None:
        if self._retrying == composed.request.request_id:
            self._retrying = None

    # Scheduling

    def match(self, request: Any, num_local: int) -> int | None:
        """Number of tokens after the first `num_local` that this step can move into its blocks; None: wait."""
        self.order.before_alloc(request)
        if request.request_id in self._chunks:
            return self._chunks.match(request, num_local)
        composed = self._requests.get(request.request_id)
        if composed is not None and composed.bypass is not None and not request.num_preemptions:
            composed.num_cached = num_local
        if composed is None or composed.bypass is not None:
            return 0
        num_offered = self._match(composed, num_local)
        if num_offered is not None:
            composed.num_local, composed.num_offered = num_local, num_offered
        return num_offered

    def _match(self, composed: ComposedRequest, num_local: int) -> int | None:
        if composed.in_place is not None:
            return self._match_in_place(composed, composed.in_place, num_local)
        if num_local >= composed.composition.end:
            return 0
        needed = [index for index, piece in enumerate(composed.pieces) if piece.stop > num_local]
        if not self._find(composed, needed):
            return None  # bypassed: the prefix is to be looked up again, as that of an ordinary prompt
        runs = recomputed_runs(composed.layout, composed.composition.repair, num_local)
        if runs and self._lookup.forget_unrepairable(composed, num_local):
            return None
        if runs and not self._lookup.look_at_prefix(composed, num_local, self._lookup.step):
            return None
        composed.planned = [self._lookup.remainder(composed, index, num_local) for index in needed]
        for _, blocks in composed.planned:
            self.store.acquire(blocks)
        return composed.composition.end - num_local

    def _find(self, composed: ComposedRequest, needed: Sequence[int]) -> bool:
        """Finds pieces, or requests them; returns whether the step being scheduled may read all of them."""
        if any(self._chunks.is_under_way(composed.hashes[composed.pieces[i].prompt][-1]) for i in needed):
            return False
        self._lookup.look(composed, needed, self._lookup.step)
        if any(index not in composed.sightings for index in needed):
            self._ask(composed, needed)
            return False
        return self._lookup.are_complete(composed, needed)

    def _match_in_place(self, composed: ComposedRequest, plan: InPlacePlan, num_local: int) -> int | None:
        """Number of tokens of the system text that this step can move in, if it can read all documents; None: wait."""
        num_read = plan.num_read
        needed = [*range(num_read)]
        needed += [index for index in range(num_read, len(composed.pieces)) if composed.pieces[index].stop > num_local]
        if not self._find(composed, needed):
            return None
        for index in needed:  # until the request is admitted, and pins them
            self.store.acquire(composed.sightings[index].blocks)
        composed.planned = [self._lookup.remainder(composed, index, num_local) for index in needed[num_read:]]
        return sum(piece.stop - piece.start for piece, _ in composed.planned)

    def on_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Handles the block allocation of a request; the last `num_external` of its tokens are to be moved in."""
        self.order.on_alloc(blocks)
        if num_external:
            self._moved[request.request_id] = num_external
        if request.request_id in self._chunks:
            self._chunks.on_alloc(request, blocks, num_external)
        composed = self._requests.get(request.request_id)
        if composed is None:
            return
        own = tuple(blocks.get_block_ids()[KV_GROUP])
        if composed.bypass is None:
            self._end_retry(composed)
            if composed.in_place is None and num_external != composed.num_offered:
                self._break_off(composed, own, num_external)
        self._tell(composed)
        if composed.bypass is not None:
            return
        self.order.on_use(composed)
        if composed.in_place is not None:
            self._admit_in_place(composed, composed.in_place, own, num_external)
        elif num_external:
            num_cached = composed.composition.end - num_external
            self._admitted[request.request_id] = admit(composed, own, num_cached, self._block_size)

    def _tell(self, composed: ComposedRequest) -> None:
        if composed.is_told:
            return
        composed.is_told = True
        report = self._report_of(composed)
        if composed.bypass is None:
            self.tally.composed(report)
        self._sender.send(composed.request, report.to_json())

    def _admit_in_place(
        self, composed: ComposedRequest, plan: InPlacePlan, own: tuple[int, ...], num_taken: int
    ) -> None:
        """Pins the documents of a request that is admitted, and counts them as cached tokens of its prompt.

        Of its system text, vLLM may take fewer tokens than it was offered: it computes the others.
        """
        request = composed.request
        self.store.unpin(request.request_id)
        self.store.pin(
            request.request_id, [block for i in range(plan.num_read) for block in composed.sightings[i].blocks]
        )
        composed.planned = [
            (replace(piece, stop=piece.start + num_taken), blocks) for piece, blocks in composed.planned if num_taken
        ]
        self._admitted[request.request_id] = move_in(composed, own, self._block_size)
        stats = getattr(request, "prefill_stats", None)
        if stats is not None and not request.num_preemptions:
            stats.set(
                num_prompt_tokens=len(composed.whole_prompt),
                num_local_cached_tokens=stats.num_local_cached_tokens + len(composed.whole_prompt) - plan.num_own,
                num_external_cached_tokens=num_taken,
            )

    def _break_off(self, composed: ComposedRequest, own: tuple[int, ...], num_external: int) -> None:
        """Gives up a request for which vLLM takes another number of moved tokens than it was offered.

        What the step computes is an ordinary prompt's, but vLLM has named its blocks as composed ones. Blocks that it
        counts as computed, and that are composed or not loaded at all, are reported as failed: vLLM computes them
        in place, or fails the request.
        """
        size, num_local = self._block_size, composed.num_local
        first, stop = first_private_block(composed.layout, size), -(-(num_local + num_external) // size)
        self.store.forget_ids(own[first:])
        if not self._is_alone and not num_external:
            stop = len(own)  # what another connector loads is unknown here
        self._failed += own[min(first, num_local // size) if num_external else first : stop]
        reason = f"vLLM took {num_external} of the {composed.num_offered} tokens that were to be moved into its blocks"
        _log.warning("kvmosaic: request %s is not composed: %s", composed.request.request_id, reason)
        self._give_up(composed, Bypass("not_taken", reason))

    def step_complete(self) -> None:
        """Handles the end of a step, when vLLM has freed the blocks of requests that finished in it."""
        self.order.restore(self.tally)

    def operations(self, scheduled: Any) -> Operations:
        """The workers' operations for the step just scheduled; releases the held blocks after it."""
        done = Operations()
        for request_id, admission in self._admitted.items():
            if request_id in self._requests and request_id in scheduled.num_scheduled_tokens:
                done.moves += admission.moves
                done.repairs += admission.repairs
                done.returns += admission.returns
        self._admitted.clear()
        done.failed, self._failed = self._failed, []
        self._lookup.written.note(scheduled, self._lookup.step, self._moved)
        self.order.on_step(scheduled)
        self._moved.clear()
        for request_id in scheduled.num_scheduled_tokens:
            composed = self._requests.get(request_id)
            if composed is not None and composed.position_shift:
                blocks = self._scheduler.kv_cache_manager.get_blocks(request_id).get_block_ids()[KV_GROUP]
                first = composed.composition.end // self._block_size
                done.shifts.append(ShiftedTokens(tuple(blocks[first:]), composed.position_shift))
        self._read_in_place(done, scheduled)
        if self.tiering is not None:
            self.tiering.operations(done, scheduled, bool(getattr(self._scheduler, "pause_state", 0)))
        self.store.release()
        self._sender.remove_delivered()
        self._lookup.step += 1
        self.tally.moved(sum(move.num_tokens for move in done.moves))
        self.tally.chunk_prompts(self._num_asked, len(self._chunks))
        self._num_asked = 0
        return done

    def _read_in_place(self, done: Operations, scheduled: Any) -> None:
        """Adds the requests of a step that read documents in place; preempted ones pin nothing."""
        for request_id in self.store.pinned:
            composed = self._requests[request_id]
            if request_id not in scheduled.num_scheduled_tokens:
                if composed.request.status == RequestStatus.PREEMPTED:
                    self.store.unpin(request_id)
                continue
            assert composed.in_place is not None
            own = tuple(self._scheduler.kv_cache_manager.get_blocks(request_id).get_block_ids()[KV_GROUP])
            held = [composed.sightings[index].blocks for index in range(composed.in_place.num_read)]
            num_computed = composed.request.num_computed_tokens
            num_scheduled = scheduled.num_scheduled_tokens[request_id]
            request = composed.in_place.request(own, held, self._block_size, num_computed, num_scheduled)
            done.in_place.append(request)


def _update_of(request: Any) -> object:
    """What a request of the front says about stored documents; None if it says nothing."""
    params = request.kv_transfer_params
    fields = params.get(FIELD) if isinstance(params, Mapping) else None
    return fields.get(UPDATE) if isinstance(fields, Mapping) else None
