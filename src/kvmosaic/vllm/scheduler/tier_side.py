"""Scheduler side of the tiers, in another process than the bytes: what chunk prompts load, and what is stored."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from kvmosaic.cache.keys import KeyChain, encode_tokens
from kvmosaic.config import parse_bytes
from kvmosaic.tiers import ComputeCost
from kvmosaic.vllm.operations import (
    FetchReport,
    FingerprintReport,
    Load,
    Operations,
    Store,
    StoredRun,
    block_bytes,
)
from kvmosaic.vllm.scheduler.block_store import KV_GROUP, BlockStore
from kvmosaic.vllm.scheduler.chunk_prompts import ChunkPrompt
from kvmosaic.vllm.scheduler.staged_runs import StagedRun, Staging
from kvmosaic.vllm.settings import tier_config

_ENGINE = b"kvmosaic-vllm-1"


def engine_fingerprint(workers: Sequence[str]) -> str:
    """One fingerprint for all workers' weights, in the order of their ranks; empty if one has none."""
    if not workers or not all(workers):
        return ""
    digest = sha256(_ENGINE)
    for fingerprint in workers:
        digest.update(len(fingerprint).to_bytes(4, "little") + fingerprint.encode())
    return digest.hexdigest()


def stored_runs(prompt: ChunkPrompt, fingerprint: str, salt: str) -> tuple[StoredRun, ...]:
    """The runs of a chunk prompt without its padding: what the chunk saw, if anything, and the chunk.

    The changing rest of a system text is no run: it would fill the tiers with what no later prompt has.

    Keys are built as in our own engine: from the model, the salt, the run's tokens, its start and what it saw, but not
    from the block size.
    """
    chain = KeyChain(fingerprint, salt)
    seen = encode_tokens(prompt.token_ids[: prompt.num_seen])
    chunk = encode_tokens(prompt.token_ids[prompt.num_seen : prompt.num_tokens])
    runs, views = [], []
    if seen:
        root = chain.root(0)
        key = chain.run_encoded(root, seen)
        runs.append(StoredRun(fingerprint, key, root, 0, seen))
        views.append((key, prompt.num_seen))
    if prompt.is_text:
        return tuple(runs)
    root = chain.root(prompt.num_seen, views)
    runs.append(StoredRun(fingerprint, chain.run_encoded(root, chunk), root, prompt.num_seen, chunk))
    return tuple(runs)


_MAX_KNOWN = 65536
_MAX_COMPLETE = 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """A chunk that was loaded, not computed."""

    tier: str
    seconds: float
    """Time until all workers had it in memory."""


@dataclass(slots=True)
class _Prompt:
    """An in-flight chunk prompt."""

    prompt: ChunkPrompt
    salt: str
    runs: tuple[StoredRun, ...] = ()
    planned: list[StagedRun] = field(default_factory=list)
    """Runs to load if it is admitted in this step."""
    num_local: int = 0
    loads: list[Load] = field(default_factory=list)
    loaded: LoadedChunk | None = None
    admitted: float | None = None
    num_computed: int = 0


class Tiering:
    """Tracks every chunk prompt from `begin` to `finished`.

        being scheduled   its runs, what the chunk saw and the chunk, are fetched (`match` gives None meanwhile)
        admitted          what all workers have is loaded into its blocks; the rest, and its padding, is computed
        finished          what was computed is stored in a step in which its blocks are still cached

    So a chunk that is loaded from a tier is in vLLM's prefix cache again, for every later request. Loaded bytes are
    identical to the ones computed originally, at the same positions, so these blocks are as exact as any.

    Keys need the fingerprint of the weights. When vLLM resets its prefix cache, the weights may have changed:
    everything that is staged is dropped, and chunk prompts wait until all workers have reported their fingerprints
    again.
    """

    def __init__(
        self,
        num_workers: int,
        block_size: int,
        bytes_per_token: int,
        max_staged_bytes: int,
        find_store: Callable[[], BlockStore],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without a fingerprint; `find_store` returns the scheduler's block store."""
        self._num_workers, self._block_size, self._bytes_per_token = num_workers, block_size, bytes_per_token
        self._find_store, self._clock = find_store, clock
        self._staging = Staging(num_workers, max_staged_bytes, clock)
        self._prompts: dict[str, _Prompt] = {}
        self._admitted: list[str] = []
        self._complete: list[tuple[_Prompt, tuple[Any, ...], float]] = []
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        """Keys of recently stored or loaded runs."""
        self._cost = ComputeCost()
        self._fingerprint = ""
        self._round = 0
        self._told: dict[int, str] = {}
        self._is_asking = False
        """Whether workers have not been asked for their fingerprints in this round yet."""
        self._is_refreshing = False
        self._cache: object | None = None

    @classmethod
    def of(
        cls, config: Any, kv_cache_config: Any, num_workers: int, find_store: Callable[[], BlockStore]
    ) -> Tiering | None:
        """Creates the tiers of vLLM's configuration; None without any.

        Raises:
            InvalidConfig: invalid tier settings.
        """
        tiers = tier_config(config.kv_transfer_config.kv_connector_extra_config)
        if tiers is None:
            return None
        (group, *_) = kv_cache_config.kv_cache_groups
        block_size = int(group.kv_cache_spec.block_size)
        bytes_per_token = block_bytes(group) // block_size
        return cls(num_workers, block_size, bytes_per_token, parse_bytes(tiers.chunk_staged), find_store)

    def on_handshake(self, fingerprints: Mapping[int, str]) -> None:
        """Sets the workers' fingerprints, by rank; without all of them nothing is stored or loaded."""
        ordered = [fingerprints[rank] for rank in sorted(fingerprints)]
        self._fingerprint = engine_fingerprint(ordered) if len(ordered) == self._num_workers else ""
        if not self._fingerprint:
            _log.warning("kvmosaic: tiers are not used: the weights of some worker cannot be distinguished from others")

    def begin(self, request: Any, prompt: ChunkPrompt) -> None:
        """Starts a chunk prompt. With an adapter it is computed: an adapter's name does not identify its weights."""
        if self._is_on and request.lora_request is None:
            self._prompts[request.request_id] = _Prompt(prompt, request.cache_salt or "")

    def match(self, request: Any, num_local: int) -> int | None:
        """Number of tokens after the first `num_local` that can be loaded into its blocks; None: wait."""
        entry = self._prompts.get(request.request_id)
        self._watch()
        if entry is None:
            return 0
        if self._is_refreshing:
            return None
        if not self._is_on:
            return 0
        if not entry.runs or entry.runs[0].fingerprint != self._fingerprint:
            entry.runs = stored_runs(entry.prompt, self._fingerprint, entry.salt)
        # vLLM computes at least one token of every prompt
        most = min(entry.prompt.num_tokens, request.num_prompt_tokens - 1)
        needed = [run for run in entry.runs if run.start + run.num_tokens > num_local] if num_local < most else []
        token_seconds = self._cost.estimate(1)
        found = self._staging.want(request.request_id, needed, self._bytes_per_token, token_seconds)
        if found is None or any(staged is not None and not staged.is_over for staged in found):
            return None
        entry.planned, stop = [], num_local
        for staged in found:
            if staged is None or not staged.tier:
                break
            entry.planned.append(staged)
            stop = min(staged.run.start + staged.run.num_tokens, most)
        entry.num_local = num_local
        return stop - num_local

    def on_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Handles the block allocation of a chunk prompt; plans the load of `num_external` uncached tokens."""
        entry = self._prompts.get(request.request_id)
        if entry is None:
            return
        own, entry.loads, entry.loaded = tuple(blocks.get_block_ids()[KV_GROUP]), [], None
        stop = entry.num_local + num_external
        for staged in entry.planned if num_external else ():
            run = staged.run
            first, last = max(entry.num_local, run.start), min(stop, run.start + run.num_tokens)
            if first < last:
                entry.loads.append(Load(staged.number, first - run.start, own, first, last - first))
            self._know(run.key)
            if run.start + run.num_tokens == entry.prompt.num_tokens:
                entry.loaded = LoadedChunk(staged.tier, staged.seconds or 0.0)
        entry.admitted, entry.num_computed = self._clock(), request.num_prompt_tokens - stop
        self._admitted.append(request.request_id)

    def finished(self, request_id: str, hashes: Iterable[Any]) -> LoadedChunk | None:
        """Handles a finished chunk prompt; returns its source if it was not computed."""
        entry = self._prompts.pop(request_id, None)
        self._staging.release(request_id)
        if entry is None:
            return None
        if entry.admitted is not None and entry.loaded is None and len(self._complete) < _MAX_COMPLETE:
            seconds = self._clock() - entry.admitted
            self._cost.note(max(entry.num_computed, 1), seconds)
            self._complete.append((entry, tuple(hashes), seconds))
        return entry.loaded

    def operations(self, done: Operations, scheduled: Any, is_paused: bool = False) -> None:
        """Adds the workers' tier operations for the step just scheduled."""
        self._watch()
        for request_id in self._admitted:
            entry = self._prompts.get(request_id)
            if entry is not None and request_id in scheduled.num_scheduled_tokens:
                done.loads += entry.loads
            self._staging.release(request_id)
        self._admitted.clear()
        if self._is_asking and not is_paused:  # while paused, the weights may still be loading
            self._is_asking = False
            done.fingerprint_round = self._round
        if self._is_on and not self._is_refreshing:
            done.stores += self._stores()
        self._complete.clear()
        done.fetches, self._staging.fetches = self._staging.fetches, []
        done.drops, self._staging.drops = self._staging.drops, []

    def on_reports(self, reports: Iterable[FetchReport | FingerprintReport]) -> None:
        """Handles the workers' reports after a step."""
        for report in reports:
            if isinstance(report, FetchReport):
                staged = self._staging.on_report(report)
                if staged is not None and not staged.tier:
                    self._stored.pop(staged.run.key, None)
            elif self._is_refreshing and report.number == self._round:
                self._told[report.rank] = report.fingerprint
                if len(self._told) == self._num_workers:
                    self._is_refreshing = False
                    self.on_handshake(self._told)

    def reset(self) -> None:
        """Invalidates all computed entries, unless the weights turn out to be the same."""
        self._staging.clear()
        self._complete.clear()
        self._admitted.clear()
        self._stored.clear()
        for entry in self._prompts.values():
            entry.planned, entry.admitted = [], None
        self._round += 1
        self._told = {}
        self._is_asking = self._is_refreshing = True

    def check_invariants(self) -> None:
        """Checks that only in-flight prompts hold staged runs."""
        self._staging.check_invariants()
        if not self._prompts:
            assert not len(self._staging)

    @property
    def _is_on(self) -> bool:
        return bool(self._fingerprint)

    def _watch(self) -> None:
        """Detects a reset of vLLM's prefix cache by its new hash table, even if the connector is not notified."""
        cache = self._find_store().table
        if cache is not self._cache:
            if self._cache is not None:
                self.reset()
            self._cache = cache

    def _stores(self) -> Iterable[Store]:
        """Runs that were computed, and whose blocks are still cached when this step's forward is over.

        This step writes no cached block, so no references are needed.
        """
        store, size = self._find_store(), self._block_size
        for entry, hashes, seconds in self._complete:
            blocks = store.find(hashes)
            if blocks is None:
                continue
            for run in stored_runs(entry.prompt, self._fingerprint, entry.salt):
                if run.key in self._stored:
                    continue
                self._know(run.key)
                self._staging.stored([run.key])
                ids = tuple(block.block_id for block in blocks[: -(-(run.start + run.num_tokens) // size)])
                yield Store(run, ids, seconds * run.num_tokens / max(entry.num_computed, run.num_tokens))

    def _know(self, key: bytes) -> None:
        self._stored[key] = None
        self._stored.move_to_end(key)
        if len(self._stored) > _MAX_KNOWN:
            self._stored.popitem(last=False)
