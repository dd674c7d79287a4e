"""What `vllm_plugin.py` asks: rounds of prompts, each for every engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_plugin_engines import Asked, Forked, Taken

from kvmosaic.lab.bench.sizes import Sizes
from kvmosaic.lab.bench.workloads import TokenSource, draw, zipf_weights

NUM_CATALOGUE, NUM_ANSWER, NUM_AT_ONCE = 32, 16, 4
NUM_READERS, NUM_DECODED = 8, 65
DECODE = f"shared x {NUM_READERS}"


@dataclass(frozen=True, slots=True)
class Round:
    """What every engine is asked once."""

    prompts: tuple[Asked, ...]
    warm: tuple[Asked, ...] = ()
    """Asked before, and not measured."""


@dataclass(slots=True)
class Work:
    """One kind of documents, asked one at a time or several at once."""

    name: str
    rounds: list[Round]
    num_answer: int
    taken: dict[str, list[Taken]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Prompts at once."""
        return len(self.rounds[0].prompts)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all measured prompts."""
        return sum(len(prompt.token_ids) for one in self.rounds for prompt in one.prompts)


def workloads(sizes: Sizes, vocab_size: int, rounds: int, plain_rounds: int) -> Iterator[Work]:
    """All kinds of documents, each asked one at a time and several at once."""
    kinds = {"fresh": fresh, "repeated": repeated, "permuted": permuted, "zipf": drawn, "none": none}
    for name, make in kinds.items():
        for at_once in (1, NUM_AT_ONCE):
            num_rounds = plain_rounds if make is none else rounds
            source = TokenSource(0, f"{name} {at_once}", vocab_size, sizes)
            made = make(source, source.system(), num_rounds if at_once == 1 else max(1, num_rounds // 2), at_once)
            if at_once > 1:
                yield Work(f"{name} x {at_once}", made, NUM_ANSWER)
            else:
                yield Work(name, made, NUM_ANSWER if make is none else 1)
    source = TokenSource(0, DECODE, vocab_size, sizes)
    yield Work(DECODE, shared(source, source.system(), max(1, rounds // 2), NUM_READERS), NUM_DECODED)


def none(source: TokenSource, system: Sequence[int], rounds: int, at_once: int) -> list[Round]:
    """Prompts without documents, all different."""
    return [
        Round(tuple(Asked((), (), source.tokens(source.sizes.plain_tokens)) for _ in range(at_once)))
        for _ in range(rounds)
    ]


def fresh(source: TokenSource, system: Sequence[int], rounds: int, at_once: int) -> list[Round]:
    """Documents that are not cached."""
    return [
        Round(tuple(Asked(system, source.documents(), source.question()) for _ in range(at_once)))
        for _ in range(rounds)
    ]


def repeated(source: TokenSource, system: Sequence[int], rounds: int, at_once: int) -> list[Round]:
    """The same documents in the same order."""
    known = [source.documents() for _ in range(at_once)]
    warm = tuple(Asked(system, documents, source.question()) for documents in known)
    return [
        Round(tuple(Asked(system, documents, source.question()) for documents in known), () if number else warm)
        for number in range(rounds)
    ]


def permuted(source: TokenSource, system: Sequence[int], rounds: int, at_once: int) -> list[Round]:
    """Known documents, each time another one first."""
    made = []
    for number in range(rounds):
        turn = number % (source.sizes.documents - 1)
        warm: tuple[Asked, ...] = ()
        if turn == 0:
            known = [source.documents() for _ in range(at_once)]
            warm = tuple(Asked(system, documents, source.question()) for documents in known)
        prompts = []
        for documents in known:
            rest = documents[: turn + 1] + documents[turn + 2 :]
            order = [documents[turn + 1], *source.random.sample(rest, len(rest))]
            prompts.append(Asked(system, order, source.question()))
        made.append(Round(tuple(prompts), warm))
    return made


def shared(source: TokenSource, system: Sequence[int], rounds: int, at_once: int) -> list[Round]:
    """The same known documents for all, each in an order of its own: their long answers are decoded together."""
    documents = source.documents()

    def asked() -> Asked:
        return Asked(system, source.random.sample(documents, len(documents)), source.question())

    warm = (Asked(system, documents, source.question()),)
    return [Round(tuple(asked() for _ in range(at_once)), () if number else warm) for number in range(rounds)]


def drawn(source: TokenSource, system: Sequence[int], rounds: int, at_once: int) -> list[Round]:
    """Documents of a catalogue, drawn by popularity."""
    catalogue = source.documents(NUM_CATALOGUE)
    weights = zipf_weights(NUM_CATALOGUE)

    def documents() -> list[Sequence[int]]:
        return [catalogue[rank] for rank in draw(weights, source.sizes.documents, source.random)]

    return [
        Round(tuple(Asked(system, documents(), source.question()) for _ in range(at_once))) for _ in range(2 * rounds)
    ]


def measure(work: Work, engines: Sequence[Forked]) -> None:
    """Asks every engine every round, in turns."""
    for engine in engines:
        work.taken[engine.name] = []
        engine.reset()
        engine.answer([Asked((), (), list(range(100, 164)))], 2)
    for number, one in enumerate(work.rounds):
        turn = number % len(engines)
        for engine in (*engines[turn:], *engines[:turn]):
            for prompt in one.warm:
                engine.answer([prompt], 1)
            work.taken[engine.name].append(engine.answer(list(one.prompts), work.num_answer))
        print(f"{work.name}: {number + 1} of {len(work.rounds)}", flush=True)
