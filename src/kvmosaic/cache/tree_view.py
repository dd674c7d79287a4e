"""The tree view: builds a `PrefixTree` from roots, entries and chunks, in time proportional to what is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import TOKEN_BYTES, Key, decode_tokens
from kvmosaic.cache.plan import Plan, SpanPlan
from kvmosaic.cache.prefix_cache import PrefixCache, PrefixEntry
from kvmosaic.cache.tree import PrefixTree, TreeDocument, TreeLimits, TreePlace, TreeRun, TreeSystem
from kvmosaic.prompt import SegmentKind

MAX_ORIGINS = 4_096
MAX_ORIGIN_CHARACTERS = 2**24
"""Maximum characters of document names in all origins: clients choose the names."""
MAX_NAMED = 100
"""Maximum documents of one prompt whose names are stored; `…` replaces the rest."""
MAX_LOOKED_AT = 20_000
"""Maximum chunks, or blocks, that one view visits: some milliseconds."""
MAX_COMPARED = 1_000
"""Maximum siblings whose last use is compared."""
_FIRST_TOKENS = 64

Group = tuple[str, str, Key]
"""Tenant, salt, and key of the system text (empty if there is none)."""


@dataclass(frozen=True, slots=True)
class RootOrigin:
    """What precedes the first token after a root."""

    group: Group
    system_tokens: int
    system_ids: tuple[int, ...]
    documents: tuple[str, ...]
    start: int

    @property
    def num_characters(self) -> int:
        """Total characters of its document names."""
        return sum(map(len, self.documents))


class RootOrigins:
    """Origins of the most recently used roots; a root itself is a hash. Dropped roots are not shown."""

    def __init__(self) -> None:
        self._origins: dict[Key, RootOrigin] = {}
        self._num_characters = 0

    def note(self, plan: Plan) -> None:
        """Records the roots of a prompt, most recently used last."""
        noted: Key | None = None
        for index, span in enumerate(plan.spans):
            if span.root == noted:
                continue  # most documents of a prompt have the same root
            noted = span.root
            origin = self._origins.pop(span.root, None)
            if origin is None:
                origin = _origin_of(plan, index)
                self._num_characters += origin.num_characters
            self._origins[span.root] = origin
        while len(self._origins) > MAX_ORIGINS or self._num_characters > MAX_ORIGIN_CHARACTERS:
            self._num_characters -= self._origins.pop(next(iter(self._origins))).num_characters

    def get(self, root: Key) -> RootOrigin | None:
        """The origin of a root, if recorded."""
        return self._origins.get(root)

    def newest_first(self) -> Iterable[tuple[Key, RootOrigin]]:
        """All of them, most recently used first."""
        return reversed(self._origins.items())


def _origin_of(plan: Plan, index: int) -> RootOrigin:
    span = plan.layout.spans[index]
    seen = [plan.spans[view.span] for view in span.views]
    system = next((one for one in seen if one.kind is SegmentKind.SYSTEM), None)
    names = () if plan.spans[index].is_chunk else tuple(one.name or "?" for one in seen if one.is_chunk)
    documents = names if len(names) <= MAX_NAMED else (*names[:MAX_NAMED], "…")
    key = system.key if system is not None else Key(b"")
    num_tokens = system.num_tokens if system is not None else 0
    return RootOrigin((plan.tenant, plan.salt, key), num_tokens, _first_ids(system), documents, span.start)


def _first_ids(span: SpanPlan | None) -> tuple[int, ...]:
    return () if span is None else decode_tokens(span.tokens[: TOKEN_BYTES * _FIRST_TOKENS])


class TreeView:
    """Builder of one tree from the caches."""

    def __init__(
        self, prefix: PrefixCache, chunks: ChunkIndex, origins: RootOrigins, limits: TreeLimits, now: float
    ) -> None:
        self._prefix = prefix
        self._chunks = chunks
        self._origins = origins
        self._limits = limits
        self._now = now
        self._runs_left = limits.runs
        self._blocks_left = MAX_LOOKED_AT

    def tree(self, tenant: str | None) -> PrefixTree:
        """The tree of a tenant, or (None) of all."""
        places: dict[Group, list[tuple[Key, RootOrigin]]] = {}
        for root, origin in self._origins.newest_first():
            if (tenant is None or origin.group[0] == tenant) and self._prefix.behind(root, None) is not None:
                places.setdefault(origin.group, []).append((root, origin))
        documents: dict[Group, list[Chunk]] = {}
        origins: dict[Group, RootOrigin] = {group: found[0][1] for group, found in places.items()}
        for chunk in islice(self._chunks.newest_first(), MAX_LOOKED_AT):
            origin_of_chunk = self._origins.get(chunk.root)
            if origin_of_chunk is not None and (tenant is None or chunk.tenant == tenant):
                origins.setdefault(origin_of_chunk.group, origin_of_chunk)
                documents.setdefault(origin_of_chunk.group, []).append(chunk)
        groups = list(origins)[: self._limits.children]
        systems = tuple(
            self._system(origins[group], places.get(group, []), documents.get(group, [])) for group in groups
        )
        return PrefixTree(systems, self._prefix.pool.block_size, len(origins) - len(groups))

    def _system(
        self, origin: RootOrigin, places: Sequence[tuple[Key, RootOrigin]], documents: Sequence[Chunk]
    ) -> TreeSystem:
        most, (tenant, salt, _) = self._limits.children, origin.group
        shown = nlargest(most, documents, key=lambda chunk: chunk.last_used)
        return TreeSystem(
            tenant=tenant,
            is_salted=bool(salt),
            num_tokens=origin.system_tokens,
            token_ids=origin.system_ids[: self._limits.tokens],
            documents=tuple(self._document(chunk) for chunk in shown),
            num_hidden_documents=len(documents) - len(shown),
            places=tuple(self._place(root, place) for root, place in places[:most]),
            num_hidden_places=max(len(places) - most, 0),
        )

    def _document(self, chunk: Chunk) -> TreeDocument:
        return TreeDocument(
            name=next(reversed(tuple(chunk.names)), None),
            num_tokens=chunk.num_tokens,
            num_blocks=len(chunk.block_ids),
            hits=chunk.hits,
            users=chunk.ref_count,
            pinned=chunk.pinned,
            is_ready=chunk.is_ready,
            idle_seconds=self._now - chunk.last_used,
        )

    def _place(self, root: Key, origin: RootOrigin) -> TreePlace:
        runs, num_hidden = self._children(root, None, 1)
        return TreePlace(origin.documents, origin.start, runs, num_hidden)

    def _children(self, root: Key, parent: PrefixEntry | None, level: int) -> tuple[tuple[TreeRun, ...], int]:
        """The runs after an entry or a root, and how many are omitted."""
        siblings = self._prefix.behind(root, parent)
        if siblings is None:
            return (), 0
        if level > self._limits.depth or not self._runs_left or not self._blocks_left:
            return (), len(siblings)
        compared = islice(siblings, MAX_COMPARED)
        chosen = nlargest(min(self._limits.children, self._runs_left), compared, key=lambda entry: entry.last_used)
        self._runs_left -= len(chosen)
        return tuple(self._run(root, entry, level) for entry in chosen), len(siblings) - len(chosen)

    def _run(self, root: Key, first: PrefixEntry, level: int) -> TreeRun:
        """The run that begins with an entry; it ends at a fork, or where the hits decrease."""
        entry, num_blocks, tokens = first, 1, first.tokens
        num_bytes = len(tokens)
        while self._blocks_left > 0:
            self._blocks_left -= 1
            siblings = self._prefix.behind(root, entry)
            child = next(iter(siblings)) if siblings is not None and len(siblings) == 1 else None
            if child is None or (child.hits, child.ref_count) != (entry.hits, entry.ref_count):
                break
            entry, num_blocks, num_bytes = child, num_blocks + 1, num_bytes + len(child.tokens)
            if len(tokens) < TOKEN_BYTES * self._limits.tokens:
                tokens += child.tokens
        children, num_hidden = self._children(root, entry, level + 1)
        return TreeRun(
            num_tokens=num_bytes // TOKEN_BYTES,
            num_blocks=num_blocks,
            hits=first.hits,
            users=first.ref_count,
            idle_seconds=self._now - first.last_used,
            token_ids=decode_tokens(tokens[: TOKEN_BYTES * self._limits.tokens]),
            children=children,
            num_hidden=num_hidden,
        )
