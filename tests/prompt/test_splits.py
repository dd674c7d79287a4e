import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import CHATML, make_tokenizer

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidSees
from kvmosaic.prompt import Prompt, PromptEncoder, Segment, SegmentKind

TOKENIZER = make_tokenizer(CHATML)


def make_encoder(limit):
    settings = ChunkCacheConfig(max_chunk_tokens=limit, long_chunks="split")
    return PromptEncoder(TOKENIZER, settings, vocab_size=len(TOKENIZER))


def test_a_long_document_becomes_numbered_parts_cut_at_line_ends():
    text = "\n".join(f"Line {number} has some words." for number in range(12))
    prompt = make_encoder(60).encode(Prompt.from_documents([{"text": text, "id": "report"}, "short"], "Why?"))
    parts = prompt.chunks[:-1]
    assert [part.name for part in parts] == [f"report ({i}/{len(parts)})" for i in range(1, len(parts) + 1)]
    assert "".join(part.text for part in parts) == text
    assert all(part.text.endswith("\n") for part in parts[:-1])
    assert prompt.chunks[-1].name is None
    assert prompt.chunks[-1].text == "short"


def test_sentence_ends_come_before_spaces_and_spaces_before_anything():
    encoder = make_encoder(20)
    sentences = encoder.encode(Prompt.from_documents(["Some words here. And some more words. And more. " * 3], "Why?"))
    assert all(part.text.rstrip().endswith(".") for part in sentences.chunks)
    assert len(sentences.chunks) > 1
    words = encoder.encode(Prompt.from_documents(["word " * 30 + "word"], "Why?"))
    assert all(part.text.strip().endswith("word") for part in words.chunks)
    assert len(words.chunks) > 1
    wide = encoder.encode(Prompt.from_documents(["中文。" * 10], "Why?"))
    assert all(part.text.endswith("。") for part in wide.chunks)
    one = encoder.encode(Prompt.from_documents(["ж" * 100], "Why?"))
    assert [part.num_tokens for part in one.chunks[:-1]] == [20] * (len(one.chunks) - 1)


def test_token_ids_are_split_by_number():
    prompt = make_encoder(4).encode(Prompt.from_tokens(chunks=[range(10)], question=[1], names=["x"]))
    assert [part.token_ids for part in prompt.chunks] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [part.name for part in prompt.chunks] == ["x (1/3)", "x (2/3)", "x (3/3)"]


def test_sees_and_offsets_follow_the_parts():
    chunks = [
        Segment(SegmentKind.CHUNK, tuple(range(6)), position_offset=100),
        Segment(SegmentKind.CHUNK, (1, 2), name="second"),
        Segment(SegmentKind.CHUNK, (3,), sees=(0, "second")),
        Segment(SegmentKind.CHUNK, (3,), sees=(2,)),
    ]
    prompt = make_encoder(4).encode(Prompt((*chunks, Segment(SegmentKind.QUESTION, (1,)))))
    assert [chunk.position_offset for chunk in prompt.chunks] == [100, 104, None, None, None]
    assert [chunk.sees for chunk in prompt.chunks] == [(), (), (), (0, 1, 2), (3,)]
    with pytest.raises(InvalidSees, match="its `sees` lists chunk 9"):
        make_encoder(4).encode(
            Prompt((*chunks, Segment(SegmentKind.CHUNK, (3,), sees=(9,)), Segment(SegmentKind.QUESTION, (1,))))
        )


def test_parts_of_a_chat_document_are_together_what_the_template_writes():
    document = {"title": "T", "text": "Some words. " * 20}
    whole = make_encoder(10_000).encode_chat([{"role": "user", "content": "Why?"}], [document])
    parts = make_encoder(16).encode_chat([{"role": "user", "content": "Why?"}], [document])
    assert len(parts.chunks) > 2
    assert sum((part.token_ids for part in parts.chunks), ()) == whole.chunks[0].token_ids
    assert "".join(part.text for part in parts.chunks) == whole.chunks[0].text


@given(st.text(min_size=1, max_size=200).filter(str.strip), st.integers(1, 40))
def test_parts_fit_and_together_are_the_document(text, limit):
    encoder = make_encoder(limit)
    prompt = encoder.encode(Prompt.from_documents([text], "?"))
    assert all(1 <= part.num_tokens <= limit for part in prompt.chunks)
    ids = sum((part.token_ids for part in prompt.chunks), ())
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text.strip()


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_tiny_limits_end(limit):
    prompt = make_encoder(limit).encode(Prompt.from_documents(["a b c d\n\ne. f"], "?"))
    assert sum(part.num_tokens for part in prompt.chunks) >= 10
