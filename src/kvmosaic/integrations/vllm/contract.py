"""Request contract: segments as numbers in `kv_transfer_params`, since a request of vLLM carries token ids only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvmosaic.errors import InvalidConfig
from kvmosaic.layout.strategies import AUTO, STRATEGIES, PositionStrategy, strategy_names
from kvmosaic.layout.strategies import choose_strategy as choose_automatically

FIELD = "kvmosaic"
"""The key inside `kv_transfer_params`, of requests and of answers."""
MAX_CHUNKS = 4096
MAX_TOKENS = 2**27
MAX_REPAIR_TOKENS = 4096

Saw = Literal["system", "none"]
"""What chunks saw: the values of `kvmosaic.layout.ChunkContext` that vLLM supports."""


@dataclass(frozen=True, slots=True)
class Composition:
    """Segment boundaries of a prompt's token ids: system text, chunks, question.

        token ids   s s s s s s | a a a a | b b b b b b | q q q
                    system = 6    chunks = (4, 6)         the rest: the question

    A chunk saw the system text and itself, never the other chunks. The question sees everything.
    """

    system: int
    """Tokens of the system text; 0 or more."""
    chunks: tuple[int, ...]
    """Tokens of each chunk, in the order of the prompt; each 1 or more."""
    position_strategy: str = "sequential"
    chunk_context: Saw = "system"
    repair: int = 0
    """Tokens at the start of each chunk that are recomputed with everything before them visible; 0: none."""
    ids: tuple[str | None, ...] = ()
    """Names of the chunks for the report; empty, or one each."""
    leaves_repair_open: bool = False
    """`repair` is unset: the engine uses its default repair, where it can."""

    def __post_init__(self) -> None:
        if not 0 <= self.system <= MAX_TOKENS:
            raise InvalidConfig(f"system is {self.system} tokens; give a number from 0 to {MAX_TOKENS}")
        if not 1 <= len(self.chunks) <= MAX_CHUNKS:
            raise InvalidConfig(f"{len(self.chunks)} chunks; a composed prompt has 1 to {MAX_CHUNKS} of them")
        if not all(1 <= length <= MAX_TOKENS for length in self.chunks):
            shortest = min(self.chunks)
            raise InvalidConfig(f"a chunk of {shortest} tokens; every chunk has 1 to {MAX_TOKENS}")
        check_choice("position_strategy", self.position_strategy, choices(auto=False))
        check_choice("chunk_context", self.chunk_context, get_args(Saw))
        if not 0 <= self.repair <= MAX_REPAIR_TOKENS:
            raise InvalidConfig(f"repair is {self.repair} tokens of each chunk; give 0 to {MAX_REPAIR_TOKENS}")
        if self.ids and len(self.ids) != len(self.chunks):
            raise InvalidConfig(f"{len(self.ids)} ids for {len(self.chunks)} chunks; give one each, or none")

    @property
    def end(self) -> int:
        """The index of the question's first token."""
        return self.system + sum(self.chunks)

    @property
    def starts(self) -> tuple[int, ...]:
        """The index of each chunk's first token."""
        starts, cursor = [], self.system
        for length in self.chunks:
            starts.append(cursor)
            cursor += length
        return tuple(starts)

    @property
    def question_position(self) -> int:
        """Position of the question's first token."""
        return max(self.position_at(start) + length for start, length in zip(self.starts, self.chunks, strict=True))

    def position_of(self, chunk: int) -> int:
        """Position of a chunk's first token, as the question sees it."""
        return self.position_at(self.starts[chunk])

    def position_at(self, index: int) -> int:
        """Position of the chunk whose first token has this index, as the question sees it."""
        seen = self.system if self.chunk_context == "system" else 0
        return self.strategy.position(seen, index, self.system - seen)

    @property
    def strategy(self) -> PositionStrategy:
        """The position strategy."""
        return STRATEGIES[self.position_strategy]

    def repaired(self, chunk: int) -> int:
        """Number of recomputed tokens of a chunk; the first chunk may have seen everything before it."""
        if chunk == 0 and self.chunk_context == "system":
            return 0
        return min(self.repair, self.chunks[chunk])

    def to_params(self) -> dict[str, Any]:
        """Encodes it as `kv_transfer_params` of a request."""
        params: dict[str, Any] = {"system": self.system, "chunks": list(self.chunks)}
        params["position_strategy"] = self.position_strategy
        if self.chunk_context != "system":
            params["chunk_context"] = self.chunk_context
        if not self.leaves_repair_open:
            params["repair"] = self.repair
        if self.ids:
            params["ids"] = list(self.ids)
        return {FIELD: params}

    @classmethod
    def from_params(
        cls,
        params: Mapping[str, Any] | None,
        num_tokens: int,
        *,
        trained_positions: int | None = None,
        default_repair: int = 0,
    ) -> Composition | None:
        """Reads the composition of a request of `num_tokens` tokens; None if it has no segments.

        Args:
            params: the request's `kv_transfer_params`.
            num_tokens: length of the whole prompt.
            trained_positions: max trained position of the model, for requests that leave the strategy to the engine.
            default_repair: for requests without a repair setting.

        Raises:
            InvalidConfig: an unknown field, a wrong type, a number out of range, or no token left for the question.
        """
        if not isinstance(params, Mapping) or params.get(FIELD) is None:
            return None
        fields = params[FIELD]
        if not isinstance(fields, Mapping):
            raise InvalidConfig(f"kv_transfer_params.{FIELD} is {fields!r:.80}; give an object with system and chunks")
        known = {"system", "chunks", "position_strategy", "chunk_context", "repair", "ids"}
        if unknown := sorted(map(str, set(fields) - known)):
            raise InvalidConfig(f"{FIELD} has no field {unknown[0]!r:.80}; it has {', '.join(sorted(known))}")
        strategy = fields.get("position_strategy", "auto")
        check_choice("position_strategy", strategy, choices())
        repair = fields.get("repair")
        composition = cls(
            system=_number("system", fields.get("system", 0)),
            chunks=tuple(_number("chunks", value) for value in _listed("chunks", fields.get("chunks"))),
            position_strategy=choose_strategy(strategy, num_tokens, trained_positions),
            chunk_context=fields.get("chunk_context", "system"),
            repair=default_repair if repair is None else _number("repair", repair),
            ids=tuple(None if name is None else str(name)[:256] for name in _listed("ids", fields.get("ids", ()))),
            leaves_repair_open=repair is None,
        )
        if composition.end >= num_tokens:
            raise InvalidConfig(
                f"system and chunks are {composition.end} of {num_tokens} tokens; at least one token must be left to "
                "ask with"
            )
        return composition


def _number(name: str, value: Any) -> int:
    if type(value) is not int:
        raise InvalidConfig(f"{FIELD}.{name} holds {value!r:.80}; give whole numbers")
    return value


def _listed(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidConfig(f"{FIELD}.{name} is {value!r:.80}; give a list")
    if len(value) > MAX_CHUNKS:
        raise InvalidConfig(f"{FIELD}.{name} has {len(value)} entries; at most {MAX_CHUNKS}")
    return value


def check_choice(name: str, value: object, names: tuple[str, ...]) -> None:
    """Raises InvalidConfig if a value is none of the names that vLLM supports."""
    if not isinstance(value, str) or value not in names:
        *others, last = map(repr, names)
        raise InvalidConfig(f"{name} is {value!r:.80}; inside vLLM choose {', '.join(others)} or {last}")


def choices(*, auto: bool = True) -> tuple[str, ...]:
    """Strategies inside vLLM: without the ones that need an offset per document."""
    return strategy_names(auto=auto, offsets=False)


def choose_strategy(strategy: str, num_tokens: int, trained_positions: int | None) -> str:
    """Resolves "auto" (see `kvmosaic.layout.strategies`); returns any other strategy unchanged.

    Args:
        strategy: of the request or the settings.
        num_tokens: length of the whole prompt.
        trained_positions: max trained position of the model; None: unknown, or no limit.
    """
    if strategy != AUTO:
        return strategy
    return choose_automatically(num_tokens + 1, trained_positions)


def trained_positions(model_config: Any) -> int | None:
    """Max trained position of a vLLM model, from its configuration; None: not specified.

    Not `max_model_len`, which vLLM computes: it may be lower, or higher with scaled angles.
    """
    text = getattr(model_config, "hf_text_config", None)
    number = getattr(text, "max_position_embeddings", None)
    return number if isinstance(number, int) and number > 0 else None
