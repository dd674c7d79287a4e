from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.tokenizers import make_tokenizer

from kvmosaic.sampling import Logprob, decode_all
from kvmosaic.server.openai.logprobs import TokenBytes, chat_logprobs, text_logprobs

BYTE_LEVEL = make_tokenizer()


def decoded(token_id):
    return decode_all(BYTE_LEVEL, [token_id], skip_special_tokens=False)


@settings(max_examples=examples(100))
@given(st.text(max_size=12))
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(text):
    token_bytes = TokenBytes(BYTE_LEVEL)
    ids = BYTE_LEVEL([text], add_special_tokens=False)["input_ids"][0]
    joined = b"".join(bytes(token_bytes.of(token_id, decoded(token_id))) for token_id in ids)
    assert joined == text.encode()


def test_byte_tokens_of_sentencepiece_are_their_byte():
    tokenizer = SimpleNamespace(convert_ids_to_tokens={1: "<0xE2>", 2: "�", 3: "▁a"}.get)
    token_bytes = TokenBytes(tokenizer)
    assert token_bytes.of(1, "�") == [0xE2]
    assert bytes(token_bytes.of(2, "�")).decode() == "�"
    assert bytes(token_bytes.of(3, " a")) == b" a"
    assert TokenBytes(None).of(5, "é") == list("é".encode())


CANDIDATES = {
    7: Logprob(-3.0, 4, "g"),
    1: Logprob(-0.5, 1, "a"),
    2: Logprob(-1.0, 2, "b"),
    3: Logprob(-math.inf, 3, "c"),
}


@pytest.mark.parametrize("number", [0, 1, 3])
def test_most_likely_tokens_are_ranked_and_an_unlikely_choice_is_not_among_them(number):
    (entry,) = chat_logprobs([(7, CANDIDATES)], number, TokenBytes(None))
    assert (entry.token, entry.logprob) == ("g", -3.0)
    assert [top.token for top in entry.top_logprobs] == ["a", "b", "c"][:number]


def test_impossible_tokens_have_a_number_that_json_can_hold():
    (entry,) = chat_logprobs([(3, CANDIDATES)], 3, TokenBytes(None))
    assert entry.logprob == entry.top_logprobs[2].logprob == -9999.0


def test_older_shape_always_shows_the_chosen_token():
    shape = text_logprobs([(7, CANDIDATES), (1, CANDIDATES)], 1, offset=5)
    assert shape.top_logprobs == [{"a": -0.5, "g": -3.0}, {"a": -0.5}]
    assert shape.text_offset == [5, 6] and shape.tokens == ["g", "a"]


def test_streamed_parts_agree_with_the_whole():
    whole = text_logprobs([(7, CANDIDATES), (1, CANDIDATES), (2, CANDIDATES)], 2)
    first = text_logprobs([(7, CANDIDATES)], 2)
    rest = text_logprobs([(1, CANDIDATES), (2, CANDIDATES)], 2, offset=1)
    assert [*first.text_offset, *rest.text_offset] == whole.text_offset
