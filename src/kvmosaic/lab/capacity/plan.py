"""Capacity plan: the demand on a device, the split of its memory, and how much fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvmosaic.config import ChunkCacheConfig, parse_bytes
from kvmosaic.container import MAX_BLOCKS
from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.capacity.model_facts import ModelFacts
from kvmosaic.tiers import parse_tier_url

Codec = Literal["none", "int8"]

_GROUP = 64
"""Numbers that share a scale of 2 bytes."""
STATES_PER_DOCUMENT = 4
"""What a document does to a state, as a whole and after its first tokens: at most as much as two states each."""
DEFAULT_HEADROOM = "10%"
_LIMITS = {
    "documents": (1, 10**9),
    "tokens_per_document": (1, 10**7),
    "concurrency": (1, 65_536),
    "documents_per_prompt": (1, 4_096),
    "system_tokens": (0, 10**7),
    "question_tokens": (1, 10**7),
    "answer_tokens": (0, 10**7),
}


@dataclass(frozen=True, slots=True)
class Demand:
    """Documents that prompts draw from, and the prompts that run at once.

    A prompt is the system text, `documents_per_prompt` different documents, a question and its answer. All documents
    have the same length.
    """

    documents: int
    tokens_per_document: int
    concurrency: int = 1
    """Prompts that run at once."""
    documents_per_prompt: int = 5
    system_tokens: int = 256
    question_tokens: int = 64
    answer_tokens: int = 256

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidConfig(f"{name} must be a whole number between {low:,} and {high:,}, got {value!r}")
        if self.documents_per_prompt > self.documents:
            raise InvalidConfig(
                f"a prompt of {self.documents_per_prompt} different documents cannot be drawn from {self.documents}; "
                "lower documents_per_prompt"
            )


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier below the device."""

    kind: str
    """`host`, `disk`, `redis` or `object`."""
    quota_bytes: int | None
    """Quota in bytes; None: unlimited, or unknown."""
    entry_bytes: int
    """Of one document; its header and tokens, a few bytes per token, are left out."""
    kept: int | None
    """Documents that fit into the quota."""


def plan_tier(url: str, model: ModelFacts, tokens_per_document: int, codec: Codec = "none") -> TierPlan:
    """Counts the documents that fit into a tier; opens nothing.

    Raises:
        InvalidConfig: an invalid URL or codec.
    """
    spec = parse_tier_url(url)
    entry = max(1, round(codec_share(codec, model.element_bytes) * tokens_per_document * model.kv_bytes_per_token))
    kept = None if spec.quota_bytes is None else spec.quota_bytes // entry
    return TierPlan(spec.kind, spec.quota_bytes, entry, kept)


def codec_share(codec: Codec, element_bytes: float) -> float:
    """Of the bytes of keys and values, what an entry takes.

    Raises:
        InvalidConfig: no such codec.
    """
    shares = {"none": 1.0, "int8": (1 + 2 / _GROUP) / element_bytes}
    if codec not in shares:
        raise InvalidConfig(f"codec is {codec!r}; choose from {', '.join(shares)}")
    return shares[codec]


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """The memory of a device, in bytes and blocks.

    weights | headroom | requests: system text, then questions and answers | documents          (all of it)
    """

    device_bytes: int
    weight_bytes: int
    headroom_bytes: int
    """Activations, workspace, the driver and the allocator: an assumption."""
    request_blocks: int
    """The system text once, and the question and answer of every prompt that runs."""
    chunk_blocks: int
    """Blocks left for documents."""
    bytes_per_block: int
    block_size: int
    blocks_per_document: int
    documents: int
    """Documents that there are."""
    states: int = 0
    """Prompts that run, each with a state."""
    state_bytes: int = 0
    """Of one state."""

    @property
    def request_bytes(self) -> int:
        """Bytes of the request cache."""
        return self.request_blocks * self.bytes_per_block + self.states * self.state_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunk pool."""
        return self.chunk_blocks * self.bytes_per_block

    @property
    def resident(self) -> int:
        """Maximum number of documents on the device at once."""
        return min(self.documents, self.chunk_bytes // self.document_bytes)

    @property
    def document_bytes(self) -> int:
        """Bytes of a document's blocks, and of what it does to a state."""
        return self.blocks_per_document * self.bytes_per_block + STATES_PER_DOCUMENT * self.state_bytes

    def wasted_share(self, num_tokens: int) -> float:
        """Share of empty slots in a document's blocks."""
        return 1.0 - num_tokens / (self.blocks_per_document * self.block_size)


def make_room(
    model: ModelFacts, device_bytes: int, demand: Demand, block_size: int, headroom_bytes: int, weight_bytes: int
) -> MemorySplit:
    """Divides the memory of a device.

    Raises:
        InvalidConfig: weights, headroom and running prompts alone are more than it has, or no document fits.
    """
    per_block = model.kv_bytes_per_token * block_size
    own = blocks_of(demand.question_tokens + demand.answer_tokens, block_size)
    request_blocks = blocks_of(demand.system_tokens, block_size) + demand.concurrency * own
    request_bytes = request_blocks * per_block + demand.concurrency * model.state_bytes
    left = device_bytes - weight_bytes - headroom_bytes - request_bytes
    if left < 0:
        requests = _gib(request_bytes)
        parts = f"weights {_gib(weight_bytes)}, headroom {_gib(headroom_bytes)}, requests {requests}"
        raise InvalidConfig(
            f"{model.name} does not fit into {_gib(device_bytes)}: {parts}; take a larger device, another dtype, less "
            "concurrency or less headroom"
        )
    per_document = blocks_of(demand.tokens_per_document, block_size)
    chunk_blocks = min(left // per_block, MAX_BLOCKS)
    if chunk_blocks * per_block < (needed := per_document * per_block + STATES_PER_DOCUMENT * model.state_bytes):
        raise InvalidConfig(
            f"{_gib(left)} are left for documents, and one of {demand.tokens_per_document:,} tokens takes "
            f"{_gib(needed)}; take a larger device, shorter documents or less concurrency"
        )
    return MemorySplit(
        device_bytes,
        weight_bytes,
        headroom_bytes,
        request_blocks,
        chunk_blocks,
        per_block,
        block_size,
        per_document,
        demand.documents,
        demand.concurrency,
        model.state_bytes,
    )


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that hold a segment: its last one is its own, even if it is not full."""
    return -(-num_tokens // block_size)


def _gib(num_bytes: int) -> str:
    """In GiB; what would read as 0.00 of them in bytes."""
    return f"{num_bytes / 2**30:,.2f} GiB" if not 0 < num_bytes < 2**30 / 100 else f"{num_bytes:,} bytes"


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """All results of a plan. See `plan_capacity`."""

    model: ModelFacts
    demand: Demand
    room: MemorySplit
    tiers: tuple[TierPlan, ...]
    notes: tuple[str, ...]
    """Caveats."""

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON; what is unknown is None."""
        model = {
            "name": self.model.name,
            "dtype": self.model.dtype,
            "num_parameters": self.model.num_parameters,
            "weight_bytes": self.room.weight_bytes,
            "kv_bytes_per_token": self.model.kv_bytes_per_token,
            "kv_bytes_seen_of_document": self.model.seen_bytes(self.demand.tokens_per_document),
            "kv_bytes_per_token_without_sharing": self.model.kv_bytes_unshared,
            "max_positions": self.model.max_positions,
            "layers": [
                {"keeps": kind, "count": count, "bytes_per_token": num_bytes}
                for kind, count, num_bytes in self.model.kinds()
            ],
        }
        room = asdict(self.room) | {
            "request_bytes": self.room.request_bytes,
            "chunk_bytes": self.room.chunk_bytes,
            "document_bytes": self.room.document_bytes,
            "resident_documents": self.room.resident,
            "wasted_share": self.room.wasted_share(self.demand.tokens_per_document),
        }
        return {
            "model": model,
            "demand": asdict(self.demand),
            "memory": room,
            "tiers": [asdict(tier) for tier in self.tiers],
            "notes": list(self.notes),
        }


def plan_capacity(
    model: ModelFacts,
    device_memory: int | str,
    demand: Demand,
    *,
    block_size: int = 16,
    headroom: int | str = DEFAULT_HEADROOM,
    weights: int | str | None = None,
    tiers: Sequence[str] = (),
    codec: Codec = "none",
) -> CapacityPlan:
    """Plans what fits on a device, and in tiers.

    Args:
        model: see `read_model`.
        device_memory: total memory of the device: bytes or text such as "80GiB".
        demand: how many documents, how long, and how many prompts at once.
        block_size: token slots of a block.
        headroom: memory for everything else, a size or a share such as "10%".
        weights: bytes of the weights, if they are known better than by counting.
        tiers: URLs of the tiers below the device, fastest first.
        codec: how tiers store numbers.

    Raises:
        InvalidConfig: a number outside its range, a model or a document that does not fit, or a kind of tier that is
            named twice.
    """
    ChunkCacheConfig(block_size=block_size)
    device_bytes = parse_bytes(device_memory)
    weight_bytes = model.weight_bytes if weights is None else parse_bytes(weights)
    room = make_room(model, device_bytes, demand, block_size, parse_headroom(headroom, device_bytes), weight_bytes)
    planned = tuple(plan_tier(url, model, demand.tokens_per_document, codec) for url in tiers)
    kinds = [tier.kind for tier in planned]
    if twice := [kind for kind in kinds if kinds.count(kind) > 1]:
        raise InvalidConfig(f"two tiers are of kind {twice[0]}; a plan has one of each kind at most")
    return CapacityPlan(
        model=model,
        demand=demand,
        room=room,
        tiers=planned,
        notes=tuple(_notes(model, demand, room)),
    )


def parse_headroom(headroom: int | str, device_bytes: int) -> int:
    """Reads a size, or a share of the device such as "10%".

    Raises:
        InvalidConfig: neither, or not less than all of it.
    """
    if isinstance(headroom, str) and headroom.strip().endswith("%"):
        try:
            share = float(headroom.strip()[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise InvalidConfig(
                f"headroom is {headroom[:40]!r}; write a size such as '8GiB', or a share from 0% to 99%"
            )
        return int(share * device_bytes)
    return 0 if headroom in (0, "0") else parse_bytes(headroom)


def _notes(model: ModelFacts, demand: Demand, room: MemorySplit) -> list[str]:
    notes = [model.note] if model.note else []
    kept, seen = model.kv_bytes_per_token * demand.tokens_per_document, model.seen_bytes(demand.tokens_per_document)
    if seen < kept:
        notes.append(
            f"windows hide {1 - seen / kept:.0%} of a document's keys and values from everything after it; the engine "
            "keeps them nevertheless"
        )
    longest = demand.system_tokens + demand.tokens_per_document + demand.question_tokens + demand.answer_tokens
    if model.max_positions is not None and longest > model.max_positions:
        notes.append(
            f"a prompt takes {longest:,} positions in shared layout, and the model has {model.max_positions:,}"
        )
    config = ChunkCacheConfig()
    if demand.tokens_per_document > config.max_chunk_tokens:
        notes.append(f"documents above {config.max_chunk_tokens:,} tokens need a larger max_chunk_tokens, or are split")
    if room.resident > config.max_chunks:
        notes.append(f"more than {config.max_chunks:,} documents at once need a larger max_chunks")
    if room.chunk_blocks == MAX_BLOCKS:
        notes.append(f"a pool has at most {room.chunk_blocks:,} blocks; larger blocks would use the rest of the memory")
    if demand.documents_per_prompt > 1:
        notes.append(
            "a document that is the first of one prompt and a later one of another is kept twice, unless chunk_context "
            "is system"
        )
    busy = min(demand.concurrency * demand.documents_per_prompt, demand.documents)
    if busy > room.resident:
        notes.append(
            f"prompts that run at once may need {busy:,} documents, and {room.resident:,} fit: some prompts will wait"
        )
    return notes
