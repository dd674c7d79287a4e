"""The prefix tree: cached conversations as forking runs of blocks, and documents, under their system texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from heapq import nlargest
from itertools import islice
from typing import Any

from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import TOKEN_BYTES, Key, decode_tokens
from kvmosaic.cache.plan import Plan, SpanPlan
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.prefix_entry import PrefixEntry
from kvmosaic.errors import InvalidConfig
from kvmosaic.prompt import SegmentKind

Decode = Callable[[Sequence[int]], str]
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
class TreeLimits:
    """Limits on the tree that is shown. What is omitted is counted, not visited."""

    depth: int = 8
    """Levels of runs below a system text, 1 to 32."""
    children: int = 8
    """Maximum runs after one run, and documents and places of one system text, 1 to 100; most recently used first."""
    runs: int = 200
    """Maximum runs in all, 1 to 2,000."""
    tokens: int = 12
    """First tokens of a run that are shown, 0 to 64."""

    def __post_init__(self) -> None:
        for name, lowest, highest in (("depth", 1, 32), ("children", 1, 100), ("runs", 1, 2_000), ("tokens", 0, 64)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
                raise InvalidConfig(f"{name} of the tree must be between {lowest} and {highest}, got {value!r:.80}")


@dataclass(frozen=True, slots=True)
class TreeRun:
    """Consecutive blocks without a fork between them and with equal hits."""

    num_tokens: int
    num_blocks: int
    hits: int
    """Prompts with a cache hit on it."""
    users: int
    """Sequences that read it now (ref count)."""
    idle_seconds: float
    """Seconds since a sequence last began or ended to read it."""
    token_ids: tuple[int, ...] = ()
    """Its first tokens."""
    children: tuple[TreeRun, ...] = ()
    """Runs right after it, most recently used first."""
    num_hidden: int = 0
    """Runs right after it that are not shown."""
    text: str | None = None
    """Decoded text of `token_ids`; None if not decoded."""


@dataclass(frozen=True, slots=True)
class TreeDocument:
    """A document in the cache."""

    name: str | None
    num_tokens: int
    num_blocks: int
    hits: int
    """Prompts with a cache hit on it."""
    users: int
    pinned: bool
    is_ready: bool
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class TreePlace:
    """Conversations that saw the same before their first token."""

    documents: tuple[str, ...]
    """Names of the documents that they see, in the order of the first prompt.

    `?` is one without a name, `…` after the hundredth replaces all others.
    """
    start: int
    """Position of their first token."""
    runs: tuple[TreeRun, ...]
    num_hidden: int = 0


@dataclass(frozen=True, slots=True)
class TreeSystem:
    """A system text of one tenant, with the documents after it, and the conversations."""

    tenant: str
    is_salted: bool
    num_tokens: int
    """0: no system text, and everything that starts at position 0: plain prompts, and system texts themselves."""
    token_ids: tuple[int, ...] = ()
    documents: tuple[TreeDocument, ...] = ()
    num_hidden_documents: int = 0
    places: tuple[TreePlace, ...] = ()
    num_hidden_places: int = 0
    text: str | None = None


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A snapshot of the caches for display.

    system "Answer from the documents."  8 tokens
      ├─ document ferry    26 tokens
      ├─ document mill     28 tokens
      └─ conversations over ferry, mill
           └─ "Where does the ferry go?"  32 tokens, 2 blocks, 2 hits
                ├─ "Who is the miller?"   19 tokens
                └─ "When does it go?"     21 tokens
    """

    systems: tuple[TreeSystem, ...]
    block_size: int
    num_hidden: int = 0
    """System texts that are not shown."""

    @property
    def runs(self) -> tuple[TreeRun, ...]:
        """All runs that are shown, parents before children."""
        found: list[TreeRun] = []
        waiting = [run for system in self.systems for place in system.places for run in place.runs]
        while waiting:
            run = waiting.pop()
            found.append(run)
            waiting.extend(run.children)
        return tuple(found)

    def with_texts(self, decode: Decode, may_see: Callable[[str], bool] = lambda _: True) -> PrefixTree:
        """The same tree with decoded texts, for tenants whose texts may be seen."""
        systems = (_with_texts(system, decode) if may_see(system.tenant) else system for system in self.systems)
        return replace(self, systems=tuple(systems))

    def without_tokens(self, may_see: Callable[[str], bool]) -> PrefixTree:
        """The same tree without tokens and document names of tenants whose texts may not be seen."""
        systems = (system if may_see(system.tenant) else _blank(system) for system in self.systems)
        return replace(self, systems=tuple(systems))

    def renamed(self, shown: Callable[[str], str]) -> PrefixTree:
        """The same tree with document names mapped for display."""
        systems = []
        for system in self.systems:
            documents = tuple(replace(each, name=each.name and shown(each.name)) for each in system.documents)
            places = tuple(replace(each, documents=tuple(map(shown, each.documents))) for each in system.places)
            systems.append(replace(system, documents=documents, places=places))
        return replace(self, systems=tuple(systems))

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        plain: dict[str, Any] = _plain(self)
        return plain

    def check_invariants(self, limits: TreeLimits) -> None:
        """Checks the numbers against each other and against the limits."""
        assert len(self.runs) <= limits.runs
        for system in self.systems:
            assert len(system.documents) <= limits.children and len(system.places) <= limits.children
            for place in system.places:
                assert all(_depth_of(run) <= limits.depth for run in place.runs)
                assert len(place.runs) <= limits.children
        for run in self.runs:
            assert 0 < run.num_tokens <= run.num_blocks * self.block_size
            assert run.num_tokens > (run.num_blocks - 1) * self.block_size, "only the last block is partly filled"
            assert not run.children or run.num_tokens == run.num_blocks * self.block_size
            assert len(run.children) <= limits.children and len(run.token_ids) <= limits.tokens
            assert all(child.hits <= run.hits and child.users <= run.users for child in run.children)


def _with_texts(system: TreeSystem, decode: Decode) -> TreeSystem:
    places = tuple(
        replace(place, runs=tuple(_run_with_texts(run, decode) for run in place.runs)) for place in system.places
    )
    return replace(system, text=decode(system.token_ids), places=places)


def _run_with_texts(run: TreeRun, decode: Decode) -> TreeRun:
    children = tuple(_run_with_texts(child, decode) for child in run.children)
    return replace(run, text=decode(run.token_ids), children=children)


def _blank(system: TreeSystem) -> TreeSystem:
    documents = tuple(replace(document, name=None) for document in system.documents)
    places = tuple(
        replace(place, documents=("?",) * len(place.documents), runs=tuple(map(_blank_run, place.runs)))
        for place in system.places
    )
    return replace(system, token_ids=(), text=None, documents=documents, places=places)


def _blank_run(run: TreeRun) -> TreeRun:
    return replace(run, token_ids=(), text=None, children=tuple(map(_blank_run, run.children)))


def _depth_of(run: TreeRun) -> int:
    return 1 + max(map(_depth_of, run.children), default=0)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


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
            if (tenant is None or origin.group[0] == tenant) and self._prefix.children_of(root, None) is not None:
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
        siblings = self._prefix.children_of(root, parent)
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
            siblings = self._prefix.children_of(root, entry)
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
