"""Request contract: segments as numbers in `kv_transfer_params`, since a request of vLLM carries token ids only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, get_args

from kvmosaic.errors import InvalidConfig, InvalidPrompt, InvalidRepair
from kvmosaic.eviction import check_priority
from kvmosaic.layout import ChunkContext, Layout, arrange, with_kin
from kvmosaic.layout.span import CHUNK_CONTEXT_KEY
from kvmosaic.layout.strategies import AUTO, strategy_named, strategy_names
from kvmosaic.layout.strategies import choose_strategy as choose_automatically
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.prompt.companions import NUM_COMPANIONS, like_one_before, likeness_of
from kvmosaic.prompt.found_documents import is_first_question
from kvmosaic.prompt.settings import check_token_ids
from kvmosaic.repair import (
    UNMEASURED_REPAIR,
    Alike,
    AskedDocuments,
    ChunkSignals,
    FirstTokens,
    Names,
    NoRepair,
    RepairPolicy,
    WordFinder,
    repair_policy,
)

FIELDS = ("position_strategy", "chunk_context", "repair")
"""Fields of a body that say how its documents are composed."""
FIELD = "kvmosaic"
"""The key inside `kv_transfer_params`, of requests and of answers."""
UPDATE = "update"
"""Inside that key, of requests that the front makes itself: priorities and pins of stored documents, by label."""
DEFAULT_PRIORITY = 0.5
MAX_CHUNKS = 4096
MAX_TOKENS = 2**27
MAX_REPAIR_TOKENS = 4096
MAX_REPAIRED_RUNS = 4096
MAX_COMPANION_TOKENS = 2**17
MAX_SEEN = 2**16
"""Most texts between documents, times documents: a text sees each of those before it, and the scheduler lists them."""

MAX_CHANGE = 1 << 63
Repair = int | tuple[tuple[int, ...], ...]
"""Repaired tokens: so many at the start of each chunk; or by chunk its runs: start, stop, start, stop, …, ascending."""
OF_STORED = ("labels", "pins", "changes")
"""Fields of a composition that only the front sets, from stored documents."""
_LISTS = ("ids", "texts", "continues", "labels", "pins", "changes", "priorities")
"""Fields of a composition that are empty, or have an entry for each chunk."""


@dataclass(frozen=True, slots=True)
class Composition:
    """Segment boundaries of a prompt's token ids: system text, chunks, question, and texts before chunks.

        token ids   s s s s s s | t t | a a a a | b b b b b b | q q q
                    system = 6     texts = (2, 0), chunks = (4, 6)    the rest: the question

    A chunk saw the system text, maybe companions, and itself, never texts or other chunks. Texts and the question see
    everything before them: the changing rest of a system text, or what is between documents.
    """

    system: int
    """Tokens of the system text, without its changing rest; 0 or more."""
    chunks: tuple[int, ...]
    """Tokens of each chunk, in the order of the prompt; each 1 or more."""
    position_strategy: str = "sequential"
    chunk_context: ChunkContext = "system"
    repair: Repair = 0
    """Tokens that are recomputed with everything before them visible."""
    ids: tuple[str | None, ...] = ()
    """Names of the chunks for the report; empty, or one each."""
    leaves_repair_open: bool = False
    """`repair` is unset, or what the question suggests: the engine uses its default repair, where it can."""
    texts: tuple[int, ...] = ()
    """Tokens of the text before each chunk; empty, or one number each, 0 for none."""
    continues: tuple[int, ...] = ()
    """Whether each chunk is a later part of the document before it, 0 or 1; empty: none is. In shared positions, the
    parts of one document are one after the other."""
    labels: tuple[str | None, ...] = ()
    """Labels of the stored documents among the chunks, by which the document pool knows them; empty, or one each."""
    pins: tuple[int, ...] = ()
    """Whether each chunk is of a pinned document, 0 or 1; empty: none is."""
    changes: tuple[int, ...] = ()
    """Of each chunk of a stored document, the number of the last change of that document when the request was rendered;
    0 for others; empty: not known."""
    priorities: tuple[float | None, ...] = ()
    """Eviction priority of each chunk, 0 to 1; None: not said; empty: none is."""
    companions: tuple[tuple[int, ...], ...] = ()
    """Token ids of texts that chunks saw with the context "companions", and that are not in the prompt: those of
    document k the first k, or all."""
    place: int = 0
    """Documents before the first one, in a prompt that warms the cache for later ones: chooses its companions."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.chunks) <= MAX_CHUNKS:
            raise InvalidConfig(f"{len(self.chunks)} chunks; a composed prompt has 1 to {MAX_CHUNKS} of them")
        for name, shortest, lengths in (
            ("system", 0, (self.system,)),
            ("a chunk", 1, self.chunks),
            ("a text", 0, self.texts),
            ("a companion", 1, tuple(map(len, self.companions))),
        ):
            for wrong in (length for length in lengths if not shortest <= length <= MAX_TOKENS):
                raise InvalidConfig(f"{name} of {wrong} tokens; give a number from {shortest} to {MAX_TOKENS}")
        check_choice("position_strategy", self.position_strategy, choices(auto=False))
        check_choice("chunk_context", self.chunk_context, get_args(ChunkContext))
        for name, number in (("companions", len(self.companions)), ("place", self.place)):
            if not 0 <= number <= NUM_COMPANIONS:
                raise InvalidConfig(f"{name}: {number}; documents see at most {NUM_COMPANIONS} companions")
        if not isinstance(self.repair, int):
            _check_runs(self.repair, self.chunks)
        elif not 0 <= self.repair <= MAX_REPAIR_TOKENS:
            raise InvalidConfig(f"repair is {self.repair} tokens of each chunk; give 0 to {MAX_REPAIR_TOKENS}")
        if any(part not in (0, 1) for part in self.continues) or any(self.continues[:1]):
            raise InvalidConfig("continues holds 0 or 1 for each chunk, and 0 for the first, which has none before it")
        if any(pin not in (0, 1) for pin in self.pins):
            raise InvalidConfig("pins holds 0 or 1 for each chunk")
        if any(not 0 <= change < MAX_CHANGE for change in self.changes):
            raise InvalidConfig(f"changes holds numbers from 0 to {MAX_CHANGE - 1}")
        for priority in self.priorities:
            check_priority(DEFAULT_PRIORITY if priority is None else priority, "a chunk")
        for name in _LISTS:
            number = len(getattr(self, name))
            if number not in (0, len(self.chunks)):
                raise InvalidConfig(f"{number} {name} for {len(self.chunks)} chunks; give one each, or none")
        num_between = sum(map(bool, self.texts[1:]))
        if num_between * len(self.chunks) > MAX_SEEN:
            raise InvalidConfig(
                f"{num_between} texts between {len(self.chunks)} chunks; at most {MAX_SEEN // len(self.chunks)} are "
                "allowed between so many: make some part of a chunk"
            )

    @property
    def end(self) -> int:
        """The index of the question's first token."""
        return self.system + sum(self.chunks) + sum(self.texts)

    def layout(self, token_ids: Sequence[int]) -> Layout:
        """The layout of the whole prompt."""
        system = Segment(SegmentKind.SYSTEM, tuple(token_ids[: self.system])) if self.system else None
        segments, start, offset = [system] if system else [], self.system, 0
        names, texts = self.ids or (None,) * len(self.chunks), self.texts or (0,) * len(self.chunks)
        continues = self.continues or (0,) * len(self.chunks)
        for text, chunk, name, is_later in zip(texts, self.chunks, names, continues, strict=True):
            if text:
                segments.append(Segment(SegmentKind.TEXT, tuple(token_ids[start : start + text])))
            start, offset = start + text, offset if is_later else 0
            tokens = tuple(token_ids[start : start + chunk])
            # computed right after the system text, as a section is, and moved
            later: dict[str, Any] = {"part": (2, 2), "is_section": True} if is_later else {}
            segments.append(Segment(SegmentKind.CHUNK, tokens, name=name, document_offset=offset, **later))
            start, offset = start + chunk, offset + chunk
        segments.append(Segment(SegmentKind.QUESTION, tuple(token_ids[start:])))
        prompt = Prompt(tuple(segments), companions=self.companions, place=self.place)
        return arrange(prompt, self.position_strategy, self.chunk_context)

    def without_companions(self, default_repair: int) -> Composition:
        """The same for chunks that saw the system text only."""
        repair = default_repair if self.leaves_repair_open else self.repair
        return replace(self, chunk_context="system", repair=repair, companions=(), place=0)

    def to_params(self) -> dict[str, Any]:
        """Encodes it as `kv_transfer_params` of a request."""
        params: dict[str, Any] = {"system": self.system, "chunks": list(self.chunks)}
        params["position_strategy"] = self.position_strategy
        if self.chunk_context != "system":
            params["chunk_context"] = self.chunk_context
        if not self.leaves_repair_open:
            params["repair"] = self.repair if isinstance(self.repair, int) else list(map(list, self.repair))
        elif not isinstance(self.repair, int):
            params["suggested_repair"] = list(map(list, self.repair))
        if self.ids:
            params["ids"] = list(self.ids)
        if any(self.texts):
            params["texts"] = list(self.texts)
        for name in ("continues", "labels", "pins", "changes"):
            if any(getattr(self, name)):
                params[name] = list(getattr(self, name))
        if any(priority is not None for priority in self.priorities):
            params["priorities"] = list(self.priorities)
        if self.companions:
            params["companions"] = list(map(list, self.companions))
        if self.place:
            params["place"] = self.place
        return {FIELD: params}

    @classmethod
    def from_params(
        cls,
        params: Mapping[str, Any] | None,
        num_tokens: int,
        *,
        trained_positions: int | None = None,
        vocab_size: int = 2**31,
        default_repair: int = 0,
    ) -> Composition | None:
        """Reads the composition of a request of `num_tokens` tokens; None if it has no segments.

        Args:
            params: the request's `kv_transfer_params`.
            num_tokens: length of the whole prompt.
            trained_positions: max trained position of the model, for requests that leave the strategy to the engine.
            vocab_size: of the model; its token ids are below.
            default_repair: for requests without a repair setting, whose documents saw no companions.

        Raises:
            InvalidConfig: an unknown field, a wrong type, a number out of range, or no token left for the question.
        """
        if not isinstance(params, Mapping) or params.get(FIELD) is None:
            return None
        fields = params[FIELD]
        if not isinstance(fields, Mapping):
            raise InvalidConfig(f"kv_transfer_params.{FIELD} is {fields!r:.80}; give an object with system and chunks")
        known = {"system", "chunks", "companions", "place", "suggested_repair", *FIELDS, *_LISTS}
        if unknown := sorted(map(str, set(fields) - known)):
            raise InvalidConfig(f"{FIELD} has no field {unknown[0]!r:.80}; it has {', '.join(sorted(known))}")
        strategy = fields.get("position_strategy", "auto")
        check_choice("position_strategy", strategy, choices())
        said, context = fields.get("repair"), fields.get("chunk_context", "system")
        repair = fields.get("suggested_repair") if said is None else said
        listed = _listed("companions", fields.get("companions", ()), NUM_COMPANIONS)
        companions = tuple(tuple(_listed("companions", each, MAX_COMPANION_TOKENS)) for each in listed)
        for companion in companions:
            check_token_ids(companion, vocab_size, "companion")
        composition = cls(
            system=_number("system", fields.get("system", 0)),
            chunks=tuple(_number("chunks", value) for value in _listed("chunks", fields.get("chunks"))),
            position_strategy=choose_strategy(strategy, num_tokens, trained_positions),
            chunk_context=context,
            repair=default_repair * (context != "companions") if repair is None else _read_runs(repair),
            ids=tuple(None if name is None else str(name)[:256] for name in _listed("ids", fields.get("ids", ()))),
            leaves_repair_open=said is None,
            texts=tuple(_number("texts", value) for value in _listed("texts", fields.get("texts", ()))),
            continues=tuple(_number("continues", each) for each in _listed("continues", fields.get("continues", ()))),
            labels=tuple(
                None if name is None else str(name)[:512] for name in _listed("labels", fields.get("labels", ()))
            ),
            pins=tuple(_number("pins", each) for each in _listed("pins", fields.get("pins", ()))),
            changes=tuple(_number("changes", each) for each in _listed("changes", fields.get("changes", ()))),
            priorities=tuple(_listed("priorities", fields.get("priorities", ()))),
            companions=companions,
            place=_number("place", fields.get("place", 0)),
        )
        if composition.end >= num_tokens:
            raise InvalidConfig(
                f"system, texts and chunks are {composition.end} of {num_tokens} tokens; at least one must be left "
                "to ask with"
            )
        return composition


@dataclass(frozen=True, slots=True)
class How:
    """Composition options of one request, or a server's defaults for options that a request omits."""

    position_strategy: str = "auto"
    chunk_context: ChunkContext | None = None
    """None: as the model's configuration says, or companions where documents are one after the other."""
    repair: int | RepairPolicy | None = None
    """Tokens of documents that are recomputed with everything before them visible: so many at the start of each, or
    tokens that a policy chooses; None: the default."""

    def __post_init__(self) -> None:
        check_choice("position_strategy", self.position_strategy, choices())
        if self.chunk_context is not None:
            check_choice("chunk_context", self.chunk_context, get_args(ChunkContext))

    def updated(self, fields: Mapping[str, Any]) -> How:
        """A copy with the fields that are present and not None.

        Raises:
            InvalidConfig: an invalid value.
        """
        given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
        if "repair" in given:
            given["repair"] = read_repair(given["repair"])
        return replace(self, **given)


def read_repair(value: object) -> int | RepairPolicy:
    """Parses policies that measure nothing; "none" and "first(16)" into the number of recomputed tokens.

    Raises:
        InvalidConfig: anything else.
    """
    with suppress(InvalidRepair):
        policy = repair_policy(value)  # type: ignore[arg-type]
        if isinstance(policy, NoRepair):
            return 0
        if isinstance(policy, Names | Alike | AskedDocuments):
            return policy
        if isinstance(policy, FirstTokens) and policy.tokens <= MAX_REPAIR_TOKENS:
            return policy.tokens
    raise InvalidConfig(
        f'repair is {value!r:.80}; write "none", "names", "alike", "documents(3)", or "first(16)" for the first 16 '
        f"tokens of each document, at most {MAX_REPAIR_TOKENS}"
    )


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A prompt that is ready for vLLM."""

    token_ids: tuple[int, ...]
    composition: Composition | None
    """None: an ordinary prompt."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What decides how a model's documents are placed."""

    trained_positions: int | None = None
    """Max trained position; None: unknown, or no limit."""
    chunk_context: ChunkContext = "companions"
    """What documents one after the other saw, where nothing is set."""

    @classmethod
    def of(cls, model_config: Any) -> ModelFacts:
        """The facts in the configuration of a vLLM model."""
        said = getattr(getattr(model_config, "hf_config", None), CHUNK_CONTEXT_KEY, None)
        return cls(trained_positions(model_config), "system" if said == "system" else "companions")

    def placing(self, how: How, num_tokens: int) -> tuple[str, ChunkContext]:
        """Strategy and context of a prompt of so many tokens."""
        strategy = choose_strategy(how.position_strategy, num_tokens, self.trained_positions)
        usual: ChunkContext = "system" if strategy_named(strategy).overlaps else self.chunk_context
        return strategy, how.chunk_context or usual


def composed(prompt: Prompt, how: How, model: ModelFacts, finder: WordFinder | None = None) -> EncodedRequest:
    """Flattens a tokenized prompt; a strategy left to the engine is chosen here.

    Where no repair is set, documents that are alike and have met companions of their kind are reused, and the names
    that `finder` finds in them are repaired; of others, the documents that have the words of a first question.

    Raises:
        InvalidPrompt: a document that sees others, or has its own position, which vLLM cannot compose.
        InvalidConfig: values beyond the contract's limits.
    """
    token_ids = tuple(token for segment in prompt.segments for token in segment.token_ids or ())
    chunks = prompt.chunks
    if not chunks:
        return EncodedRequest(token_ids, None)
    for chunk in chunks:
        if chunk.sees or chunk.position_offset is not None:
            field = "sees" if chunk.sees else "position_offset"
            raise InvalidPrompt(f"the {chunk.label} has {field}, which vLLM cannot compose; leave it out")
    first = prompt.segments[0]
    names = tuple(chunk.name for chunk in chunks)
    continues = tuple(int(chunk.document_offset > 0) for chunk in chunks)
    priorities = tuple(chunk.priority for chunk in chunks)
    strategy, context = model.placing(how, len(token_ids))
    num_before = prompt.place + sum(not chunk.continues for chunk in chunks[1:])
    companions = with_kin(prompt).companions[:num_before] if context == "companions" else ()
    repair, is_open = _repair_of(prompt, companions, how.repair, finder)
    composition = Composition(
        system=first.num_tokens if first.kind is SegmentKind.SYSTEM else 0,
        chunks=tuple(chunk.num_tokens for chunk in chunks),
        position_strategy=strategy,
        chunk_context=context,
        repair=repair,
        ids=names if any(names) else (),
        leaves_repair_open=is_open,
        texts=_texts(prompt),
        continues=continues if any(continues) else (),
        priorities=priorities if any(priority is not None for priority in priorities) else (),
        companions=companions,
        place=prompt.place,
    )
    return EncodedRequest(token_ids, composition)


def _texts(prompt: Prompt) -> tuple[int, ...]:
    """Tokens of the texts before each chunk; those after the last one belong to the question, which sees the same."""
    if not prompt.has_texts:
        return ()
    lengths, length = [], 0
    for segment in prompt.segments:
        if segment.kind is SegmentKind.TEXT:
            length += segment.num_tokens
        elif segment.kind is SegmentKind.CHUNK:
            lengths.append(length)
            length = 0
    return tuple(lengths) if any(lengths) else ()


def _repair_of(
    prompt: Prompt, companions: Sequence[tuple[int, ...]], said: int | RepairPolicy | None, finder: WordFinder | None
) -> tuple[Repair, bool]:
    """The repaired tokens of a prompt's documents, and whether the engine may decide otherwise."""
    documents = [chunk.token_ids or () for chunk in prompt.chunks]
    if said is None and companions and finder is not None:
        if likeness_of(documents, companions) == "met":
            runs = _chosen_runs(Names(), prompt, finder)
            if sum(map(len, runs)) <= 2 * MAX_REPAIRED_RUNS:
                return runs, False
        elif is_first_question(prompt):
            runs = _chosen_runs(repair_policy(UNMEASURED_REPAIR), prompt, finder)
            return runs if any(runs) else 0, True
    if said is None or isinstance(said, int):
        return said or 0, said is None
    return _chosen_runs(said, prompt, finder), False


def _chosen_runs(policy: RepairPolicy, prompt: Prompt, finder: WordFinder | None) -> tuple[tuple[int, ...], ...]:
    """The tokens of documents that a policy chooses, which measures nothing."""
    documents, asks = [chunk.token_ids or () for chunk in prompt.chunks], policy.signals
    if finder is None and asks & {"names", "words"}:
        raise InvalidConfig(f"repair is '{policy}', and this model has no tokenizer to find words by; use 'first(16)'")
    question = prompt.segments[-1].token_ids or ()
    words = finder.weights(question, documents) if finder and "words" in asks else [0.0] * len(documents)
    later = like_one_before(documents) if "alike" in asks else ()
    names = finder.names if finder and "names" in asks else lambda _: ()
    signals = [
        ChunkSignals(len(ids), names=names(ids), words=weight, is_like_one_before=number in later)
        for number, (ids, weight) in enumerate(zip(documents, words, strict=True))
    ]
    return tuple(map(_runs_of, policy.choose(signals)))


def _runs_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """Start and stop of each run of ascending tokens."""
    starts = (token for before, token in pairwise((-2, *tokens)) if token != before + 1)
    stops = (token + 1 for token, after in pairwise((*tokens, -2)) if after != token + 1)
    return tuple(chain.from_iterable(zip(starts, stops, strict=True)))


def _read_runs(value: Any) -> Repair:
    if isinstance(value, list | tuple):
        return tuple(tuple(_number("repair", each) for each in _listed("repair", runs)) for runs in value[:MAX_CHUNKS])
    return _number("repair", value)


def _check_runs(runs: Sequence[Sequence[int]], chunks: Sequence[int]) -> None:
    """Raises InvalidConfig unless there are runs for each chunk, one after the other, inside it, and not too many."""
    if len(runs) != len(chunks):
        raise InvalidConfig(f"repair has runs of {len(runs)} chunks, and there are {len(chunks)}; give some for each")
    for bounds, length in zip(runs, chunks, strict=True):
        if len(bounds) % 2 or any(one >= other for one, other in pairwise((-1, *bounds, length + 1))):
            raise InvalidConfig(f"repair has the runs {list(bounds)!r:.80} of {length} tokens; give ascending bounds")
    if sum(map(len, runs)) > 2 * MAX_REPAIRED_RUNS:
        raise InvalidConfig(f"repair has {sum(map(len, runs)) // 2} runs of tokens; at most {MAX_REPAIRED_RUNS}")


def _number(name: str, value: Any) -> int:
    if type(value) is not int:
        raise InvalidConfig(f"{FIELD}.{name} holds {value!r:.80}; give whole numbers")
    return value


def _listed(name: str, value: Any, most: int = MAX_CHUNKS) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidConfig(f"{FIELD}.{name} is {value!r:.80}; give a list")
    if len(value) > most:
        raise InvalidConfig(f"{FIELD}.{name} has {len(value)} entries; at most {most}")
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
