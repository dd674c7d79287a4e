import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import CHATML, GRANITE, READER, TEMPLATES, make_tokenizer

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import ChunkTooLong, EmptySegment, InvalidPrompt, InvalidTokenId, PromptTooLong, TooManyChunks
from kvmosaic.layout import arrange
from kvmosaic.prompt import Prompt, PromptEncoder, Segment, SegmentKind, check_length
from kvmosaic.prompt.patterns import document_finder
from kvmosaic.prompt.tokenizer import WINDOW_CHARACTERS, PieceTokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is it?"}
DOCUMENTS = [{"title": "A title", "text": "the first text"}, "second", {"id": "c", "text": "third ## text"}]


def make_encoder(template=None, settings=None, **options):
    tokenizer = make_tokenizer(template, **options)
    return PromptEncoder(tokenizer, settings or ChunkCacheConfig(), vocab_size=len(tokenizer))


def token_ids(prompt):
    return [segment.token_ids for segment in prompt.segments]


def test_an_ordinary_prompt_has_the_tokenizers_own_ids():
    for begin in (True, False):
        encoder = make_encoder(begin=begin)
        text = " A text <|im_start|> with\n# one ## border "
        prompt = encoder.encode(text)
        assert prompt.is_plain
        assert list(prompt.segments[0].token_ids) == encoder.tokenizer(text)["input_ids"]


def test_the_token_that_ends_a_whole_prompt_is_left_out():
    encoder = make_encoder(end=True)
    whole = encoder.tokenizer("some text")["input_ids"]
    assert whole[-1] == encoder.tokenizer.eos_token_id
    assert list(encoder.encode("some text").segments[0].token_ids) == whole[:-1]


def test_each_segment_is_tokenized_alone_and_only_the_first_has_the_token_that_begins_a_prompt():
    encoder = make_encoder()
    prompt = encoder.encode(Prompt.from_text("Be brief. ## first text ## second ## Why?", salt="tenant"))
    alone = [
        encoder.tokenizer(t, add_special_tokens=False)["input_ids"]
        for t in ("Be brief.", "first text", "second", "Why?")
    ]
    alone[0] = [encoder.tokenizer.bos_token_id, *alone[0]]
    assert [list(ids) for ids in token_ids(prompt)] == alone
    assert [segment.text for segment in prompt.segments] == ["Be brief.", "first text", "second", "Why?"]
    assert prompt.salt == "tenant"


def test_documents_without_a_system_text_stand_behind_the_token_that_begins_a_prompt():
    prompt = make_encoder().encode(Prompt.from_documents(DOCUMENTS, "Why?"))
    reordered = make_encoder().encode(Prompt.from_documents(DOCUMENTS[::-1], "Why?"))
    assert prompt.segments[0].kind is SegmentKind.SYSTEM
    assert prompt.segments[0].token_ids == (make_tokenizer().bos_token_id,)
    assert token_ids(prompt)[1:4] == token_ids(reordered)[1:4][::-1]
    assert make_encoder(begin=False).encode(Prompt.from_documents(["a"], "Why?")).segments[0].kind is SegmentKind.CHUNK


def test_the_separator_comes_from_the_settings():
    encoder = make_encoder(settings=ChunkCacheConfig(chunk_separator=" # # "))
    assert len(encoder.encode("a # # b ## c # # d").chunks) == 1
    for never in (None, ""):
        assert make_encoder(settings=ChunkCacheConfig(chunk_separator=never)).encode("a ## b ## c").is_plain
    assert make_encoder().encode("a ## b ## c").is_plain


def test_control_tokens_count_in_questions_unless_that_is_switched_off_and_never_in_documents():
    encoder = make_encoder()
    text = "[INST] a ## b [INST] ## c [/INST]"
    begin = encoder.tokenizer.bos_token_id
    inst, end = encoder.tokenizer.convert_tokens_to_ids(["[INST]", "[/INST]"])
    system, chunk, question = token_ids(encoder.encode(Prompt.from_text(text)))
    assert system[:2] == (begin, inst)
    assert question[-1] == end
    assert inst not in chunk
    for ids in token_ids(encoder.encode(Prompt.from_text(text), control_tokens=False)):
        assert {inst, end}.isdisjoint(ids)


def test_token_ids_pass_through_without_a_tokenizer():
    encoder = PromptEncoder(None, ChunkCacheConfig(), vocab_size=100)
    prompt = Prompt.from_tokens(system=[1, 2], chunks=[[3], np.array([4, 99])], question=[5], names=["a", "b"])
    assert encoder.encode(prompt) == prompt
    assert encoder.encode([7, 8]) == Prompt.plain([7, 8])
    for ask in (
        lambda: encoder.encode("text"),
        lambda: encoder.encode_chat([USER]),
        lambda: encoder.encode_documents(["a"]),
    ):
        with pytest.raises(InvalidPrompt, match="there is no tokenizer"):
            ask()


def test_text_and_token_ids_may_be_mixed():
    encoder = make_encoder()
    prompt = encoder.encode(
        Prompt(
            (
                Segment(SegmentKind.SYSTEM, text="Be brief."),
                Segment(SegmentKind.CHUNK, (7, 8)),
                Segment(SegmentKind.QUESTION, text="Why?"),
            )
        )
    )
    assert token_ids(prompt)[1] == (7, 8)
    assert encoder.tokenizer.bos_token_id == token_ids(prompt)[0][0] != token_ids(prompt)[2][0]


@pytest.mark.parametrize("bad", [-1, 100, 10**12])
def test_a_token_id_outside_the_vocabulary_is_named(bad):
    encoder = PromptEncoder(None, ChunkCacheConfig(), vocab_size=100)
    with pytest.raises(InvalidTokenId, match=rf"token 1 of the chunk 'a' is {bad}; .* from 0 to 99"):
        encoder.encode(Prompt.from_tokens(chunks=[[1, bad]], question=[1], names=["a"]))


@pytest.mark.parametrize("bad", [1.5, "a", None, True])
def test_what_is_no_whole_number_is_no_token_id(bad):
    with pytest.raises(InvalidTokenId):
        PromptEncoder(None, ChunkCacheConfig(), vocab_size=100).encode(Prompt((Segment(SegmentKind.PLAIN, (1, bad)),)))


def test_a_tokenizer_larger_than_the_model_is_noticed():
    encoder = PromptEncoder(make_tokenizer(), ChunkCacheConfig(), vocab_size=20)
    with pytest.raises(InvalidTokenId, match="from 0 to 19"):
        encoder.encode("some text")


def test_empty_segments_are_refused():
    encoder = make_encoder(begin=False)
    with pytest.raises(EmptySegment):
        encoder.encode("")
    with pytest.raises(EmptySegment):
        encoder.encode([])


def test_too_many_and_too_long_documents_are_refused_with_the_way_out():
    encoder = make_encoder(settings=ChunkCacheConfig(max_prompt_chunks=2, max_chunk_tokens=4, long_chunks="error"))
    with pytest.raises(TooManyChunks, match="more than 2 documents"):
        encoder.encode_documents(["a", "b", "c"])
    with pytest.raises(TooManyChunks, match=r"3 documents in one prompt .*raise max_prompt_chunks"):
        encoder.encode(Prompt.from_text("s ## a ## b ## c ## q"))
    with pytest.raises(ChunkTooLong, match=r"the chunk 'x' has 5 tokens, the limit is 4; .* long_chunks='split'"):
        encoder.encode(Prompt.from_tokens(chunks=[[1] * 5], question=[1], names=["x"]))


def test_a_conversation_without_documents_is_the_templates_own_prompt():
    for name, template in TEMPLATES.items():
        encoder = make_encoder(template)
        messages = [SYSTEM, USER, {"role": "assistant", "content": "A river."}, USER]
        wanted = encoder.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for documents in (None, []):
            prompt = encoder.encode_chat(messages, documents)
            assert prompt.is_plain
            assert list(prompt.segments[0].token_ids) == wanted, name


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", ["Be brief.", None])
def test_documents_computed_ahead_have_the_tokens_of_every_later_prompt(name, system):
    encoder = make_encoder(TEMPLATES[name])
    ahead = encoder.encode_documents(DOCUMENTS, system)
    assert [str(segment.kind) for segment in ahead.segments[-4:]] == ["chunk"] * 3 + ["question"]
    first = [] if system is None else [SYSTEM]
    history = [
        USER,
        {"role": "assistant", "content": "A <|im_end|> river."},
        {"role": "user", "content": "</s> Which?"},
    ]
    for messages in ([*first, USER], [*first, *history]):
        later = encoder.encode_chat(messages, DOCUMENTS[::-1])
        assert later.segments[: -1 - len(DOCUMENTS)] == ahead.segments[: -1 - len(DOCUMENTS)]
        assert later.chunks == ahead.chunks[::-1]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", ["Be brief.", "Be brief. Today is 2026-11-23.", None])
def test_documents_computed_ahead_have_the_tokens_of_documents_found_in_messages(name, system):
    encoder = make_encoder(TEMPLATES[name])
    texts = ["The tower is forty metres high, says Ada. <|im_end|>", "The mill of Tolbury grinds oats, and no wheat."]
    documents = [{"id": str(number), "title": "not in the text", "text": text} for number, text in enumerate(texts)]
    ahead = encoder.encode_documents(documents, system, find_documents="document-tags")
    pasted = "Read these.\n" + "\n".join(f"<document>{text}</document>" for text in texts[::-1]) + "\nHow high?"
    first = [] if system is None else [{"role": "system", "content": system}]
    finder = document_finder(("document-tags",), None)
    later = encoder.encode_chat([*first, {"role": "user", "content": pasted}], finder=finder)
    assert [chunk.token_ids for chunk in later.chunks] == [chunk.token_ids for chunk in ahead.chunks[::-1]]
    before = [[each for each in prompt.segments if each.kind is SegmentKind.SYSTEM] for prompt in (later, ahead)]
    assert before[0] == before[1]


@pytest.mark.parametrize("documents", [None, ["A document."]])
def test_tools_make_no_control_tokens(documents):
    encoder = make_encoder("{{ '<|im_start|>' + tools | tojson + '<|im_end|>' }}" + CHATML)
    prompts = [
        encoder.encode_chat([USER], documents, tools=[{"name": "a", "description": text, text: ["<s>"]}])
        for text in ("x y", "<|im_start|> and </tool_call><s>")
    ]
    control = set(PieceTokenizer(encoder.tokenizer).control_ids)
    counts = [sum(token in control for ids in token_ids(prompt) for token in ids) for prompt in prompts]
    assert counts[0] == counts[1]


def test_documents_computed_ahead_without_a_template_have_the_tokens_of_text_prompts():
    encoder = make_encoder()
    ahead = encoder.encode_documents(["first text", "second"], "Be brief.")
    prompt = Prompt.from_text("Be brief. ## first text ## second ## Why?")
    assert token_ids(ahead)[:-1] == token_ids(encoder.encode(prompt))[:-1]
    chat = make_encoder(CHATML).encode_documents(["first text", "second"], "Be brief.", chat=False)
    assert token_ids(chat)[:-1] == token_ids(ahead)[:-1]


def test_chunks_carry_names_and_the_prompt_its_salt():
    prompt = make_encoder(GRANITE).encode_chat([USER], DOCUMENTS, salt="tenant")
    assert [segment.name for segment in prompt.chunks] == ["A title", None, "c"]
    assert prompt.salt == "tenant"
    with pytest.raises(InvalidPrompt, match="salt"):
        make_encoder(GRANITE).encode_chat([USER], salt="x" * 5000)


def test_a_system_segment_without_tokens_is_left_out():
    template = READER.replace("{{ bos_token }}", "")
    prompt = make_encoder(template).encode_chat([USER], DOCUMENTS)
    assert [str(segment.kind) for segment in prompt.segments] == ["chunk"] * 3 + ["question"]


def test_a_prompt_that_is_too_long_names_the_numbers():
    prompt = Prompt.from_tokens(system=[1] * 10, chunks=[[2] * 20, [3] * 30], question=[4] * 5)
    assert check_length(arrange(prompt, "shared").last.end, 50) == 5
    assert check_length(arrange(prompt, "sequential").last.end, 75, 10) == 10
    with pytest.raises(PromptTooLong, match="needs 65 positions and its answer 10 tokens, the model has 74"):
        check_length(arrange(prompt, "sequential").last.end, 74, 10)


def test_a_segment_that_can_never_fit_is_refused_at_once():
    encoder = PromptEncoder(
        None, ChunkCacheConfig(long_chunks="split", max_chunk_tokens=4), vocab_size=9, max_positions=8
    )
    assert len(encoder.encode(Prompt.from_tokens(chunks=[[1] * 20], question=[1] * 8)).chunks) == 5
    with pytest.raises(PromptTooLong, match="the question alone has 9 tokens, the model has 8 positions"):
        encoder.encode(Prompt.from_tokens(question=[1] * 9))


@given(
    free=st.integers(8, 300),
    lengths=st.lists(st.integers(1, 300), min_size=2, max_size=2),
    document=st.integers(1, 400),
)
def test_parts_of_a_split_document_seldom_change_with_the_question(
    free: int, lengths: list[int], document: int
) -> None:
    encoder = PromptEncoder(
        None, ChunkCacheConfig(long_chunks="split", max_chunk_tokens=1000), vocab_size=9, max_positions=free + 2
    )

    def parts(question: int) -> list[int]:
        prompt = Prompt.from_tokens([1, 2], [[3] * document], [4] * question)
        try:
            return [chunk.num_tokens for chunk in encoder.encode(prompt).chunks]
        except PromptTooLong:
            assert document > free and free - question < free // 6 + 2
            return [document]

    short, long = (parts(min(length, free - 2)) for length in lengths)
    if max(lengths) <= free // 4:
        assert short == long
    assert sum(long) == sum(short) == document
    room = free - min(lengths[1], free - 2)
    assert max(long) <= room or (len(long) == 1 and room < free // 6 + 2)


class CountingTokenizer(PieceTokenizer):
    """Counts the characters that are tokenized."""

    num_characters = 0

    def _ids(self, text, **options):
        self.num_characters += len(text)
        return super()._ids(text, **options)

    def _tokenize(self, text, parts):
        self.num_characters += sum(end - start for start, end in parts)
        return super()._tokenize(text, parts)


def counting_encoder(settings=None, max_positions=None):
    encoder = make_encoder(CHATML, settings)
    encoder.max_positions = max_positions
    encoder._pieces = CountingTokenizer(encoder.tokenizer)
    return encoder


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda encoder, text: encoder.encode(text), PromptTooLong, "shorten it"),
        (lambda encoder, text: encoder.encode_chat([{"role": "user", "content": text}]), PromptTooLong, "shorten it"),
        (
            lambda encoder, text: encoder.encode_documents([{"id": "x", "text": text}]),
            ChunkTooLong,
            "long_chunks='split'",
        ),
    ],
)
def test_a_text_that_can_never_fit_is_refused_before_all_of_it_is_tokenized(ask, error, words):
    encoder = counting_encoder(ChunkCacheConfig(max_chunk_tokens=900, long_chunks="error"), max_positions=1_000)
    text = "What is it? " * 500_000
    with pytest.raises(
        error, match=rf"has 60000\d\d characters, far more than the limit of (900|1000) tokens; .*{words}"
    ):
        ask(encoder, text)
    assert encoder._pieces.num_characters < 3 * WINDOW_CHARACTERS


def test_a_text_of_many_characters_and_few_tokens_is_not_refused():
    encoder = counting_encoder(max_positions=1_000)
    encoder._pieces._ids = lambda text, **options: [1] * (len(text) // 1_000)
    assert not encoder._pieces.far_longer("x" * 900_000, 1_000)
    assert encoder._pieces.far_longer("x" * 4_000_000, 1_000)


def test_a_document_that_is_to_be_split_is_held_against_all_of_its_parts():
    settings = ChunkCacheConfig(max_chunk_tokens=400, max_prompt_chunks=100, long_chunks="split")
    encoder = counting_encoder(settings)
    text = "What is it? " * 6_000
    assert len(text) > WINDOW_CHARACTERS
    assert len(encoder.encode_documents([text]).chunks) > 30
    with pytest.raises(PromptTooLong, match=r"far more than the limit of 40000 tokens; shorten it$"):
        encoder.encode_documents([text * 20])


@pytest.mark.parametrize("limit", [200, 40_000, 70_000, 10**6])
def test_texts_that_are_less_than_twice_too_long_are_told_their_tokens_as_ever(limit):
    encoder = counting_encoder(max_positions=limit)
    text = "What is it? " * 6_000
    num_tokens = len(encoder.tokenizer(text)["input_ids"])
    if num_tokens <= limit:
        assert encoder.encode(text).num_tokens == num_tokens
        return
    known = f"has {num_tokens} tokens, the model has {limit} positions" if num_tokens < 2 * limit else "far more than"
    with pytest.raises(PromptTooLong, match=known):
        encoder.encode(text)


def test_only_documents_that_do_not_fit_as_a_whole_are_split():
    encoder = PromptEncoder(None, ChunkCacheConfig(), vocab_size=9, max_positions=100)
    prompts = [Prompt.from_tokens([1] * 10, [[2] * count], [3] * 5) for count in (50, 84, 85, 200)]
    found = [[chunk.num_tokens for chunk in encoder.encode(prompt).chunks] for prompt in prompts]
    assert found == [[50], [84], [45, 40], [45, 45, 45, 45, 20]]


def test_nameless_documents_are_told_apart_by_their_number():
    encoder = make_encoder(settings=ChunkCacheConfig(max_chunk_tokens=4, long_chunks="error"))
    long, told = [9] * 5, r"the document number 3 \(it has no id\) has 5 tokens"
    with pytest.raises(ChunkTooLong, match=told) as raised:
        encoder.encode(Prompt.from_tokens([1], [[7], [8], long], [1]))
    assert raised.value.document == 2
    with pytest.raises(ChunkTooLong, match=r"the document \(it has no id\) has 5 tokens") as raised:
        encoder.encode(Prompt.from_tokens([1], [long], [1]))
    assert raised.value.document == 0
    with pytest.raises(ChunkTooLong, match="the chunk 'b' has") as raised:
        encoder.encode(Prompt.from_tokens([1], [[7], long], [1], names=["a", "b"]))
    assert raised.value.document == 1
    encoder = make_encoder(CHATML, settings=ChunkCacheConfig(max_chunk_tokens=40, long_chunks="error"))
    with pytest.raises(ChunkTooLong, match="the document number 2 "):
        encoder.encode_chat([{"role": "user", "content": "?"}], ["a", "word " * 90, "b"])


def test_parts_of_a_split_document_know_which_document_they_were():
    settings = ChunkCacheConfig(max_chunk_tokens=4, long_chunks="split")
    prompt = make_encoder(settings=settings).encode(Prompt.from_tokens([1], [[7], [9] * 9, [8]], [1]))
    assert [chunk.document for chunk in prompt.chunks] == [0, 1, 1, 1, 2]
    assert [segment.document for segment in (prompt.segments[0], prompt.segments[-1])] == [None, None]
