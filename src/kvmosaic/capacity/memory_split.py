"""Memory split of a device: weights, headroom, requests, and the documents that fit in the rest."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.capacity.demand import Demand
from kvmosaic.capacity.facts import ModelFacts
from kvmosaic.errors import InvalidConfig

MAX_BLOCKS = 2**24
"""Maximum number of blocks of a pool, whatever the memory (`memory.budget`)."""


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

    @property
    def request_bytes(self) -> int:
        """Bytes of the request pool."""
        return self.request_blocks * self.bytes_per_block

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunk pool."""
        return self.chunk_blocks * self.bytes_per_block

    @property
    def resident(self) -> int:
        """Maximum number of documents on the device at once."""
        return min(self.documents, self.chunk_blocks // self.blocks_per_document)

    @property
    def document_bytes(self) -> int:
        """Bytes of a document's blocks."""
        return self.blocks_per_document * self.bytes_per_block

    def wasted_share(self, num_tokens: int) -> float:
        """Share of empty slots in a document's blocks."""
        return 1.0 - num_tokens / (self.blocks_per_document * self.block_size)

    @property
    def is_cut(self) -> bool:
        """Whether there is memory for more blocks than a pool can have."""
        return self.chunk_blocks == MAX_BLOCKS


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
    left = device_bytes - weight_bytes - headroom_bytes - request_blocks * per_block
    if left < 0:
        requests = _gib(request_blocks * per_block)
        parts = f"weights {_gib(weight_bytes)}, headroom {_gib(headroom_bytes)}, requests {requests}"
        raise InvalidConfig(
            f"{model.name} does not fit into {_gib(device_bytes)}: {parts}; take a larger device, another dtype, less "
            "concurrency or less headroom"
        )
    per_document = blocks_of(demand.tokens_per_document, block_size)
    chunk_blocks = min(left // per_block, MAX_BLOCKS)
    if chunk_blocks < per_document:
        raise InvalidConfig(
            f"{_gib(left)} are left for documents, and one of {demand.tokens_per_document:,} tokens takes "
            f"{_gib(per_document * per_block)}; take a larger device, shorter documents or less concurrency"
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
    )


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that hold a segment: its last one is its own, even if it is not full."""
    return -(-num_tokens // block_size)


def _gib(num_bytes: int) -> str:
    """In GiB; what would read as 0.00 of them in bytes."""
    return f"{num_bytes / 2**30:,.2f} GiB" if not 0 < num_bytes < 2**30 / 100 else f"{num_bytes:,} bytes"
