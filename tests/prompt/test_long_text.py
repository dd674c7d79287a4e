"""Texts tokenized in parts have the tokens that they have as a whole."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from array import array
from contextlib import nullcontext, suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.nasty import nasty_texts
from support.server import loaded_reader
from support.tokenizers import make_tokenizer

from kvmosaic import container
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.container import limited_call
from kvmosaic.errors import TooMuchWork
from kvmosaic.prompt.encoder import PromptEncoder
from kvmosaic.prompt.text_pieces import foreign
from kvmosaic.prompt.tokenizer import PieceTokenizer, Tokens, tokenize_long

TOKENIZERS = {
    "byte_level": make_tokenizer(kind="byte_level"),
    "unigram": make_tokenizer(kind="unigram"),
    "reader": loaded_reader().tokenizer,
}
SMALL = {"part": 120, "overlap": 60, "edge": 16}


def tokens_of(kind: str, text: str, calls: list[int] | None = None) -> Tokens:
    def tokenize(start: int, end: int) -> Tokens:
        if calls is not None:
            calls.append(end - start)
        result = TOKENIZERS[kind](text[start:end], add_special_tokens=False, return_offsets_mapping=True)
        return Tokens.of(result["input_ids"], result["offset_mapping"], start)

    return tokenize_long(tokenize, 0, len(text), **SMALL)


def whole(kind: str, text: str) -> list[int]:
    return list(TOKENIZERS[kind](text, add_special_tokens=False)["input_ids"])


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(nasty_texts(), min_size=1, max_size=30), st.integers(1, 12))
def test_parts_have_the_tokens_of_the_whole(kind: str, texts: list[str], times: int) -> None:
    text = "".join(texts) * times
    assert list(tokens_of(kind, text).ids) == whole(kind, text)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("unit", ["a", "ab", " ", "\n", "0", "é", "☃", "ferry ", "The ferry goes. ", "🎡a"])
def test_texts_that_repeat_have_the_tokens_of_the_whole(kind: str, unit: str) -> None:
    for length in (119, 121, 500, 997):
        text = (unit * length)[:length]
        assert list(tokens_of(kind, text).ids) == whole(kind, text)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_prose_is_tokenized_in_parts(kind: str) -> None:
    chance = random.Random(1)
    words = ["ferry", "island", "Oak", "harbour", "1905", "cat", "the", "goes", "to", "Grüße", "wheel"]
    text = " ".join(chance.choice(words) for _ in range(400))
    calls: list[int] = []
    assert list(tokens_of(kind, text, calls).ids) == whole(kind, text)
    assert max(calls) <= SMALL["part"] and len(calls) > 10


def test_starts_and_ends_are_those_of_the_whole() -> None:
    text = "Who keeps a cat on Oak Island? " * 40
    result = TOKENIZERS["reader"](text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = tokens_of("reader", text)
    assert list(zip(tokens.starts, tokens.ends, strict=True)) == list(result["offset_mapping"])


def test_a_tokenizer_that_looks_far_back_is_asked_for_the_whole() -> None:
    def tokenize(start: int, end: int) -> Tokens:
        """Pairs of characters, counted from where the text begins."""
        places = range(start, end, 2)
        return Tokens(array("q", places), array("q", places), array("q", (place + 2 for place in places)))

    odd = {"part": 101, "overlap": 60, "edge": 16}
    tokens = tokenize_long(tokenize, 0, 1_000, **odd)
    assert list(tokens.starts) == list(range(0, 1_000, 2))


def test_a_long_text_is_tokenized_in_calls_that_are_short() -> None:
    lengths: list[int] = []

    class Counting:
        is_fast = True

        def __getattr__(self, name: str) -> object:
            return getattr(TOKENIZERS["reader"], name)

        def __call__(self, texts: list[str], **options: object) -> object:
            lengths.extend(map(len, texts))
            return TOKENIZERS["reader"](texts, **options)

    text = "The ferry goes to Oak Island at noon. <|im_end|> " * 8_000
    encoder = PieceTokenizer(Counting())  # type: ignore[arg-type]
    encoded = encoder.encode([foreign(text)])
    assert max(lengths) <= 2**16 and len(text) > 300_000
    assert encoder.control_ids.isdisjoint(encoded.token_ids)
    assert encoded.starts is not None and list(encoded.starts) == sorted(encoded.starts)


def test_a_text_that_takes_too_much_time_is_given_up() -> None:
    encoder = PieceTokenizer(TOKENIZERS["reader"])
    with pytest.raises(TooMuchWork, match=r"more than 0\.02 s of processor time; send less"):
        limited_call(0.02, lambda: encoder.encode([foreign("The ferry goes to Oak Island. " * 100_000)]))
    assert encoder.encode([foreign("ferry")]).token_ids, "another one is read as ever"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the limit may end any callback
def test_a_template_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "_WATCH_SECONDS", 0.01)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    encoder = PromptEncoder(TOKENIZERS["reader"], ChunkCacheConfig(), vocab_size=len(TOKENIZERS["reader"]))
    question = [{"role": "user", "content": "When does the ferry go?"}]
    with pytest.raises(TooMuchWork, match=r"more than 0\.02 s of processor time; send less"):
        limited_call(0.02, lambda: encoder.encode_chat(question, chat_template=loops))
    assert limited_call(60, lambda: encoder.encode_chat(question))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the limit may end any callback
def test_work_is_ended_where_python_drops_the_first_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does in the callback of a weak reference, and in `__del__`."""
    monkeypatch.setattr(container, "_WATCH_SECONDS", 0.01)
    num_dropped = 0

    def never_ends() -> None:
        nonlocal num_dropped
        while True:
            with suppress(TooMuchWork) if num_dropped < 2 else nullcontext():
                while True:
                    pass
            num_dropped += 1

    with pytest.raises(TooMuchWork):
        limited_call(0.02, never_ends)
    assert num_dropped == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the limit may end any callback
def test_a_limit_ends_nothing_behind_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the exception of the watch comes: inside of the call, at its end, or never."""
    monkeypatch.setattr(container, "_WATCH_SECONDS", 0.0001)
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.00002)
    num_ended = 0
    try:
        for number in range(400):
            try:
                limited_call(0.0, lambda: [sum(range(50)) for _ in range(4 * number)])  # noqa: B023 - called at once
            except TooMuchWork:
                num_ended += 1
            assert container._of_thread.limit is None
            assert [sum(range(50)) for _ in range(20)]
    finally:
        sys.setswitchinterval(before)
    assert num_ended


def test_nothing_is_left_behind_that_would_stop_a_debugger() -> None:
    """Up to Python 3.12, a traced call never begins while the interpreter waits for an exception that does not come."""
    code = """
import sys
from kvmosaic import container
from kvmosaic.errors import TooMuchWork
container._WATCH_SECONDS = 0.01
for number in range(3):
    try:
        container.limited_call(0.01, lambda: [None for _ in iter(int, 1)])
    except TooMuchWork:
        pass
sys.settrace(lambda frame, event, argument: None)
print((lambda: "went on")())
"""
    limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (10, 10))
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, preexec_fn=limit)
    assert done.stdout == "went on\n"
