"""Benchmark workloads, token ids from a seed: fresh, repeated, permuted and popular documents, orders, agents, talk."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.bench.sizes import NUM_TURNS, Sizes
from kvmosaic.prompt import Prompt

Tokens = tuple[int, ...]
_FIRST_ORDINARY = 16
"""Tokens below are often special ones, such as the end of a text."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that every engine runs, in the same order."""

    name: str
    about: str
    """What is asked, in one line."""
    batches: tuple[tuple[Prompt, ...], ...]
    """Measured prompts; the prompts of a batch run at once."""
    warm: tuple[Prompt, ...] = ()
    """Prompts that run before, unmeasured."""
    num_answer: int = 1
    """Tokens of every answer."""
    figure: str = ""
    """The plot it belongs to: documents, hit rate, sharers or orders."""
    x: float = 0.0
    """Its place on that plot."""
    is_ours_only: bool = False
    """Whether it runs only on our own engine with its chunk cache."""


class TokenSource:
    """Token ids from a seed. Two sources with different names have nothing in common."""

    def __init__(self, seed: int, name: str, vocab_size: int, sizes: Sizes) -> None:
        self.random = random.Random(f"{seed} {name}")  # noqa: S311  (nothing secret)
        self.sizes = sizes
        self._first = min(_FIRST_ORDINARY, vocab_size - 1)
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> Tokens:
        """`count` random tokens."""
        return tuple(self.random.randrange(self._first, self._vocab_size) for _ in range(count))

    def system(self) -> Tokens:
        """A system prompt."""
        return self.tokens(self.sizes.system)

    def question(self) -> Tokens:
        """A question."""
        return self.tokens(self.sizes.question)

    def documents(self, count: int | None = None) -> list[Tokens]:
        """New documents; as many as a prompt has, unless told."""
        count = self.sizes.documents if count is None else count
        return [self.tokens(self.sizes.document_tokens) for _ in range(count)]

    def shuffled(self, documents: list[Tokens]) -> list[Tokens]:
        """The same documents in another order (with one document, the same)."""
        order = documents
        while order == documents and len(documents) > 1:
            order = self.random.sample(documents, len(documents))
        return order


EXPECTED_REUSE = (0.0, 0.5, 0.8, 0.95, 1.0)
NUM_AGENTS, NUM_TOOLS = 3, 12


def build_workloads(names: list[str], sizes: Sizes, vocab_size: int, seed: int = 0) -> list[Workload]:
    """The named workloads (all of them for an empty list), the same ones for the same seed.

    Raises:
        InvalidConfig: a name that no workload has.
    """
    for name in names:
        if name not in FAMILIES:
            raise InvalidConfig(f"there is no workload {name!r}; choose from " + ", ".join(FAMILIES))
    return [
        workload
        for name, family in FAMILIES.items()
        if not names or name in names
        for workload in family(TokenSource(seed, name, vocab_size, sizes))
    ]


def _question(source: TokenSource) -> list[Workload]:
    system = source.system()
    prompts = [Prompt.from_tokens(system, [], source.question()) for _ in range(source.sizes.rounds + 1)]
    about = "the bare question after a known system prompt: what no cache can avoid"
    return [Workload("question", about, _one_by_one(prompts[1:]), (prompts[0],))]


def _fresh(source: TokenSource) -> list[Workload]:
    return [_known(source, 0, "fresh", "uncached documents")]


def _repeated(source: TokenSource) -> list[Workload]:
    system, documents = source.system(), source.documents()
    prompts = [Prompt.from_tokens(system, documents, source.question()) for _ in range(source.sizes.rounds + 1)]
    about = "the same documents in the same order, another question"
    return [Workload("repeated", about, _one_by_one(prompts[1:]), (prompts[0],), source.sizes.answer)]


def _permuted(source: TokenSource) -> list[Workload]:
    about = "known documents in a new order"
    return [_known(source, source.sizes.documents, "permuted", about, source.sizes.answer)]


def _partly_known(source: TokenSource) -> list[Workload]:
    most = source.sizes.documents
    counts = sorted({round(most * part) for part in (0.25, 0.5, 0.75, 0.875)} - {0, most})
    return [_known(source, count, f"known-{count}", f"{count} of {most} documents known") for count in counts]


def _known(source: TokenSource, count: int, name: str, about: str, num_answer: int = 1) -> Workload:
    """Prompts of which `count` documents are known and the others new, in a new order each time."""
    system, known = source.system(), source.documents(count)
    missing = source.sizes.documents - count
    prompts = []
    order = known
    for _ in range(source.sizes.rounds):
        order = source.shuffled(order)
        new = source.documents(missing)
        mixed = source.shuffled([*order, *new]) if new else order
        prompts.append(Prompt.from_tokens(system, mixed, source.question()))
    warm = Prompt.from_tokens(system, known, source.question())
    return Workload(name, about, _one_by_one(prompts), (warm,), num_answer, "documents", count)


def _popular(source: TokenSource) -> list[Workload]:
    return [_zipf(source, reuse) for reuse in EXPECTED_REUSE]


def _zipf(source: TokenSource, reuse: float) -> Workload:
    """Popular documents, all known, and new ones; of all lookups together, exactly the share `reuse` is known."""
    sizes = source.sizes
    system, weights = source.system(), zipf_weights(sizes.catalogue)
    num_lookups = sizes.zipf_prompts * sizes.zipf_documents
    num_known = round(reuse * num_lookups)
    is_known = [True] * num_known + [False] * (num_lookups - num_known)
    source.random.shuffle(is_known)
    catalogue: dict[int, Tokens] = {}
    prompts = []
    for number in range(sizes.zipf_prompts):
        flags = is_known[number * sizes.zipf_documents :][: sizes.zipf_documents]
        ranks = iter(draw(weights, sum(flags), source.random))
        documents = []
        for flag in flags:
            rank = next(ranks) if flag else None
            if rank is None:
                documents += source.documents(1)
            else:
                documents.append(catalogue.setdefault(rank, source.tokens(sizes.document_tokens)))
        prompts.append(Prompt.from_tokens(system, documents, source.question()))
    known = list(catalogue.values())
    width = sizes.zipf_documents
    warm = [
        Prompt.from_tokens(system, known[first : first + width], source.question())
        for first in range(0, max(len(known), 1), width)
    ]
    name, about = f"zipf-{reuse:.0%}", f"3% of the documents take 60% of the requests; {reuse:.0%} of them are known"
    return Workload(name, about, _one_by_one(prompts), tuple(warm), figure="hit rate", x=reuse)


def _orders(source: TokenSource) -> list[Workload]:
    system, documents = source.system(), source.documents()
    prompts = []
    order = documents
    for _ in range(source.sizes.orders):
        order = source.shuffled(order)
        prompts.append(Prompt.from_tokens(system, order, source.question()))
    warm = Prompt.from_tokens(system, documents, source.question())
    about = "orders of known documents without end"
    return [Workload("orders", about, _one_by_one(prompts), (warm,), figure="orders", is_ours_only=True)]


def _agents(source: TokenSource) -> list[Workload]:
    """Agents with tools of their own from one set, in an order of their own, and a history that grows."""
    sizes = source.sizes
    system, tools = source.system(), source.documents(NUM_TOOLS)
    warm = [
        Prompt.from_tokens(system, tools[first : first + sizes.documents], source.question())
        for first in range(0, NUM_TOOLS, sizes.documents)
    ]
    prompts = []
    for _ in range(NUM_AGENTS):
        own = source.random.sample(tools, min(sizes.documents, NUM_TOOLS))
        history: Tokens = ()
        for _ in range(2):
            history += source.question()
            prompts.append(Prompt.from_tokens(system, own, history))
            history += source.tokens(sizes.answer)
    about = f"{NUM_AGENTS} agents, two steps each, with tools from one set of {NUM_TOOLS}"
    return [Workload("agents", about, _one_by_one(prompts), tuple(warm), sizes.answer)]


def _turns(source: TokenSource) -> list[Workload]:
    """A conversation over documents. What was answered before is drawn too, so that all engines read the same."""
    sizes = source.sizes
    system, documents = source.system(), source.documents()
    history: Tokens = ()
    prompts = []
    for _ in range(NUM_TURNS):
        history += source.question()
        prompts.append(Prompt.from_tokens(system, documents, history))
        history += source.tokens(sizes.answer)
    about = f"a conversation of {NUM_TURNS} turns over the same documents, the first turn included"
    return [Workload("turns", about, _one_by_one(prompts), (), sizes.answer)]


def _plain(source: TokenSource) -> list[Workload]:
    sizes = source.sizes
    workloads = []
    for width in (1, 8):
        batches = tuple(
            tuple(Prompt.plain(source.tokens(sizes.plain_tokens)) for _ in range(width)) for _ in range(sizes.rounds)
        )
        about = f"{width} prompt{'s' if width > 1 else ''} at once, without documents"
        workloads.append(Workload(f"plain-{width}", about, batches, (), sizes.answer))
    return workloads


def _sharers(source: TokenSource) -> list[Workload]:
    """1, 2, 4, … prompts at once that read the same documents, and the same prompts with copies of their own."""
    sizes = source.sizes
    system, documents = source.system(), source.documents()
    counts = [2**power for power in range(sizes.max_sharers.bit_length())]
    return [
        _sharing(source, system, documents, count, is_private=is_private)
        for count in counts
        for is_private in (False, True)
    ]


def _sharing(source: TokenSource, system: Tokens, documents: list[Tokens], count: int, *, is_private: bool) -> Workload:
    salts = [f"copy {number}" if is_private else "" for number in range(count)]
    batches = tuple(
        tuple(Prompt.from_tokens(system, documents, source.question(), salt=salt) for salt in salts)
        for _ in range(source.sizes.rounds)
    )
    warm = tuple(Prompt.from_tokens(system, documents, source.question(), salt=salt) for salt in dict.fromkeys(salts))
    kind = "private" if is_private else "shared"
    about = f"{count} prompts at once, their documents {kind}"
    return Workload(f"{kind}-{count}", about, batches, warm, source.sizes.answer, "sharers", count, is_ours_only=True)


def _one_by_one(prompts: list[Prompt]) -> tuple[tuple[Prompt, ...], ...]:
    return tuple((prompt,) for prompt in prompts)


FAMILIES: dict[str, Callable[[TokenSource], list[Workload]]] = {
    "question": _question,
    "fresh": _fresh,
    "repeated": _repeated,
    "permuted": _permuted,
    "known": _partly_known,
    "zipf": _popular,
    "agents": _agents,
    "turns": _turns,
    "plain": _plain,
    "sharers": _sharers,
    "orders": _orders,
}
"""One function per name that `--workload` takes; some make several workloads."""


POPULAR_SHARE, THEIR_REQUESTS = 0.03, 0.60
"""This share of the documents takes that share of the requests."""


def zipf_weights(count: int) -> list[float]:
    """Weights 1 / rank ** s that sum to 1, with s such that 3% of the documents (at least one) take 60%."""
    popular = max(1, round(POPULAR_SHARE * count))
    low, high = 0.0, 16.0
    for _ in range(60):
        exponent = (low + high) / 2
        weights = [rank**-exponent for rank in range(1, count + 1)]
        if sum(weights[:popular]) < THEIR_REQUESTS * sum(weights):
            low = exponent
        else:
            high = exponent
    total = sum(weights)
    return [weight / total for weight in weights]


def draw(weights: list[float], count: int, source: random.Random) -> list[int]:
    """`count` different ranks (from 0); each draw goes by the weights, and one that came before is drawn again."""
    bounds = list(accumulate(weights))
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        rank = bisect.bisect(bounds, source.random() * bounds[-1])
        chosen.setdefault(min(rank, len(weights) - 1))
    return list(chosen)
