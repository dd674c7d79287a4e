"""Settings of the engine: how much runs at once, and in which memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvmosaic.config.setting import parse_bytes, parse_optional_bytes, setting, validate_settings
from kvmosaic.errors import InvalidConfig

_engine = partial(setting, panel="Engine")
_size = partial(_engine, max_length=32, metavar="SIZE")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much the engine runs at once."""

    max_num_batched_tokens: int = _engine(
        2_048,
        low=1,
        high=2**20,
        help="Maximum tokens of one step: missing chunks, questions and one token for every running answer.",
    )
    max_num_seqs: int = _engine(64, low=1, high=65_536, help="Maximum of running sequences.")
    max_waiting: int = _engine(
        100_000, low=1, high=10**7, help="Maximum of requests that wait in the engine; more are refused."
    )
    request_cache_size: int | str = _size(
        "1GiB", check=parse_bytes, help="Memory for prefixes, questions and answers, such as 512MiB."
    )
    max_model_len: int | None = _engine(
        None,
        low=1,
        high=2**27,
        panel="Model",
        unset="what the model allows",
        help="Maximum positions of one sequence.",
    )
    enable_prefix_caching: bool = _engine(
        True, help="Keep the blocks of system texts, questions and answers for requests that begin alike."
    )
    num_threads: int | None = _engine(
        None,
        low=1,
        high=1024,
        unset="one per core, or fewer where the container may use less",
        help="Threads that compute on a CPU, in the whole process.",
    )
    preemption: Literal["auto", "recompute", "swap"] = _engine(
        "auto",
        help="Preempted answers: computed again (recompute), moved to host memory and back (swap), or whichever was "
        "measured to be faster (auto).",
    )
    swap_space: int | str | None = _size(
        "256MiB",
        check=parse_optional_bytes,
        help="Maximum host memory for preempted answers; 0: they are computed again.",
    )

    def __post_init__(self) -> None:
        validate_settings(self)
        if self.preemption == "swap" and not self.swap_bytes:
            raise InvalidConfig(
                f"preemption='swap' needs memory of the host, and swap_space is {self.swap_space!r}; give it a size "
                "such as '1GiB', or choose preemption='recompute'"
            )

    @property
    def swap_bytes(self) -> int:
        """`swap_space` in bytes; 0 without it."""
        return parse_optional_bytes(self.swap_space)
