"""The prefix tree: cached conversations as forking runs of blocks, and documents, under their system texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvmosaic.errors import InvalidConfig

Decode = Callable[[Sequence[int]], str]


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
