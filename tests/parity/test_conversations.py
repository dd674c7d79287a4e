"""Conversations over documents: a later turn computes the new tokens only, and gives what it gives from scratch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import answer, build_engine, token_ids
from support.examples import examples
from support.families import build

from kvmosaic.engine import Engine, Request
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

FAMILIES = ("llama", "gemma3", "deepseek_v3", "gpt_oss")
SYSTEM, DOCUMENTS = list(range(1, 8)), [list(range(20, 31)), list(range(40, 45))]
FIRST, SECOND, OTHER = [60, 61, 62, 63, 64, 65], [70, 71, 72], [80, 81]
PLACES: list[tuple[str, str]] = [
    ("shared", "system"),
    ("shared", "none"),
    ("sequential", "system"),
    ("sequential", "none"),
    ("absolute", "system"),
]


@cache
def loaded(family: str, dtype: torch.dtype = torch.float64) -> LoadedModel:
    return LoadedModel.from_module(build(family, dtype))


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


def asked(question: list[int], strategy: str = "shared", documents: list[list[int]] = DOCUMENTS) -> Prompt:
    prompt = Prompt.from_tokens(SYSTEM, documents, question)
    if strategy != "absolute":
        return prompt
    offsets = {1: 8, 2: 25}
    segments = [replace(s, position_offset=offsets.get(index)) for index, s in enumerate(prompt.segments)]
    return replace(prompt, segments=tuple(segments))


def question_reuse(request: Request) -> tuple[int, int]:
    """Tokens of the question segment, and how many of them were not computed."""
    segment = request.reuse.segments[-1]
    return segment.num_tokens, segment.reused_tokens


def last_blocks(engine: Engine) -> list[list[int]]:
    """The blocks of the last span of every running sequence."""
    return [list(sequence.allocation.last.table.block_ids) for sequence in engine.scheduler.running]


def bytes_of(engine: Engine, block_ids: list[int]) -> list[torch.Tensor]:
    """What some blocks of the request pool hold, copied."""
    storage, size = engine.runner.storages["request"], engine.kv_cache.config.block_size
    slots = [block * size + offset for block in block_ids for offset in range(size)]
    return [tensor[slots].clone() for layer in range(len(storage.layers)) for tensor in storage._stored(layer)]


@pytest.mark.parametrize(
    ("family", "strategy", "context", "block_size"),
    [
        *(("llama", *place, block_size) for place in PLACES for block_size in (1, 4, 16)),
        *((family, strategy, "system", 4) for family in FAMILIES[1:] for strategy in ("shared", "sequential")),
    ],
)
def test_turn_two_computes_the_new_tokens_only_and_equals_turn_two_from_scratch(family, strategy, context, block_size):
    options = {"block_size": block_size, "position_strategy": strategy, "chunk_context": context}
    engine = build_engine(loaded(family), **options)
    history = list(FIRST)
    for number, new in enumerate((SECOND, OTHER, FIRST)):
        first, _ = answer(engine, asked(history, strategy), greedy(5))
        history += [*token_ids(first), *new]
        second, logits = answer(engine, asked(history, strategy), greedy(3))
        total, reused = question_reuse(second)
        assert total - reused == 1 + len(new), f"turn {number + 2} computes the new tokens and the one sampled last"
        assert second.reuse.computed_tokens == total - reused, "documents and system prompt are reused whole"
        scratch = build_engine(loaded(family), prefix_caching=False, **options)
        expected, expected_logits = answer(scratch, asked(history, strategy), greedy(3))
        assert token_ids(second) == token_ids(expected)
        assert float((logits - expected_logits).abs().max()) < 1e-10
        history += token_ids(second)


def test_an_answer_that_is_written_in_other_tokens_is_reused_up_to_the_first_of_them():
    engine = build_engine(loaded("llama"), block_size=16)
    first, _ = answer(engine, asked(FIRST), greedy(9))
    given_back = [*token_ids(first)[:4], 99, 98]
    second, _ = answer(engine, asked([*FIRST, *given_back, *SECOND]), greedy(2))
    assert question_reuse(second) == (len(FIRST) + 6 + 3, len(FIRST) + 4)


def test_documents_added_in_turn_two_change_what_the_history_saw():
    engine = build_engine(loaded("llama"))
    first, _ = answer(engine, asked(FIRST), greedy(5))
    history = [*FIRST, *token_ids(first), *SECOND]
    for documents in ([*DOCUMENTS, list(range(90, 99))], DOCUMENTS[:1]):
        second, _ = answer(engine, asked(history, documents=documents), greedy(1))
        assert question_reuse(second) == (len(history), 0)
        known = [segment.reused_tokens for segment in second.reuse.segments[:-1]]
        assert known == [7, 11, 5, 0][: len(documents) + 1], "the documents themselves are reused"
    swapped, _ = answer(engine, asked(history, documents=DOCUMENTS[::-1]), greedy(1))
    assert question_reuse(swapped)[1] == len(history) - 1 - len(SECOND), "in shared positions the order does not count"


def test_two_second_questions_share_the_blocks_of_the_first_turn_and_never_write_into_them():
    engine = build_engine(loaded("llama"))
    first, _ = answer(engine, asked(FIRST), greedy(8))
    history = [*FIRST, *token_ids(first)]
    known = len(history) - 1
    assert known % 4, "the last block is partly filled"
    pool, kept = engine.kv_cache.request_pool, engine.kv_cache._prefix.block_ids()
    before, used = bytes_of(engine, kept), pool.num_used
    requests = [engine.add_request(asked([*history, *new]), greedy(6)) for new in (SECOND, OTHER)]
    engine.step()
    tables = last_blocks(engine)
    shared = set(tables[0][: known // 4])
    assert len(tables) == 2 and shared and set(tables[1][: known // 4]) == shared
    assert all(pool.reference_count(block) == 3 for block in shared), "the cache and both conversations"
    own = [set(table[known // 4 :]) for table in tables]
    assert not own[0] & own[1] and not (own[0] | own[1]) & set(kept)
    assert all(map(torch.equal, before, bytes_of(engine, kept))), "nobody wrote into what they share"
    engine.check_invariants()
    assert pool.num_used == used + len(own[0] | own[1]) - 1, "a tail that both go on with has left"
    engine.run(requests)
    check_second_turns(requests, history, known)


def test_a_fork_that_comes_later_finds_what_the_first_turn_left():
    engine = build_engine(loaded("llama"))
    first, _ = answer(engine, asked(FIRST), greedy(8))
    history = [*FIRST, *token_ids(first)]
    requests = [answer(engine, asked([*history, *new]), greedy(6))[0] for new in (SECOND, OTHER, SECOND[:1])]
    assert question_reuse(requests[0])[1] == len(history) - 1
    assert question_reuse(requests[1])[1] == len(history), "the token sampled last is computed by now"
    assert question_reuse(requests[2])[1] == len(history), "and one token at least is computed again"


def check_second_turns(requests: list[Request], history: list[int], known: int) -> None:
    """Each second turn took all that is known of the first, and answers as from scratch."""
    for request, new in zip(requests, (SECOND, OTHER), strict=True):
        assert question_reuse(request) == (len(history) + len(new), known)
        expected, _ = answer(build_engine(loaded("llama")), asked([*history, *new]), greedy(6))
        assert token_ids(request) == token_ids(expected)


def test_each_of_several_answers_can_be_gone_on_from():
    engine = build_engine(loaded("llama"))
    sampled = SamplingParams(temperature=2.0, seed=1, max_tokens=6, ignore_eos=True, n=3)
    first, _ = answer(engine, asked(FIRST), sampled)
    answers = [list(one.token_ids) for one in first.output().outputs]
    assert len({tuple(one) for one in answers}) == 3
    kept = engine.kv_cache._prefix.block_ids()
    before = bytes_of(engine, kept)
    for one in answers:
        history = [*FIRST, *one, *SECOND]
        second, _ = answer(engine, asked(history), greedy(4))
        assert question_reuse(second) == (len(history), len(history) - 1 - len(SECOND))
        assert token_ids(second) == token_ids(answer(build_engine(loaded("llama")), asked(history), greedy(4))[0])
    present = set(engine.kv_cache._prefix.block_ids())
    still = [index for index, block in enumerate(kept) if block in present]
    after = bytes_of(engine, [kept[index] for index in still])
    rows = [row for index in still for row in range(4 * index, 4 * index + 4)]
    assert all(torch.equal(old[rows], new) for old, new in zip(before, after, strict=True))


@dataclass
class Node:
    """A place in a tree of conversations: what was said up to here."""

    documents: tuple[int, ...]
    history: list[int] = field(default_factory=list)


@st.composite
def conversations(draw: Any) -> list[tuple[int, tuple[int, ...], int, int, int, bool]]:
    """Turns: where to go on, documents of a new conversation, lengths of question and answer, and answers at once."""
    documents = st.lists(st.integers(0, 2), max_size=2, unique=True).map(tuple)
    turn = st.tuples(
        st.integers(0, 9), documents, st.integers(1, 7), st.integers(1, 7), st.integers(1, 3), st.booleans()
    )
    return draw(st.lists(turn, min_size=2, max_size=9))


@settings(max_examples=examples(40))
@given(conversations(), st.sampled_from([12, 20, 64]), st.sampled_from([3, 4, 16]), st.integers(0, 2**31))
def test_trees_of_conversations_give_the_answers_of_fresh_engines(turns, num_blocks, block_size, seed):
    model = loaded("llama", torch.float32)
    draw = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 128, (length,), generator=draw).tolist() for length in (9, 4, 17)]

    def prompt_of(node: Node, question: list[int]) -> Prompt:
        return Prompt.from_tokens(SYSTEM, [texts[number] for number in node.documents], [*node.history, *question])

    engine = build_engine(model, blocks=(num_blocks * 16 // block_size, 24), block_size=block_size)
    nodes = [Node(())]
    waiting: list[tuple[Request, Node, list[int]]] = []
    for place, documents, num_question, num_answer, num_answers, is_alone in turns:
        node = Node(documents) if place == 0 else nodes[place % len(nodes)]
        if len(node.history) > 60:
            node = Node(documents)
        question = torch.randint(0, 4, (num_question,), generator=draw).tolist()  # beginnings that are alike
        params = greedy(num_answer, n=num_answers)
        waiting.append((engine.add_request(prompt_of(node, question), params), node, question))
        if not is_alone:
            continue
        while engine.has_unfinished_requests:
            engine.step()
            engine.check_invariants()
        for request, before, said in waiting:
            assert request.error is None
            fresh = build_engine(model, blocks=(128, 64), prefix_caching=False)
            expected, _ = answer(fresh, prompt_of(before, said), replace(request.params, n=1))
            answers = [list(one.token_ids) for one in request.output().outputs]
            assert answers == [token_ids(expected)] * request.params.n
            nodes.append(Node(before.documents, [*before.history, *said, *token_ids(request)]))
        waiting.clear()
    engine.run([request for request, _, _ in waiting])
    kv_cache = engine.kv_cache
    assert kv_cache.request_pool.num_used == len(kv_cache._prefix) and not kv_cache.request_pool.num_shared
