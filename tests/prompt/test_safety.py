"""Nothing that a user or a document says changes the shape of a prompt or becomes a control token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.nasty import nasty_texts
from support.tokenizers import TEMPLATES, make_tokenizer

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.prompt import Prompt, PromptEncoder, escape_separator

ENCODERS = {
    (name, kind): PromptEncoder(tokenizer, ChunkCacheConfig(), vocab_size=len(tokenizer))
    for name in TEMPLATES
    for kind in ("byte_level", "unigram")
    for tokenizer in [make_tokenizer(TEMPLATES[name], kind)]
}


def controls(encoder, prompt):
    """The control tokens of each segment, without the one that stands for unknown characters."""
    ids = encoder._pieces.control_ids - {encoder.tokenizer.unk_token_id}
    return [tuple(i for i in segment.token_ids if i in ids) for segment in prompt.segments]


@st.composite
def documents(draw, text):
    titled = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    return [
        {"text": draw(text), **({"title": draw(text)} if with_title else {}), "id": f"{number} {draw(text)}"}
        for number, with_title in enumerate(titled)
    ]


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15)
@given(st.data())
def test_what_is_said_in_a_conversation_changes_neither_segments_nor_control_tokens(name, kind, data):
    encoder = ENCODERS[name, kind]
    nasty = data.draw(documents(nasty_texts(visible=True)))
    plain = [{**dict.fromkeys(document, "x"), "id": str(number)} for number, document in enumerate(nasty)]
    roles = ["system", "user", "assistant", "user"][data.draw(st.integers(0, 1)) :]
    said = [{"role": role, "content": data.draw(nasty_texts(visible=True))} for role in roles]
    benign = [{"role": role, "content": "x"} for role in roles]
    prompt, twin = encoder.encode_chat(said, nasty, preamble="all"), encoder.encode_chat(benign, plain)
    assert [segment.kind for segment in prompt.segments] == [segment.kind for segment in twin.segments]
    assert controls(encoder, prompt) == controls(encoder, twin)
    split = encoder.encode_chat(said, nasty)  # the operator's system text may end its preamble
    assert sum(controls(encoder, split), ()) == sum(controls(encoder, twin), ())
    said[0] = benign[0]
    assert [segment.kind for segment in encoder.encode_chat(said, nasty).segments] == [s.kind for s in twin.segments]


@pytest.mark.parametrize("name", ["reader", "cohere", "chatml"])
@settings(max_examples=examples(40))
@given(documents(nasty_texts(visible=True)))
def test_the_tokens_of_a_document_do_not_depend_on_the_others(name, given_documents):
    encoder = ENCODERS[name, "byte_level"]
    messages = [{"role": "user", "content": "Why?"}]
    together = encoder.encode_chat(messages, given_documents).chunks
    assert together == tuple(encoder.encode_chat(messages, [document]).chunks[0] for document in given_documents)
    assert together == encoder.encode_documents(given_documents).chunks


@settings(max_examples=examples(60))
@given(st.lists(nasty_texts(visible=True), min_size=1, max_size=4), nasty_texts(visible=True))
def test_documents_and_escaped_text_keep_the_number_of_segments(texts, question):
    encoder = ENCODERS["chatml", "byte_level"]
    prompt = encoder.encode(Prompt.from_documents(texts, question, system="x"), control_tokens=False)
    assert len(prompt.chunks) == len(texts)
    begin = (encoder.tokenizer.bos_token_id,)
    assert controls(encoder, prompt) == [begin, *((),) * (len(texts) + 1)]
    written = "\n##\n".join(["x", *map(escape_separator, texts), "question"])
    parsed = encoder.encode(Prompt.from_text(written))
    assert [chunk.text for chunk in parsed.chunks] == [text.strip() for text in texts]
    assert controls(encoder, parsed) == [begin, *((),) * (len(texts) + 1)]
