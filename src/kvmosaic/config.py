"""Settings: frozen dataclasses, composed, each field explained below it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kvmosaic.errors import InvalidConfig, InvalidSeparator
from kvmosaic.eviction import EvictionPolicy, choose
from kvmosaic.layout import ChunkContext
from kvmosaic.layout.strategies import strategy_names
from kvmosaic.prompt.lead_in import LEAD_IN, MAX_LEAD_IN_CHARACTERS
from kvmosaic.prompt.separator import read_separator
from kvmosaic.repair import DEFAULT_REPAIR, RepairPolicy, repair_policy

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_BYTES = 2**50
MAX_TIERS = 8


def parse_bytes(size: int | str) -> int:
    """Reads a size: a whole number of bytes, or text such as "2GiB", "512 MB" or "1.5G" (K, M, G, T: powers of 1024).

    Raises:
        InvalidConfig: not a size, not positive, or above 1 PiB.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
        if match is None or match[2].upper() not in _UNITS:
            raise InvalidConfig(
                f"{size[:99]!r} is not a size; write a number of bytes, or for example '2GiB' or '512MB'"
            )
        number = min(float(match[1]), float(_MAX_BYTES + 1))
        size = int(number * _UNITS[match[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= _MAX_BYTES:
        raise InvalidConfig(f"a size must be a whole number of bytes between 1 and 2**50 (1 PiB), got {size!r}")
    return size


class Unset(str):
    """A default that was not set: equal to its text, and distinguished from it by its type.

    So a model's profile may change what the caller did not choose. `dataclasses.replace` keeps it as it is.
    """

    __slots__ = ()


_AUTO: Any = Unset("auto")
_SYSTEM: Any = Unset("system")
_REPAIR: Any = Unset(DEFAULT_REPAIR)


@dataclass(frozen=True, slots=True)
class ChunkCacheConfig:
    """What the chunk cache keeps, how large it may grow, and how documents are placed."""

    capacity: int | str = "2GiB"
    """Memory for cached chunks: bytes or text such as "2GiB"."""
    memory_fraction: float | None = None
    """Instead of `capacity`: this fraction of the device's memory (0 < fraction < 1)."""
    block_size: int = 16
    """Token slots per block, for both pools."""
    max_chunks: int = 100_000
    """Maximum of cached chunks."""
    max_chunk_tokens: int = 32_768
    """Maximum tokens of a chunk; see `long_chunks`."""
    max_prompt_chunks: int = 4_096
    """Maximum documents of one prompt."""
    long_chunks: Literal["error", "split"] = "error"
    """What happens to a longer document: an error, or a split into sub-chunks."""
    separator: str | None = None
    """Text that splits a prompt string into segments, such as "##"; None or "": strings are never split."""
    hash_algorithm: Literal["sha256", "xxh3_128"] = "sha256"
    """Hash of the keys by which blocks and chunks are looked up; xxh3_128 is faster and always compares tokens.
    Processes that share tiers choose the same."""
    position_strategy: str = _AUTO
    """Positions of documents: one after the other ("sequential"), all right after the system prompt ("shared"), where
    the caller says ("absolute"), or sequential where the prompt fits the model's positions, else shared ("auto")."""
    chunk_context: ChunkContext = _SYSTEM
    """What a document saw when it was computed: the system prompt, the system prompt and a lead-in, or nothing."""
    lead_in: str = LEAD_IN
    """The text in front of documents when they are computed with chunk_context "lead_in"; no prompt contains it. About
    a paragraph, best in the language of the documents."""
    repair: str | RepairPolicy = _REPAIR
    """Which tokens of cached documents every request computes again, if it does not say so itself: see
    `kvmosaic.repair`."""
    eviction: str | EvictionPolicy = "lru"
    """Eviction policy: "lru", "lfu", "priority", or an object of your own."""
    verify_tokens: bool = True
    """Compare the tokens of a hit with those asked for, whatever the hash."""
    log_stats_seconds: float | None = None
    """Log the statistics this often; None: never."""

    def __post_init__(self) -> None:
        _check_choice("long_chunks", self.long_chunks, ("error", "split"))
        _check_choice("hash_algorithm", self.hash_algorithm, ("sha256", "xxh3_128"))
        _check_choice("position_strategy", self.position_strategy, strategy_names(auto=True))
        _check_choice("chunk_context", self.chunk_context, get_args(ChunkContext))
        if not isinstance(self.lead_in, str) or not 1 <= len(self.lead_in.strip()) <= MAX_LEAD_IN_CHARACTERS:
            raise InvalidConfig(
                f"lead_in must be a text of 1 to {MAX_LEAD_IN_CHARACTERS} characters, got {self.lead_in!r:.80}"
            )
        choose(self.eviction)
        repair_policy(self.repair)
        _check_range("block_size", self.block_size, 1, 4096)
        _check_range("max_chunks", self.max_chunks, 1, 10**8)
        _check_range("max_chunk_tokens", self.max_chunk_tokens, 1, 10**7)
        _check_range("max_prompt_chunks", self.max_prompt_chunks, 1, 10**6)
        parse_bytes(self.capacity)
        if self.memory_fraction is not None and not (_is_number(self.memory_fraction) and 0 < self.memory_fraction < 1):
            raise InvalidConfig(f"memory_fraction must be a number above 0 and below 1, got {self.memory_fraction!r}")
        seconds = self.log_stats_seconds
        if seconds is not None and not (_is_number(seconds) and 0 < seconds <= 86_400):
            raise InvalidConfig(f"log_stats_seconds must be a number above 0 and at most 86400, got {seconds!r}")
        try:
            object.__setattr__(self, "separator", read_separator(self.separator))
        except InvalidSeparator as error:
            raise InvalidConfig(str(error)) from None

    def says(self, name: str) -> bool:
        """Whether the caller set `position_strategy`, `chunk_context` or `repair`, even if as the default.

        An unset value may come from the model's profile.
        """
        return not isinstance(getattr(self, name), Unset)

    @property
    def capacity_bytes(self) -> int:
        """`capacity` in bytes."""
        return parse_bytes(self.capacity)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much the engine runs at once."""

    max_batched_tokens: int = 2_048
    """Maximum tokens of one step: missing chunks, questions and one token for every running answer."""
    max_running: int = 64
    """Maximum of running sequences."""
    max_waiting: int = 100_000
    """Maximum of waiting requests; more are refused."""
    request_cache: int | str = "1GiB"
    """Memory for prefixes, questions and answers: bytes or text such as "1GiB"."""
    max_model_len: int | None = None
    """Maximum positions of one sequence; None: what the model allows."""
    enable_prefix_caching: bool = True
    """Keep the blocks of system prompts, questions and answers for later requests that begin alike."""
    num_threads: int | None = None
    """Threads that torch computes with on a CPU, in the whole process; None: torch's own choice, one per core."""
    priority_aging_seconds: float | None = 60.0
    """Waiting so long counts as much as one more step of priority, so that no request starves; None: it never
    counts, and a request of low priority waits as long as others come."""
    preemption_gap: int | None = 10
    """A waiting request without room preempts running ones whose priority is lower by at least this; None: it always
    waits until there is room."""
    time_slice_seconds: float | None = 60.0
    """An answer with a rolling window that has run so long, and any other that has run ten times as long, is preempted
    by a request without room, and resumed later; None: it runs to its end, and `max_running` endless answers starve all
    other requests."""
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    """Blocks of preempted answers: dropped and computed again ("recompute"), moved to host memory and back while there
    is room ("swap"), or whichever was measured to be faster ("auto")."""
    swap_space: int | str | None = "256MiB"
    """Maximum host memory for the blocks of preempted answers; None or 0: they are computed again."""

    def __post_init__(self) -> None:
        _check_range("max_batched_tokens", self.max_batched_tokens, 1, 2**20)
        _check_range("max_running", self.max_running, 1, 65_536)
        _check_range("max_waiting", self.max_waiting, 1, 10**7)
        if self.max_model_len is not None:
            _check_range("max_model_len", self.max_model_len, 1, 2**27)
        if self.num_threads is not None:
            _check_range("num_threads", self.num_threads, 1, 1024)
        parse_bytes(self.request_cache)
        aging = self.priority_aging_seconds
        if aging is not None and not (_is_number(aging) and 0 < aging <= 1e6):
            raise InvalidConfig(
                f"priority_aging_seconds must be a number above 0 and at most 1e6, or None for no aging, got {aging!r}"
            )
        seconds = self.time_slice_seconds
        if seconds is not None and not (_is_number(seconds) and 0 < seconds <= 1e6):
            raise InvalidConfig(
                f"time_slice_seconds must be a number above 0 and at most 1e6, or None for no limit, got {seconds!r}"
            )
        if self.preemption_gap is not None:
            _check_range("preemption_gap", self.preemption_gap, 1, 200, ", or None for never")
        _check_choice("preemption", self.preemption, ("auto", "recompute", "swap"))
        swap_bytes = self.swap_bytes
        if self.preemption == "swap" and not swap_bytes:
            raise InvalidConfig(
                f"preemption='swap' needs memory of the host, and swap_space is {self.swap_space!r}; give it a size "
                "such as '1GiB', or choose preemption='recompute'"
            )

    @property
    def swap_bytes(self) -> int:
        """`swap_space` in bytes; 0 without it."""
        if self.swap_space is None or (self.swap_space == 0 and not isinstance(self.swap_space, bool)):
            return 0
        if isinstance(self.swap_space, str) and self.swap_space.strip() == "0":
            return 0
        return parse_bytes(self.swap_space)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Where chunks are kept when the device has no room for them, and how."""

    tiers: tuple[str | Any, ...] = ()
    """Fastest first: "host:4GiB", "disk:/var/cache/kvmosaic?quota=100GiB", "redis://…", or a `kvmosaic.tiers.Tier`."""
    codec: Literal["none", "fp8", "int8", "int4"] = "none"
    """How numbers are stored: as they are, or in fewer bits, which changes answers a little."""
    compression: Literal["none", "zstd"] = "none"
    """Whether entries are compressed further, without loss."""
    secret: str | None = field(default=None, repr=False)
    """Without it an entry can be neither made nor changed; None: only accidents are noticed."""
    pending: int | str = "512MiB"
    """Maximum memory for chunks queued for writing: bytes or text such as "1GiB". More are not stored."""
    staged: int | str = "512MiB"
    """Maximum memory for chunks prefetched for waiting requests."""
    loading: Literal["auto", "always"] = "auto"
    """Load a chunk where that is expected to be faster than computing it, or ("always") wherever a tier has it: that
    spares the processor, and what is computed does not depend on how fast the machine is."""

    def __post_init__(self) -> None:
        if isinstance(self.tiers, str) or not isinstance(self.tiers, tuple | list):
            raise InvalidConfig(
                f"tiers must be a list such as ('host:4GiB', 'disk:/path?quota=100GiB'), got {self.tiers!r}"
            )
        if len(self.tiers) > MAX_TIERS:
            raise InvalidConfig(f"{len(self.tiers)} tiers are too many; give at most {MAX_TIERS}")
        object.__setattr__(self, "tiers", tuple(self.tiers))
        _check_choice("codec", self.codec, ("none", "fp8", "int8", "int4"))
        _check_choice("compression", self.compression, ("none", "zstd"))
        _check_choice("loading", self.loading, ("auto", "always"))
        if self.secret is not None and (not isinstance(self.secret, str) or not 8 <= len(self.secret) <= 1024):
            given = f"{len(self.secret):,} characters" if isinstance(self.secret, str) else type(self.secret).__name__
            raise InvalidConfig(
                f"secret must be a text of 8 to 1024 characters, got {given}; leave it out to have none"
            )
        parse_bytes(self.pending)
        parse_bytes(self.staged)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidConfig(f"{name} is {value!r}; choose " + " or ".join(repr(choice) for choice in choices))


def _check_range(name: str, value: int, low: int, high: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidConfig(f"{name} must be a whole number between {low} and {high}{otherwise}, got {value!r}")
