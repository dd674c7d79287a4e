"""Worker side of the tiers: moves runs between the paged cache, which vLLM manages, host memory and the tiers."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvmosaic.cache.keys import Key
from kvmosaic.config import TierConfig, parse_bytes
from kvmosaic.entries import DtypeName, EntryBound, EntryExpectation, EntryHeader, decode_entry, encode_entry
from kvmosaic.errors import NotMovable
from kvmosaic.layers import LayerGeometry
from kvmosaic.memory import ChunkTensors, pinned_bytes
from kvmosaic.metrics.family import Family
from kvmosaic.metrics.own_names import TIER_COUNTERS, TIER_OUTCOMES
from kvmosaic.model.fingerprint import fingerprint
from kvmosaic.tiers import Entry, TieredStore, open_tiers
from kvmosaic.tiers import Fetch as TierFetch
from kvmosaic.vllm.operations import (
    FetchReport,
    FingerprintReport,
    Load,
    Operations,
    RunFetch,
    Store,
    StoredRun,
)
from kvmosaic.vllm.report_counters import ReportCounters
from kvmosaic.vllm.settings import tier_config
from kvmosaic.vllm.worker.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the model on one worker."""

    pipeline_rank: int = 0
    pipeline_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1

    def key(self, key: bytes) -> Key:
        """The key of this share of a run."""
        numbers = (self.pipeline_rank, self.pipeline_size, self.tensor_rank, self.tensor_size)
        return Key(sha256(b"kvm-rank" + struct.pack("<4I", *numbers) + key).digest())


class StoredEntries:
    """Serializes runs into entries, and decodes entries; layers are numbered from 0 on every worker."""

    def __init__(self, places: KVLayout, share: Share, config: TierConfig) -> None:
        """Describes the layers of `places`.

        Raises:
            NotMovable: layers of several dtypes, or a cache in eight bits.
        """
        if places.cache_format:
            raise NotMovable(f"the KV cache is kept as {places.cache_format}; tiers store plain numbers only")
        layers, dtypes = [], set()
        for index, place in enumerate(places.layers):
            keys, values = place.layout.read(torch.zeros(1, dtype=torch.int64, device=places.device))
            (_, heads, width), in_key = keys.shape, values is None
            layers.append(LayerGeometry(index, heads, width, width if values is None else values.shape[-1], in_key))
            dtypes.add(keys.dtype)
        if len(dtypes) > 1:
            raise NotMovable(f"layers keep their keys as {', '.join(sorted(map(str, dtypes)))}; tiers store one dtype")
        if all(layer.value_in_key for layer in layers):  # every tensor rank has the full latent row
            share = Share(share.pipeline_rank, share.pipeline_size)
        self._share, self._layers, self._config = share, tuple(layers), config
        dtype = dtypes.pop()
        self._dtype = cast(DtypeName, str(dtype).removeprefix("torch."))
        self._bound = EntryBound(self._layers, self._dtype)
        self.bytes_per_token = dtype.itemsize * sum(
            layer.num_kv_heads * (layer.key_dim + (0 if layer.value_in_key else layer.value_dim)) for layer in layers
        )

    def key(self, run: StoredRun) -> Key:
        """The key of this worker's share of a run."""
        return self._share.key(run.key)

    def max_bytes(self, run: StoredRun) -> int:
        """Max size of an entry of a run; larger ones are not read."""
        return self._bound.max_bytes(run.num_tokens)

    def encode(self, run: StoredRun, compute_seconds: float) -> Callable[[ChunkTensors], Entry | None]:
        """Returns a function that serializes a run's tensors, on any thread."""
        header = EntryHeader(**self._identity(run), compute_seconds=compute_seconds, created=time.time())
        return lambda layers: encode_entry(header, layers, self._config.chunk_secret)

    def accept(self, run: StoredRun) -> Callable[[Entry], ChunkTensors]:
        """Returns a function that validates and reads an entry; InvalidEntry unless it is this run, bit for bit."""
        expected = EntryExpectation(**self._identity(run))
        return lambda entry: decode_entry(entry, expected, self._config.chunk_secret).layers

    def _identity(self, run: StoredRun) -> dict[str, Any]:
        """What the header of its entry says, and what an entry must match."""
        place = {"key": self.key(run), "root": Key(run.root), "start": run.start, "tokens": run.tokens}
        return {"fingerprint": run.fingerprint, **place, "layers": self._layers, "dtype": self._dtype}


_PROBES = 4
"""Number of columns read from a weight that exists in packed form only."""
_TABLE_ROWS = 64


def worker_fingerprint(vllm_config: Any, places: KVLayout) -> str:
    """SHA-256 (hex) of this worker's configuration, weights and rotation tables; empty if they cannot be read.

    The same weights, split over workers in the same way, give the same fingerprint on every machine. For its inputs see
    `kvmosaic.model.fingerprint`: weights are sampled, so it is no signature against an attacker.
    """
    parallel = vllm_config.parallel_config
    split = [getattr(parallel, name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    digest = sha256(f"kvmosaic-vllm-worker-1 {split} {vllm_config.model_config.dtype}".encode())
    try:
        digest.update(fingerprint(places.root, vllm_config.model_config.hf_config).encode())
        for name, numbers in sorted(_packed(places.root), key=lambda item: item[0]):
            digest.update(f"{name}{tuple(numbers.shape)}".encode() + _bytes(numbers))
        for name, table in _tables(places.root):
            rows = torch.linspace(0, table.shape[0] - 1, _TABLE_ROWS, dtype=torch.float64).long().to(table.device)
            digest.update(f"{name}{tuple(table.shape)}{table.dtype}".encode() + _bytes(table[rows]))
    except Exception:  # whatever the weights are, the engine also works without tiers
        _log.warning("kvmosaic: the weights cannot be distinguished from others", exc_info=True)
        return ""
    return digest.hexdigest()


def _packed(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Columns of weights that were packed for a CPU and then freed: the layer's output for unit vectors.

    All products but one are zero, so these are the weight's own numbers, in whatever order they are summed.
    """
    for name, module in root.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.numel():
            continue
        method = getattr(module, "quant_method", None)
        size = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
        if method is None or size is None:
            raise TypeError(f"{name} ({type(module).__name__}) has no weight to look at")
        probes = torch.zeros(_PROBES, size, dtype=weight.dtype, device=weight.device)
        probes[torch.arange(_PROBES), torch.linspace(0, size - 1, _PROBES, dtype=torch.float64).long()] = 1
        with torch.inference_mode():
            yield name, method.apply(module, probes, bias=None)


def _tables(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in root.named_modules():
        table = getattr(module, "cos_sin_cache", None)
        if isinstance(table, Tensor) and table.dim() == 2 and len(table):
            yield name, table


def _bytes(numbers: Tensor) -> bytes:
    plain = numbers.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return bytes(plain.numpy().tobytes())


CLOSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Staged:
    run: StoredRun
    fetch: TierFetch[ChunkTensors]
    until: float
    """Deadline of the waiting requests, on the monotonic clock."""
    is_told: bool = False
    tensors: ChunkTensors | None = None


class WorkerTiers:
    """Carries out what the scheduler's `Tiering` plans.

        run     before a step's forward, or after one that loads nothing: loads, drops, starts fetches
        save    after every forward: copies runs to store to the host; a thread of the tiered store writes them
        told    reports of fetches since the last call

    Threads of the tiered store read tiers and validate entries; a step only copies. A run that was reported as fetched
    stays in memory until it is dropped, so its load needs no tier.
    """

    def __init__(
        self, places: KVLayout, share: Share, config: TierConfig, rank: int, take_fingerprint: Callable[[], str]
    ) -> None:
        """Opens the tiers.

        Args:
            places: layout of the paged cache.
            share: the part of the model on this worker.
            config: tier settings.
            rank: number of this worker among all that must have a run before it is loaded.
            take_fingerprint: computes the fingerprint of the current weights.

        Raises:
            InvalidConfig: a tier that cannot be opened. NotMovable: a cache that cannot be stored.
        """
        self._places, self._rank, self._take_fingerprint = places, rank, take_fingerprint
        self._entries = StoredEntries(places, share, config)
        allocate = pinned_bytes if places.device.type == "cuda" else None
        self.tiered_store: TieredStore[ChunkTensors] = TieredStore(
            open_tiers(config.chunk_tier, allocate=allocate),
            max_pending_bytes=parse_bytes(config.chunk_pending),
            loading=config.chunk_loading,
        )
        self._staged: dict[int, _Staged] = {}
        self._reports: list[FetchReport | FingerprintReport] = []
        self.failed_blocks: set[int] = set()
        """Blocks whose load failed; vLLM computes them."""
        self._counts = TierCounts(self.tiered_store)
        self.fingerprint = take_fingerprint()

    def __len__(self) -> int:
        return len(self._staged)

    def run(self, operations: Operations) -> None:
        """Loads, drops what is no longer needed, and starts fetches."""
        for load in operations.loads:
            try:
                self._load(load)
            except Exception:
                _log.exception("kvmosaic: what a tier had could not be loaded")
                size = self._places.block_size
                last = -(-(load.start + load.num_tokens) // size)
                self.failed_blocks.update(load.blocks[load.start // size : last])
        for number in operations.drops:
            staged = self._staged.pop(number, None)
            if staged is not None and not staged.is_told:
                self.tiered_store.cancel(staged.fetch)
        for fetch in operations.fetches:
            self._begin(fetch)
        if operations.fingerprint_round is not None:
            self.fingerprint = self._take_fingerprint()
            self._reports.append(FingerprintReport(operations.fingerprint_round, self._rank, self.fingerprint))

    def save(self, stores: Sequence[Store]) -> None:
        """Copies runs to the host and queues the writes; runs without room are not stored."""
        for store in stores:
            try:
                self._store(store)
            except Exception:
                _log.exception("kvmosaic: a run could not be stored")

    def told(self) -> list[FetchReport | FingerprintReport]:
        """Reports since the last call."""
        now = time.monotonic()
        for number, staged in self._staged.items():
            fetch = staged.fetch
            if staged.is_told or not (fetch.is_settled(now, self.tiered_store.last_ended) or now >= staged.until):
                continue
            staged.is_told, staged.tensors = True, fetch.value
            self._reports.append(
                FetchReport(number, self._rank, "" if fetch.value is None else fetch.tier_name or "memory")
            )
            if fetch.value is None:
                self.tiered_store.cancel(fetch)
            elif fetch.is_persistent and self.tiered_store.has_volatile:
                self._promote(staged.run, fetch.value)
        reports, self._reports = self._reports, []
        return reports

    def count(self, tally: ReportCounters) -> None:
        """Adds the tiers' counts since the last call, about once a second."""
        self._counts.add_to(tally)

    def close(self) -> None:
        """Flushes queued writes for a short time, and closes the tiers."""
        self._staged.clear()
        self.tiered_store.close(CLOSE_SECONDS)

    def _begin(self, asked: RunFetch) -> None:
        num_bytes = asked.run.num_tokens * self._entries.bytes_per_token
        fetch = self.tiered_store.fetch(
            self._entries.key(asked.run),
            num_bytes,
            self._entries.accept(asked.run),
            asked.compute_seconds,
            max_bytes=self._entries.max_bytes(asked.run),
        )
        if fetch is None:
            self._reports.append(FetchReport(asked.number, self._rank, ""))
            return
        waiting = [staged.fetch for staged in self._staged.values() if not staged.is_told] + [fetch]
        seconds = [each.compute_seconds for each in waiting if each.compute_seconds is not None]
        most = self.tiered_store.longest_wait(
            sum(each.num_bytes for each in waiting), sum(seconds) if len(seconds) == len(waiting) else None
        )
        self._staged[asked.number] = _Staged(asked.run, fetch, time.monotonic() + most)

    def _load(self, load: Load) -> None:
        tensors = self._staged[load.number].tensors
        assert tensors is not None
        device = self._places.device
        slots = self._places.slots(load.blocks, load.start, load.num_tokens).to(device)
        rows = slice(load.skip, load.skip + load.num_tokens)
        for place, (keys, values) in zip(self._places.layers, tensors, strict=True):
            there = None if values is None else _on(device, values[rows])
            place.layout.write(slots, _on(device, keys[rows]), there)

    def _store(self, store: Store) -> None:
        run = store.run
        num_bytes = run.num_tokens * self._entries.bytes_per_token
        if not self.tiered_store.has_room(num_bytes):
            self.tiered_store.note_dropped()
            return
        slots = self._places.slots(store.blocks, run.start, run.num_tokens).to(self._places.device)
        tensors: ChunkTensors = []
        for place in self._places.layers:
            keys, values = place.layout.read(slots)
            tensors.append((keys.cpu(), None if values is None else values.cpu()))
        encode = self._entries.encode(run, store.compute_seconds)
        self.tiered_store.store(self._entries.key(run), tensors, num_bytes, encode, persistent=True, volatile=True)

    def _promote(self, run: StoredRun, tensors: ChunkTensors) -> None:
        """Copies a run from a slow tier to the faster ones of this process."""
        num_bytes = run.num_tokens * self._entries.bytes_per_token
        encode = self._entries.encode(run, 0.0)
        self.tiered_store.store(self._entries.key(run), tensors, num_bytes, encode, persistent=False, volatile=True)


def _on(device: object, rows: Tensor) -> Tensor:
    """A copy on the cache's device: decoded rows may be read-only memory of a tier."""
    return rows.clone() if device == rows.device else rows.to(device)  # type: ignore[call-overload]


def open_worker_tiers(vllm_config: Any, places: KVLayout | None) -> WorkerTiers | None:
    """The tiers of this worker; None if none are configured, or its cache cannot be read.

    Raises:
        InvalidConfig: a tier that cannot be opened.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    config = tier_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
    if config is None or places is None:
        return None
    parallel = vllm_config.parallel_config
    tensor_rank, pipeline_rank = get_tp_group().rank_in_group, get_pp_group().rank_in_group
    share = Share(pipeline_rank, parallel.pipeline_parallel_size, tensor_rank, parallel.tensor_parallel_size)
    rank = pipeline_rank * parallel.tensor_parallel_size + tensor_rank
    try:
        return WorkerTiers(places, share, config, rank, lambda: worker_fingerprint(vllm_config, places))
    except NotMovable as error:
        _log.warning("kvmosaic: tiers are not used: %s", error)
        return None


_EVERY_SECONDS = 1.0


class TierCounts:
    """Adds the growth of a tiered store's counters to a tally."""

    def __init__(self, tiered_store: TieredStore[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._tiered_store, self._clock = tiered_store, clock
        self._before: dict[tuple[Family, str], float] = {}
        self._next = 0.0

    def add_to(self, tally: ReportCounters) -> None:
        """Adds the growth since the last call; at most once a second, since every step calls it."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + _EVERY_SECONDS
        now: dict[tuple[Family, str], float] = {}
        for stat in self._tiered_store.tier_stats():
            for family, name in TIER_COUNTERS.items():
                now[family, stat.name] = now.get((family, stat.name), 0) + getattr(stat, name)
        for family, outcomes in TIER_OUTCOMES.items():
            now |= {(family, outcome): getattr(self._tiered_store.stats, outcome) for outcome in outcomes}
        for (family, label), number in now.items():
            tally.counted(family, number - self._before.get((family, label), 0), label)
        self._before = now
