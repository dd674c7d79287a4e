"""Documents read in place: the numbers of our own engine and of copies, and one copy of a document for all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.vllm.asking import compose, difference, documents
from support.vllm.in_place import found_by_check, held_by, reads, starts, watch_reads
from support.vllm.own import own_answer

CLOSE = 1e-4
SYSTEM, A, B, C, QUESTION = documents(7, 50, 83, 64, 131, 21)
_, *LIBRARY = documents(20, 37, 61, 32, 90, 45, 77, 128, 33, 50)


@pytest.fixture(params=["llama", "qwen3", "deepseek"])
def name(request):
    return request.param


@pytest.fixture
def reading(vllm_engine):
    """Engines that read in place."""
    from support.vllm.models import ENGINE_OPTIONS

    def engine(name="llama", **options):
        environment = {
            **ENGINE_OPTIONS.get(name, {}).get("environment", {}),
            **options.pop("environment", {}),
            "KVMOSAIC_DOCUMENT_READS": "in-place",
        }
        made = vllm_engine(name, environment=environment, **options)
        made.call(watch_reads)
        return made

    return engine


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_log_probabilities_are_those_of_our_engine(reading, own_engine, name, strategy):
    engine = reading(name)
    ask = compose(SYSTEM, [A, B, C], QUESTION, position_strategy=strategy)
    for _ in range(2):
        theirs = engine.ask(ask)
        assert theirs.is_composed, theirs.report
        assert difference(theirs, own_answer(own_engine(name), ask)) < CLOSE
    assert engine.call(reads) == [[len(A), len(B), len(C)]]


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
@pytest.mark.parametrize("repair", [0, 5, 70])
@pytest.mark.parametrize("texts", [(), ([9] * 11, [], [7] * 3, [])], ids=["", "texts"])
@pytest.mark.parametrize("context", ["system", "companions", "none"])
def test_numbers_are_those_of_copies(reading, vllm_engine, strategy, repair, texts, context):
    how = {
        "position_strategy": strategy,
        "chunk_context": context,
        "repair": repair,
        "companions": (tuple(LIBRARY[0]),),
    }
    ask = compose(SYSTEM, [C, A, B, A], QUESTION, texts, **how)
    engine = reading()
    engine.call(reads)
    copied, read = vllm_engine("llama").ask(ask), engine.ask(ask)
    assert copied.is_composed == read.is_composed == (strategy == "sequential" or not texts or not repair)
    assert difference(copied, read) < CLOSE
    assert bool(engine.call(reads)) == (strategy == "sequential" or not repair)


def test_parts_of_a_document_are_one_after_the_other(reading, vllm_engine):
    ask = compose(SYSTEM, [A, B, C], QUESTION, position_strategy="shared", continues=(0, 1, 0))
    assert difference(vllm_engine("llama").ask(ask), reading().ask(ask)) < CLOSE


@pytest.mark.parametrize("system", [1, 31, 32, 33, 50])
@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_a_document_that_starts_inside_a_block_is_read_at_its_offset(reading, own_engine, system, strategy):
    """Its first block holds the end of the system text as well; nothing of the document is copied."""
    head, one, two, question = documents(72, system, 33, 70, 9)
    ask = compose(head, [two, one], question, position_strategy=strategy)
    engine = reading()
    engine.call(reads)
    answer = engine.ask(ask)
    assert answer.is_composed, answer.report
    assert engine.call(starts)[0] == [system % 32] * 2
    assert engine.call(reads)[0] == [70, 33]
    assert difference(answer, own_answer(own_engine("llama"), ask)) < CLOSE


@pytest.mark.parametrize("length", [32, 33, 70])
def test_requests_that_begin_alike_share_blocks_that_one_of_them_writes_in_the_same_step(reading, vllm_engine, length):
    """vLLM gives the second the block of the question's first tokens, while the first still computes it."""
    head, question, rest = documents(74, 20, length, 9)
    asks = [
        replace(compose(head, [A, B], [*question, *end]), max_tokens=5) for end in ([], [], rest, rest[:1], [7], rest)
    ]
    engine = reading()
    for known in (False, True):
        if not known:
            engine.call("reset_prefix_cache")
        for ask, answer in zip(asks, engine.generate(asks), strict=True):
            assert answer.is_composed and difference(answer, vllm_engine("llama").ask(ask)) < CLOSE
    at_rest(engine)


def test_sixteen_requests_at_once_say_what_each_says_alone(reading, vllm_engine, own_engine):
    """They read the same documents at other positions, in the same steps."""
    alone, together = vllm_engine("llama"), reading(max_num_seqs=16)
    draw = random.Random(11)
    asks = [
        replace(
            compose(
                SYSTEM,
                draw.sample([A, B, C], 3),
                [*QUESTION, number],
                position_strategy=draw.choice(["sequential", "shared"]),
            ),
            max_tokens=6,
        )
        for number in range(16)
    ]
    answers = together.generate(asks)
    assert max(map(len, together.call(reads))) == 3
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.is_composed, answer.report
        assert difference(answer, alone.ask(ask)) < CLOSE
    assert difference(answers[0], own_answer(own_engine("llama"), asks[0])) < CLOSE
    at_rest(together)


def crowd(seed, count):
    """Composed prompts over a few documents, some ordinary ones."""
    draw = random.Random(seed)
    asks = []
    for number in range(count):
        chosen = draw.sample(LIBRARY, draw.randint(1, 4))
        (question,) = documents(1000 + number, draw.randint(1, 30))
        texts = [draw.choice([[], [], LIBRARY[0][:9], [7, number]]) for _ in chosen] if number % 2 else ()
        how = {"position_strategy": draw.choice(["sequential", "shared"]), "repair": draw.choice([0, 0, 4])}
        ask = replace(compose(SYSTEM, chosen, question, texts, **how), max_tokens=draw.randint(2, 9))
        asks.append(ask.plain if number % 7 == 6 else ask)
    return asks


def at_rest(engine):
    """No request is left, and every block but the null block is free."""
    state = engine.call("settle")
    assert not state["referenced"] and not state["requests"], state
    assert state["free"] == state["num_blocks"] - 1, state


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 400},
        {"max_num_batched_tokens": 64},
        {"num_gpu_blocks_override": 26, "max_model_len": 640},
    ],
    ids=["roomy", "cut into steps", "crowded"],
)
def test_a_crowd_with_cancels_says_what_each_says_alone(reading, vllm_engine, options):
    alone, together = vllm_engine("llama"), reading(**options)
    for seed in (1, 2):
        asks = crowd(seed, 24)
        draw = random.Random(seed)
        at = [draw.randint(0, 12) for _ in asks]
        abort = [step + draw.randint(0, 5) if index % 4 == 3 else None for index, step in enumerate(at)]
        answers = together.play(asks, at, abort)
        at_rest(together)
        assert all(answer is not None for answer, step in zip(answers, abort, strict=True) if step is None)
        for ask, answer in zip(asks, answers, strict=True):
            if answer is not None:
                expected = alone.ask(ask if ask.composition and answer.is_composed else ask.plain)
                assert len(answer.tokens) == len(expected.tokens) and difference(answer, expected) < CLOSE


def test_aborts_at_every_moment_leave_nothing_pinned(reading, vllm_engine):
    engine = reading(num_gpu_blocks_override=400)
    for moment in range(8):
        engine.call("reset_prefix_cache")
        asks = [replace(ask, max_tokens=20) for ask in crowd(30 + moment, 6)]
        assert engine.play(asks, [0] * 6, [moment] * 6) == [None] * 6
        at_rest(engine)
    ask = crowd(40, 1)[0]
    assert difference(engine.ask(ask), vllm_engine("llama").ask(ask)) < CLOSE


def test_documents_longer_than_a_step_are_computed_in_parts_and_read_whole(reading, own_engine):
    """Chunked prefill: 64 tokens a step, of documents and of the question that reads them."""
    system, long, longer, question = documents(73, 100, 150, 233, 90)
    cut = reading(max_num_batched_tokens=64)
    for strategy in ("sequential", "shared"):
        ask = compose(system, [longer, long], question, position_strategy=strategy)
        answer = cut.ask(ask)
        assert answer.is_composed, answer.report
        assert difference(answer, own_answer(own_engine("llama"), ask)) < CLOSE
    at_rest(cut)


def test_preempted_answers_find_their_documents_again(reading, vllm_engine):
    small = reading(num_gpu_blocks_override=40)
    small.call("count_preemptions")
    asks = [
        replace(compose(SYSTEM, [chunk, LIBRARY[7]], [9 + index], [[index], []]), max_tokens=250)
        for index, chunk in enumerate(LIBRARY[:6])
    ]
    answers = small.play(asks, [0] * 6, [None] * 6)
    assert small.call("preemptions") > 0, "nothing was preempted, so this test says nothing"
    at_rest(small)
    for ask, answer in zip(asks, answers, strict=True):
        expected = vllm_engine("llama").ask(ask)
        assert len(answer.tokens) == len(expected.tokens) and difference(answer, expected) < CLOSE


def test_eight_requests_hold_their_documents_once(reading, vllm_engine):
    """Blocks that are referenced while all of them answer, beyond each one's own tokens."""
    system, *chunks, question = documents(70, 64, 160, 160, 160, 9)
    draw = random.Random(3)
    asks = [replace(compose(system, draw.sample(chunks, 3), [*question, number]), max_tokens=8) for number in range(8)]
    one, eight = (held_by(reading(), asks[:number]) for number in (1, 8))
    copied = held_by(vllm_engine("llama"), asks)
    assert eight <= 1.1 * one + 7, "a block each for a question and its answer"
    assert copied > 2 * eight


def test_an_answer_ends_where_that_of_an_ordinary_prompt_would(reading, vllm_engine):
    (question,) = documents(71, 1000 - len(SYSTEM) - len(A) - len(B))
    ask = replace(compose(SYSTEM, [A, B], question), max_tokens=100)
    found, expected = reading().ask(ask), vllm_engine("llama").ask(ask)
    assert len(found.tokens) == len(expected.tokens) == 24
    assert difference(found, expected) < CLOSE


def test_tokens_are_counted_with_the_documents(reading, vllm_engine):
    ask = compose(SYSTEM, [B, C], QUESTION)
    for engine in (reading(), vllm_engine("llama")):
        engine.ask(ask)
        answer = engine.ask(compose(SYSTEM, [C, B], QUESTION))
        assert answer.num_cached_tokens == len(SYSTEM) + len(B) + len(C)
        assert answer.report["totals"]["prompt_tokens"] == len(ask.token_ids)


def test_what_needs_every_token_of_the_prompt_gets_copies(reading, vllm_engine):
    ask = replace(compose(SYSTEM, [A, B], QUESTION), repetition_penalty=1.3)
    engine = reading()
    engine.call(reads)
    found = engine.ask(ask)
    assert found.is_composed and not engine.call(reads)
    (warning,) = found.report["warnings"]
    assert warning.startswith("documents were copied, not read in place: repetition_penalty")
    assert engine.ask(replace(ask, repetition_penalty=1.0)).report["warnings"] == []
    assert difference(found, vllm_engine("llama").ask(ask)) < CLOSE


@pytest.mark.parametrize("fault", ["turned_the_other_way", "values_smaller", "sharper", "window"])
def test_the_check_at_start_finds_faults(reading, fault):
    assert reading().call(found_by_check, fault="") == ""
    assert reading().call(found_by_check, fault=fault) != ""
    assert reading().call(found_by_check, fault="") == ""


def test_a_setting_that_is_none_is_refused(vllm_model):
    from support.vllm.forking import ForkedEngine

    with pytest.raises(AssertionError, match="KVMOSAIC_DOCUMENT_READS is 'in_place'; choose 'copy' or 'in-place'"):
        ForkedEngine(vllm_model("llama"), environment={"KVMOSAIC_DOCUMENT_READS": "in_place"})
