"""Names: found in token ids as in the text, for tokenizers of both kinds; computed again, and nothing else is."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines import build_engine
from support.loaded import chatting_llama, loaded_family
from support.tokenizers import make_tokenizer

from kvmosaic import LLM, SamplingParams
from kvmosaic.config import EngineConfig
from kvmosaic.errors import InvalidRepair
from kvmosaic.prompt import Prompt
from kvmosaic.prompt.companions import are_short
from kvmosaic.repair import Names, WordFinder

RECORDS = [
    "Invoice 20881: customer Halden Foods, amount 4,310 euros, paid by card.",
    "Invoice 20882: customer Harden Tools, amount 4,130 euros, paid by cheque.",
    "Invoice 20883: customer Walden Paper, amount 1,340 euros, not paid yet.",
]
TEXTS = st.lists(
    st.sampled_from(["Halden", "foods ", "4,310", " ", "is", "\n", "Köln", "наука", "Счёт", "中文", "☃", "iPod"])
)


def tokenized(kind, text):
    """Ids of a text, and by token whether the text's own words at its characters are names."""
    found = make_tokenizer(kind=kind)(text, add_special_tokens=False, return_offsets_mapping=True)
    names = [
        match.span()
        for match in re.finditer(r"\w+", text)
        if any(letter.isdigit() or letter.isupper() for letter in match[0])
    ]
    return found["input_ids"], [
        any(first < end and start < last for start, end in names) for first, last in found["offset_mapping"]
    ]


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
@pytest.mark.parametrize("text", ["The Aller is 215 km long.", "no name at all", "A", "in 1929 and in Brindisi"])
def test_names_are_found_in_ids_as_in_the_text(kind, text):
    ids, expected = tokenized(kind, text)
    first = int(kind == "unigram")  # a space that is not in the text, and has the place of its first letter
    assert WordFinder(make_tokenizer(kind=kind)).names(ids)[first:] == expected[first:]


@given(TEXTS)
def test_no_name_is_missed_where_a_character_is_several_tokens(texts):
    ids, expected = tokenized("byte_level", "".join(texts))
    found = WordFinder(make_tokenizer(kind="byte_level")).names(ids)
    assert len(found) == len(ids) and all(one or not other for one, other in zip(found, expected, strict=True))


def test_names_of_documents_are_computed_again_and_the_first_document_is_exact():
    with LLM(chatting_llama(), profile=False) as llm:
        messages = [{"role": "user", "content": "Who is the contact?"}]
        prompt = llm.compose(messages, documents=RECORDS)
        find = WordFinder(llm.model.tokenizer).names
        expected = sum(sum(find(chunk.token_ids)) for chunk in prompt.chunks[1:])
        params = SamplingParams(temperature=0, max_tokens=2, repair="names")
        (output,) = llm.chat(messages, params, documents=RECORDS, position_strategy="sequential")
        assert output.reuse.repair.policy == "names"
        assert output.reuse.repair.repaired_tokens == expected > 0
        again = llm.chat(messages, params, documents=RECORDS, position_strategy="sequential")[0]
        assert again.reuse.repair.computed_tokens == 0 and again.outputs == output.outputs


def test_words_of_a_question_weigh_more_the_fewer_documents_have_them_and_nothing_in_most():
    def weights(question, *texts):
        token_ids = [tokenized("byte_level", text)[0] for text in (question, *texts)]
        return WordFinder(make_tokenizer(kind="byte_level")).weights(token_ids[0], token_ids[1:])

    found = weights("who is MR Torvin", "Mr torvin", "mr and who", "torvins mr", "here is", "", "is")
    once, twice, thrice = (math.log(7 / (count + 0.5)) for count in (1, 2, 3))
    assert found == pytest.approx([once + thrice, once + thrice, thrice, twice, 0, twice])
    assert weights("mr torvin", "mr torvin", "mr", "mr")[1:] == [0.0, 0.0], "most have it"
    assert weights("哪里有渡轮", "渡轮停在这里", "没有面包", "在这里")[0] > 0.0, "no spaces between words"


def test_the_documents_with_the_words_of_the_question_are_computed_again():
    documents = [f"{name} works in {place}. " * 3 for name, place in zip("ABCDEFG", "tuvwxyz", strict=True)]
    with LLM(chatting_llama(), profile=False) as llm:
        messages = [{"role": "user", "content": "Who is in w?"}]
        params = SamplingParams(temperature=0, max_tokens=2, repair="documents(2)")
        (output,) = llm.chat(messages, params, documents=documents, position_strategy="sequential")
        assert output.reuse.repair.policy == "documents(2)"
        chunks = llm.compose(messages, documents=documents).chunks
        assert output.reuse.repair.repaired_tokens == chunks[3].num_tokens


COMPANIONS = ["Invoice 20881: customer Halden Foods, amount 4,310 euros. Contact: Ms. Roth."]
"""A record of their kind."""


@pytest.mark.parametrize(
    ("documents", "how", "policy", "remark"),
    [
        (RECORDS, {}, "full", "exact: documents are alike, so they are read in full"),
        (RECORDS, {"position_strategy": "shared"}, "full", "exact: documents are alike, so they are read in full"),
        (
            RECORDS,
            {"companions": ["中文中文中文中文"]},
            "full",
            "exact: documents are alike, so they are read in full",
        ),
        (RECORDS, {"companions": COMPANIONS}, "names", ""),
        (["The river Aller rises near Eggenstedt. " * 40, *RECORDS[:1] * 2], {}, "query(0.05)", ""),
        (["The river Aller rises near Eggenstedt.", *RECORDS[:1]], {}, "full", "exact: documents are short, so they"),
        ([f"{letter * 40} {number}." for number, letter in enumerate("abcdefg")], {}, "full", "documents are short"),
        (["The river Aller rises near Eggenstedt.", *RECORDS[:1]], {"chunk_context": "system"}, "first(8)", ""),
    ],
)
def test_documents_that_are_alike_are_read_in_full_or_have_met_others_of_their_kind(documents, how, policy, remark):
    with LLM(chatting_llama(), profile=False) as llm:
        messages, params = [{"role": "user", "content": "Who?"}], SamplingParams(temperature=0, max_tokens=4)
        (output,) = llm.chat(messages, params, documents=documents, **how)
        assert (output.reuse.repair.policy if output.reuse.repair else "none") == policy
        assert remark in output.reuse.composition and ("read in full" in output.reuse.composition) == bool(remark)
        assert ("(number 1 and number 2)" in output.reuse.composition) == ("alike" in remark), "which ones"
        if policy == "full":
            asked = SamplingParams(temperature=0, max_tokens=4, repair="full")
            (expected,) = llm.chat(messages, asked, documents=documents)
            assert output.outputs == expected.outputs and expected.reuse.composition == "exact"
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1, repair="none"), documents=documents)
        assert output.reuse.repair is None, "what a request says is done"
        assert ("may be mixed up" in output.reuse.composition) == (documents == RECORDS)


def test_where_each_run_of_names_takes_a_forward_documents_that_are_alike_are_read_in_full(monkeypatch):
    monkeypatch.setattr("kvmosaic.model.loaded.LoadedModel.repairs_run_by_run", True)
    with LLM(chatting_llama(), profile=False) as llm:
        messages, params = [{"role": "user", "content": "Who?"}], SamplingParams(temperature=0, max_tokens=4)
        (output,) = llm.chat(messages, params, documents=RECORDS, companions=COMPANIONS)
        assert output.reuse.repair.policy == "full" and "alike" in output.reuse.composition


@pytest.mark.parametrize(
    ("lengths", "is_short"),
    [((256,), True), ((200, 57), False), ((96,) * 40, True), ((20, 172) * 20, True), ((97,) * 40, False)],
)
def test_documents_are_short_together_or_on_average(lengths, is_short):
    assert are_short(lengths) == is_short


def test_documents_that_are_like_one_before_them_are_read_in_full_alone_where_that_is_asked_for():
    others = [
        "The river Aller rises near Eggenstedt. " * 6,
        "Cheese of the valley ripens for nine weeks in caves, turned by hand each evening. " * 3,
        "Lighthouses were built from the fourth century on. " * 5,
        "A pilot may refuse to fly. " * 3,
    ]
    documents = [RECORDS[0], *others, RECORDS[1]]
    with LLM(chatting_llama(), profile=False) as llm:
        messages, params = [{"role": "user", "content": "Who?"}], SamplingParams(temperature=0, max_tokens=4)
        (whole,) = llm.chat(messages, params, documents=documents)
        assert "documents are alike, so they are read in full" in whole.reuse.composition
        params = SamplingParams(temperature=0, max_tokens=4, repair="alike")
        (output,) = llm.chat(messages, params, documents=documents)
        (chunks, repair) = llm.compose(messages, documents=documents).chunks, output.reuse.repair
        assert repair is not None and repair.policy == "alike"
        assert repair.repaired_tokens == repair.computed_tokens == chunks[-1].num_tokens
        assert "documents that are like one before them are read in full" in output.reuse.composition
        (again,) = llm.chat(messages, params, documents=documents)
        assert again.outputs == output.outputs and again.reuse.repair.computed_tokens == 0
        (moved,) = llm.chat(messages, params, documents=[RECORDS[1], *others[::-1], RECORDS[0]])
        assert moved.reuse.repair.repaired_tokens == chunks[0].num_tokens


def test_companions_of_their_kind_are_chosen_from_many_and_warming_chooses_the_same():
    others = [
        f"Invoice 2077{number}: customer Holler Glass, amount {number}30 euros, paid by card." for number in range(4)
    ]
    prose = [
        f"{word} is made from the leaves of one plant, and its price was high." for word in ("Tea", "中文中文中文")
    ]
    given = [prose[0], others[0], prose[1], *others[1:]]
    with LLM(chatting_llama(), profile=False) as llm:
        messages, params = [{"role": "user", "content": "Who?"}], SamplingParams(temperature=0, max_tokens=4)
        llm.warm(RECORDS, companions=given)
        (output,) = llm.chat(messages, params, documents=RECORDS, companions=given)
        chunks = [segment for segment in output.reuse.segments if segment.kind == "chunk"]
        assert all(chunk.reused_tokens == chunk.num_tokens for chunk in chunks)
        (same,) = llm.chat(messages, params, documents=RECORDS[::-1], companions=others[:3])
        chunks = [segment for segment in same.reuse.segments if segment.kind == "chunk"]
        assert all(chunk.reused_tokens == chunk.num_tokens for chunk in chunks), "the first three of their kind"
        (same,) = llm.chat(messages, params, documents=RECORDS, companions=others[1:])
        chunks = [segment for segment in same.reuse.segments if segment.kind == "chunk"]
        assert [chunk.reused_tokens > 0 for chunk in chunks] == [True, False, False], "other companions, other copies"


def test_documents_that_are_alike_are_composed_where_reading_them_in_full_has_no_room():
    with LLM(chatting_llama(), profile=False, engine_config=EngineConfig(max_model_len=300)) as llm:
        messages = [{"role": "user", "content": "Who?"}]
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), documents=RECORDS)
        assert output.reuse.repair.policy == "full"
        long = [f"{record} {'word ' * 25}" for record in RECORDS]
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), documents=long)
        assert "may be mixed up" in output.reuse.composition


def test_a_default_never_refuses_a_prompt_for_its_size(monkeypatch):
    monkeypatch.setattr("kvmosaic.engine.placement.MAX_REPAIR_LOOKS", 60)
    monkeypatch.setattr("kvmosaic.engine.request_repair.MAX_REPAIR_LOOKS", 60)
    with LLM(chatting_llama(), profile=False) as llm:
        messages = [{"role": "user", "content": "Who?"}]
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), documents=RECORDS, companions=COMPANIONS)
        assert output.reuse.repair is None and "mixed up" not in output.reuse.composition
        with pytest.raises(InvalidRepair, match="repair=names repairs"):
            llm.chat(messages, SamplingParams(max_tokens=1, repair="names"), documents=RECORDS)


def test_without_a_tokenizer_names_are_refused_with_a_way_out():
    engine = build_engine(loaded_family("llama"))
    prompt = Prompt.from_tokens([3], [[20, 21], [22, 23]], [90])
    with pytest.raises(InvalidRepair, match=r"repair=names reads the text of tokens.*use 'first\(k\)'"):
        engine.add_request(prompt, SamplingParams(repair=Names()))
