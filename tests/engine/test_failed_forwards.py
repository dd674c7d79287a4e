"""A forward that fails ends the request that fails alone, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine_conformance import DOCUMENTS, SYSTEM, params
from support.engines import build_engine
from support.families import build
from support.llama_engine import llama_engine, llama_reader

from kvmosaic.engine import Engine, Request
from kvmosaic.errors import EngineError
from kvmosaic.llama.interface import is_installed
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

POISON = 19


@pytest.fixture(scope="module")
def own_model() -> LoadedModel:
    return LoadedModel.from_module(build("llama"))


Open = Callable[..., Engine]


@pytest.fixture(params=["transformers", "llama.cpp"])
def open_engine(request: pytest.FixtureRequest, own_model: LoadedModel) -> Iterator[Open]:
    """Engines whose model (here a fake does it) cannot bear one token: a forward with it fails."""
    if request.param == "llama.cpp" and not is_installed():
        pytest.skip("llama.cpp is not installed")
    opened: list[Engine] = []

    def open_one(**options: Any) -> Engine:
        engine = build_engine(own_model, **options) if request.param == "transformers" else llama_engine(llama_reader())
        return opened.append(engine) or poisoned(engine)

    yield open_one
    for engine in opened:
        engine.close()


def poisoned(engine: Engine) -> Engine:
    run = engine.runner.run

    def run_unless_poisoned(spans: Any) -> Any:
        found = [number for number, span in enumerate(spans) if POISON in span.token_ids]
        if found:
            if found[0]:
                run(spans[: found[0]])
            raise RuntimeError("the model cannot bear this token")
        return run(spans)

    engine.runner.run = run_unless_poisoned  # type: ignore[method-assign]
    return engine


def prompt_of(*numbers: int, question: tuple[int, ...] = (5, 3, 11)) -> Prompt:
    return Prompt.from_tokens(SYSTEM, [DOCUMENTS[number] for number in numbers], question)


def finish(engine: Engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()


def tokens(request: Request) -> list[tuple[int, ...]]:
    assert request.error is None, request.error
    return [answer.token_ids for answer in request.output().outputs]


def alone(open_engine: Open, prompt: Prompt, **fields: Any) -> list[tuple[int, ...]]:
    engine = open_engine()
    request = engine.add_request(prompt, params(**fields))
    finish(engine)
    return tokens(request)


def test_answers_under_way_go_on_when_another_request_fails(open_engine: Open) -> None:
    engine = open_engine()
    others = [
        engine.add_request(prompt_of(0, 1), params(8)),
        engine.add_request(Prompt.plain([4, 5, 6]), params(8, n=2)),
    ]
    for _ in range(3):
        engine.step()
    guilty = engine.add_request(prompt_of(2, question=(POISON,)), params(8))
    news = engine.step()
    assert guilty in news and isinstance(guilty.error, EngineError)
    assert "cannot bear" not in str(guilty.error), "what is inside stays inside"
    finish(engine)
    assert [tokens(other) for other in others] == [
        alone(open_engine, prompt_of(0, 1), max_tokens=8),
        alone(open_engine, Prompt.plain([4, 5, 6]), max_tokens=8, n=2),
    ]


def test_answers_that_are_not_in_a_step_go_on_when_all_of_it_fails(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step for one tenant may leave out the answers of others."""
    engine = open_engine()
    other = engine.add_request(prompt_of(0, 1), params(8))
    for _ in range(3):
        engine.step()
    guilty = engine.add_request(prompt_of(1, 2, question=(POISON,)), params(8))
    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler, "_answering", lambda only: [])
        with pytest.raises(RuntimeError):
            engine.step()
    assert isinstance(guilty.error, EngineError) and other.error is None
    finish(engine)
    assert tokens(other) == alone(open_engine, prompt_of(0, 1), max_tokens=8)


def test_who_waits_for_a_document_of_a_request_that_fails_computes_it(open_engine: Open) -> None:
    engine = open_engine()
    poison = [*DOCUMENTS[0], POISON]
    guilty = engine.add_request(Prompt.from_tokens(SYSTEM, [DOCUMENTS[1], poison], (5,)), params())
    other = engine.add_request(prompt_of(1, 0), params())
    finish(engine)
    assert isinstance(guilty.error, EngineError)
    assert tokens(other) == alone(open_engine, prompt_of(1, 0))
    again = engine.add_request(Prompt.from_tokens(SYSTEM, [poison], (5,)), params())
    with pytest.raises(RuntimeError, match="cannot bear"):
        engine.step()
    assert isinstance(again.error, EngineError), "none of its tokens was found in the cache"


def test_first_tokens_that_a_request_was_to_compute_are_computed_again_when_it_fails(own_model: LoadedModel) -> None:
    """The same step reads them: a document that begins alike takes them over, and is complete."""
    engine = poisoned(build_engine(own_model, max_batched_tokens=12))
    guilty = engine.add_request(Prompt.from_tokens(SYSTEM, [DOCUMENTS[0], [*DOCUMENTS[1], POISON]], (2,)), params())
    others = [engine.add_request(prompt_of(*numbers, question=(2,)), params()) for numbers in ((0,), (0, 1))]
    finish(engine)
    assert guilty.error is not None
    for request, numbers in zip(others, ((0,), (0, 1)), strict=True):
        fresh = build_engine(own_model)
        expected = fresh.add_request(prompt_of(*numbers, question=(2,)), params())
        finish(fresh)
        assert tokens(request) == tokens(expected)


@pytest.mark.representative
@pytest.mark.parametrize("repair", ["query(0.5)", "combined(0.5)"])
def test_attention_that_a_failed_forward_has_measured_does_not_count_twice(own_model: LoadedModel, repair: str) -> None:
    question = tuple((5 * number) % 16 + 2 for number in range(30))  # longer than a step

    def ask(engine: Engine) -> Request:
        return engine.add_request(prompt_of(0, 1, 2, question=question), params(repair=repair))

    undisturbed = build_engine(own_model, max_batched_tokens=12)
    expected = ask(undisturbed)
    finish(undisturbed)
    for num_steps in range(4, 8):
        engine = poisoned(build_engine(own_model, max_batched_tokens=12))
        measured = ask(engine)
        for _ in range(num_steps):
            engine.step()
        guilty = engine.add_request(Prompt.plain([POISON]), params(), priority=-5)  # after the rows that are measured
        while engine.has_unfinished_requests:
            step(engine)
        assert guilty.error is not None
        assert tokens(measured) == tokens(expected) and measured.layout == expected.layout


def test_a_device_that_is_gone_ends_all_that_took_part(own_model: LoadedModel) -> None:
    engine = build_engine(own_model)
    requests = [engine.add_request(prompt_of(0), params()), engine.add_request(Prompt.plain([4, 5]), params())]
    engine.runner.run = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert all(isinstance(request.error, EngineError) for request in requests)
    assert not engine.has_unfinished_requests


@given(st.data())
def test_requests_in_any_company_answer_as_alone(own_model: LoadedModel, data: st.DataObject) -> None:
    engine = poisoned(build_engine(own_model, blocks=(48, 24), max_batched_tokens=data.draw(st.integers(8, 40))))
    asked: list[tuple[Request, Prompt, bool]] = []
    for _ in range(data.draw(st.integers(2, 8))):
        numbers = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
        prompt = prompt_of(*numbers, question=tuple(data.draw(st.lists(st.integers(2, 18), min_size=1, max_size=6))))
        if is_guilty := data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(prompt.segments) - 1))
            segment = prompt.segments[place]
            bad = replace(segment, token_ids=(*(segment.token_ids or ()), POISON))
            prompt = replace(prompt, segments=(*prompt.segments[:place], bad, *prompt.segments[place + 1 :]))
        asked.append((engine.add_request(prompt, params(3, n=data.draw(st.integers(1, 2)))), prompt, is_guilty))
        for _ in range(data.draw(st.integers(0, 2))):
            step(engine)
    while engine.has_unfinished_requests:
        step(engine)
    for request, prompt, is_guilty in asked:
        fresh = build_engine(own_model)
        expected = fresh.add_request(prompt, params(3))
        finish(fresh)
        (answer,) = tokens(expected)
        is_guilty = is_guilty or POISON in answer[:-1]
        assert (request.error is not None) == is_guilty, request.error
        assert is_guilty or set(tokens(request)) == {answer}


def step(engine: Engine) -> None:
    """A step may fail if all of its requests do."""
    with suppress(RuntimeError):
        engine.step()
    engine.check_invariants()
