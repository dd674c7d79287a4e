"""Document pool inside vLLM's block pool: documents are evicted last, as a whole, by priority and last use."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvmosaic.eviction import Candidate, EvictionPolicy, EvictionQueue
from kvmosaic.vllm.contract import DEFAULT_PRIORITY, MAX_CHANGE
from kvmosaic.vllm.scheduler.block_store import BlockStore, HashedBlock

_MAX_CLAIMS = 64
"""Most labels of one text: each is a stored document with that text."""
_MAX_UPDATES = 4_096
"""Updates that are remembered, by label: what was rendered before one may arrive after it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Wishes of a stored document for the KV of its text; of documents in requests, their priority only."""

    priority: float = DEFAULT_PRIORITY
    is_pinned: bool = False
    change: int = 0
    """Number of the change of the stored document since which it holds; 0: not known."""


@dataclass(eq=False, slots=True)
class PooledDocument:
    """A cached chunk prompt: what the document saw, the document, and padding."""

    name: Any
    """The hash of its last block, which covers all of its tokens, its salt and its adapter."""
    blocks: tuple[HashedBlock, ...]
    num_tokens: int
    claims: dict[str, Claim] = field(default_factory=dict)
    """By label of a stored document; "": of documents that requests brought along."""
    last_used: float = 0.0
    hits: int = -1
    rank: float = 0.0
    is_pinned: bool = False
    queue_entry: tuple[float, int, Any] | None = None

    @property
    def is_cached(self) -> bool:
        """Whether vLLM has evicted none of its blocks."""
        return all(block.block_hash == block_hash for block, block_hash in self.blocks)

    @property
    def priority(self) -> float:
        """The highest of its claims."""
        return max((claim.priority for claim in self.claims.values()), default=DEFAULT_PRIORITY)

    @property
    def wants_pin(self) -> bool:
        """Whether any stored document with its text is pinned."""
        return any(claim.is_pinned for claim in self.claims.values())


class DocumentPool:
    """Orders the documents in vLLM's cache, up to a bound, after everything else that vLLM could evict.

        free queue   │ empty, copies, prefixes │ document │ document │ … │ pinned document │
                       evicted first ─────────────── lowest rank first ──────────────▶ last

    The blocks of documents stay *free*: no reference is held between steps. So documents never take room from requests.
    vLLM allocates their blocks when it has no others, before it preempts a request, and a reset finds nothing in use.
    What the pool changes is their order, with `touch` and `free_blocks`: a document within the bound outlives what was
    used later, and documents leave one after the other, by the rank of the eviction policy. Of a document, the blocks
    after the shared system text leave first.

    Blocks that requests free come to the tail, after documents. So the pool restores the order when as many blocks as
    the next step may allocate are no longer sure to be before them (`before_alloc`).

    Invariants: unpinned documents are in the queue, pinned ones are not; without pins at most `max_blocks` blocks are
    the pool's; pinned documents take at most half of them.
    """

    def __init__(
        self,
        store: BlockStore,
        max_blocks: int,
        step_blocks: int,
        policy: EvictionPolicy,
        *,
        block_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An empty pool.

        Args:
            store: vLLM's block pool.
            max_blocks: the bound; 0: nothing is pooled.
            step_blocks: blocks that requests which run already may allocate in one step.
            policy: which document is evicted first.
            block_bytes: bytes of a block.
            clock: seconds of the last use.
        """
        self._store, self._policy, self._clock, self._block_bytes = store, policy, clock, block_bytes
        self.max_blocks, self._step_blocks = max_blocks, step_blocks
        self._documents: dict[Any, PooledDocument] = {}
        self._labels: dict[str, set[Any]] = {}
        self._updates: OrderedDict[str, Claim | None] = OrderedDict()
        """The last update of each label, the earliest first; None: it is of no document any more."""
        self._queue: EvictionQueue[PooledDocument] = EvictionQueue()
        self._num_users: Counter[int] = Counter()
        """Documents of each block: those after one system text share its blocks."""
        self._numbers = count()
        self._evicted_rank = 0.0
        self._num_pinned_blocks = 0
        self._num_before = 0
        """Free blocks before the first document in vLLM's queue, at least."""
        self._is_in_order = True
        self._table = store.table
        self.num_evicted = 0
        """Documents that left the pool to keep its bound, or because vLLM needed their blocks."""

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def num_blocks(self) -> int:
        """Blocks of its documents, shared ones once."""
        return len(self._num_users)

    @property
    def num_pinned(self) -> int:
        """Number of pinned documents."""
        return len(self._documents) - len(self._queue)

    def use(self, hashes: Sequence[Any], num_tokens: int, label: str = "", claim: Claim | None = None) -> None:
        """Counts a use of a document, which joins the pool if all of its blocks are cached.

        Args:
            hashes: of the blocks of its chunk prompt.
            num_tokens: without padding.
            label: of the stored document; "": it is not stored.
            claim: its priority and pin; None: unchanged. One from before the last update does not count.
        """
        self._watch()
        document = self._documents.get(hashes[-1])
        if document is not None and not document.is_cached:
            self._remove(document)
            self.num_evicted += 1
            document = None
        if document is None:
            blocks = self._store.find(hashes) if len(hashes) <= self.max_blocks else None
            if blocks is None:
                return
            document = self._add(hashes[-1], tuple((block, block.block_hash) for block in blocks), num_tokens)
        document.hits += 1
        document.last_used = self._clock()
        label, claim = self._newest(label, claim, document)
        if claim is not None:
            self._claim(document, label, claim)
        self._place(document)
        self._shrink()

    def update(self, claims: Mapping[str, Claim | None]) -> None:
        """Changes priority and pin of the documents with these labels; None: the label is of no document any more.

        A label stays with one text, so one of no document never comes back. Updates may arrive in any order.
        """
        for label, claim in claims.items():
            if not self._remember(label, claim):
                continue
            for name in tuple(self._labels.get(label, ())):
                document = self._documents[name]
                if claim is not None:
                    self._claim(document, label, claim)
                    self._place(document)
                    continue
                del document.claims[label]
                self._labels[label].discard(name)
                if not document.claims:
                    self._remove(document)
                else:
                    self._place(document)
            if not self._labels.get(label, True):
                del self._labels[label]
        self._shrink()

    def on_free(self) -> None:
        """Notes that vLLM frees blocks: they come after documents."""
        self._is_in_order = False

    def on_alloc(self, num_blocks: int) -> None:
        """Notes that vLLM allocated so many blocks."""
        self._num_before -= num_blocks

    def before_alloc(self, num_blocks: int = 0) -> None:
        """Moves documents to the tail again, unless so many blocks, and those of a step, are before them anyway."""
        self._watch()
        if not self._documents or self._is_in_order or self._num_before >= num_blocks + self._step_blocks:
            return
        for document in [each for each in self._documents.values() if not each.is_cached]:
            self._remove(document)
            self.num_evicted += 1
        ordered: dict[int, Any] = {}
        for document in reversed(self.in_order()):
            for block, _ in document.blocks:
                ordered.setdefault(block.block_id, block)
        self._store.evict_last(reversed(ordered.values()))
        self._num_before = self._store.num_free - len(ordered)
        self._is_in_order = True

    def in_order(self) -> list[PooledDocument]:
        """All documents, the first to be evicted first."""
        pinned = [each for each in self._documents.values() if each.is_pinned]
        return [*self._queue.in_order(), *sorted(pinned, key=lambda each: each.rank)]

    def check_invariants(self) -> None:
        """Checks what the class promises."""
        users: Counter[int] = Counter()
        for document in self._documents.values():
            assert document.is_pinned == (document.queue_entry is None)
            users.update(block.block_id for block, _ in document.blocks)
            assert all(document.name in self._labels[label] for label in document.claims if label)
        assert users == self._num_users
        pinned = [each for each in self._documents.values() if each.is_pinned]
        assert self._num_pinned_blocks == sum(len(each.blocks) for each in pinned) <= self.max_blocks // 2
        assert self.num_blocks <= self.max_blocks
        names = {name for names in self._labels.values() for name in names}
        assert names <= self._documents.keys() and all(self._labels.values())

    def _watch(self) -> None:
        """Detects a reset of vLLM's prefix cache by its new hash table: nothing of the pool is cached any more."""
        if self._store.table is not self._table:
            self._table = self._store.table
            for document in list(self._documents.values()):
                self._remove(document)

    def _add(self, name: Any, blocks: tuple[HashedBlock, ...], num_tokens: int) -> PooledDocument:
        self._documents[name] = document = PooledDocument(name, blocks, num_tokens)
        self._num_users.update(block.block_id for block, _ in blocks)
        self._push(document)
        return document

    def _remove(self, document: PooledDocument) -> None:
        self._unplace(document)
        del self._documents[document.name]
        for block, _ in document.blocks:
            self._num_users[block.block_id] -= 1
            if not self._num_users[block.block_id]:
                del self._num_users[block.block_id]
        for label in document.claims:
            self._unlabel(label, document.name)

    def _claim(self, document: PooledDocument, label: str, claim: Claim) -> None:
        document.claims.pop(label, None)
        document.claims[label] = claim
        if label:
            self._labels.setdefault(label, set()).add(document.name)
        if len(document.claims) > _MAX_CLAIMS:
            oldest = next(iter(document.claims))
            del document.claims[oldest]
            self._unlabel(oldest, document.name)

    def _newest(self, label: str, claim: Claim | None, document: PooledDocument) -> tuple[str, Claim | None]:
        """Label and claim for a document that a request names with these; what the request says may be out of date."""
        updated = self._updates.get(label)
        if updated is None and label in self._updates:
            return "", None  # deleted since the request was rendered
        known = [each for each in (updated, claim, document.claims.get(label)) if each is not None]
        return label, max(known, key=lambda each: each.change, default=Claim() if label else None)

    def _remember(self, label: str, claim: Claim | None) -> bool:
        """Notes an update; whether it is news."""
        if label in self._updates:
            known = self._updates[label]
            if known is None or (claim is not None and claim.change < known.change):
                return False
        self._updates[label] = claim
        self._updates.move_to_end(label)
        if len(self._updates) > _MAX_UPDATES:
            self._updates.popitem(last=False)
        return True

    def _unlabel(self, label: str, name: Any) -> None:
        names = self._labels.get(label)
        if names is not None:
            names.discard(name)
            if not names:
                del self._labels[label]

    def _place(self, document: PooledDocument) -> None:
        """Pins a document, or gives it its rank in the queue; vLLM's order follows at the next `before_alloc`."""
        self._unplace(document)
        self._push(document)
        self._is_in_order = False

    def _push(self, document: PooledDocument) -> None:
        document.rank = self._policy.rank(
            Candidate(
                document.last_used,
                document.num_tokens,
                document.priority,
                hits=max(document.hits, 0),
                num_bytes=len(document.blocks) * self._block_bytes,
                evicted_rank=self._evicted_rank,
            )
        )
        num_pinned = self._num_pinned_blocks + len(document.blocks)
        if document.wants_pin and num_pinned <= self.max_blocks // 2:
            document.is_pinned, self._num_pinned_blocks = True, num_pinned
            return
        document.queue_entry = (document.rank, next(self._numbers), document)
        self._queue.push(document)

    def _unplace(self, document: PooledDocument) -> None:
        if document.is_pinned:
            document.is_pinned = False
            self._num_pinned_blocks -= len(document.blocks)
        else:
            self._queue.remove(document)

    def _shrink(self) -> None:
        """Lets documents leave until the bound holds; their blocks stay in vLLM's cache, where vLLM orders them."""
        while self.num_blocks > self.max_blocks and (first := self._queue.first()) is not None:
            self._evicted_rank = max(self._evicted_rank, first.rank)
            self._remove(first)
            self.num_evicted += 1


def read_claims(said: object) -> dict[str, Claim | None]:
    """Reads the claims of an update from the front, by label; what cannot be read is left out."""
    if not isinstance(said, Mapping):
        return {}
    claims: dict[str, Claim | None] = {}
    for label, fields in said.items():
        if fields is None:
            claims[str(label)] = None
        elif isinstance(fields, Mapping):
            change = fields.get("change")
            change = change if type(change) is int and 0 <= change < MAX_CHANGE else 0
            claims[str(label)] = Claim(_priority(fields.get("priority")), fields.get("pinned") is True, change)
    return claims


def _priority(value: object) -> float:
    is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    return float(value) if is_valid else DEFAULT_PRIORITY  # type: ignore[arg-type]
