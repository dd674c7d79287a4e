import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import EmptySegment, InvalidPrompt, InvalidSeparator
from kvmosaic.prompt import Prompt, SegmentKind, escape_separator
from kvmosaic.prompt.separator import split_text


def texts(prompt):
    return [segment.text for segment in prompt.segments]


def kinds(prompt):
    return [str(segment.kind) for segment in prompt.segments]


def test_first_part_is_system_last_is_question_rest_are_chunks():
    prompt = Prompt.from_text("Be brief. ## one ## two\nlines ## Why?", names=["a", "b"], salt="tenant")
    assert texts(prompt) == ["Be brief.", "one", "two\nlines", "Why?"]
    assert kinds(prompt) == ["system", "chunk", "chunk", "question"]
    assert [segment.name for segment in prompt.chunks] == ["a", "b"]
    assert prompt.salt == "tenant"


@pytest.mark.parametrize("text", ["no border", "one ## border", "  kept as it is \n", "##"])
def test_fewer_than_two_separators_are_an_ordinary_prompt_with_its_text_untouched(text):
    prompt = Prompt.from_text(text)
    assert prompt.is_plain
    assert texts(prompt) == [text]


def test_any_separator_can_be_configured():
    assert texts(Prompt.from_text("a # # b##b # # c", " # # ")) == ["a", "b##b", "c"]
    assert texts(Prompt.from_text("a\n---\nb\n---\nc", "\n---\n")) == ["a", "b", "c"]
    assert texts(Prompt.from_text("a.*b.*c", ".*")) == ["a", "b", "c"]
    assert texts(Prompt.from_text("a ## b ## c", None)) == ["a ## b ## c"]


def test_a_backslash_keeps_a_separator_as_text():
    assert texts(Prompt.from_text(r"a ## see \## here ## c")) == ["a", "see ## here", "c"]
    assert texts(Prompt.from_text(r"a ## ends in \\## c ## d")) == ["a", "ends in \\", "c", "d"]
    assert texts(Prompt.from_text(r"a ## C:\dir\\x ## c")) == ["a", r"C:\dir\\x", "c"]
    assert texts(Prompt.from_text(r"only \## text \##")) == ["only ## text ##"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("## b ## c", "system text"),
        ("a ## ## c ## d", "text of chunk 1"),
        ("a ## b ## \n", "question"),
        ("####", "system"),
    ],
)
def test_an_empty_part_is_named_together_with_the_way_out(text, part):
    with pytest.raises(EmptySegment, match=rf"the {part}.* is empty .*\\##"):
        Prompt.from_text(text)


@pytest.mark.parametrize("separator", ["", None])
def test_an_empty_separator_and_none_never_split(separator):
    text = " a ## b\\## ## c "
    assert texts(Prompt.from_text(text, separator)) == [text]
    assert split_text(text, separator) == [text]
    assert escape_separator(text, separator) == text
    assert ChunkCacheConfig(chunk_separator=separator).chunk_separator is None


@pytest.mark.parametrize("separator", [" \n", "\\##", "#" * 257, 7])
def test_a_separator_that_cannot_split_is_refused(separator):
    with pytest.raises(InvalidSeparator):
        Prompt.from_text("a ## b ## c", separator)


def test_what_is_not_a_text_or_too_long_is_refused():
    with pytest.raises(InvalidPrompt, match="must be a str, got bytes"):
        Prompt.from_text(b"a ## b ## c")
    with pytest.raises(InvalidPrompt, match="at most 33554432"):
        Prompt.from_text("a" * (2**25 + 1))
    with pytest.raises(InvalidPrompt, match="1 names for 2 chunks"):
        Prompt.from_text("a ## b ## c ## d", names=["x"])


@pytest.mark.parametrize("text", ["a ## b ## c", "a"])
def test_a_prompt_of_text_says_that_it_has_no_tokens_yet(text):
    prompt = Prompt.from_text(text)
    for ask in (lambda: prompt.num_tokens, lambda: prompt.segments[0].num_tokens, prompt.joined):
        with pytest.raises(InvalidPrompt, match=r"not tokenized yet.*encoder\.encode\(prompt\)"):
            ask()


separators = st.sampled_from(["##", " # # ", "<sep>", "\n---\n"])
pieces = st.lists(
    st.sampled_from(["a", "Ü", "#", "##", " # # ", "\\", " ", "\n", "<sep>", "---", "\n---\n"]), min_size=1, max_size=12
).map("".join)


@given(separators, pieces)
def test_escaped_text_has_no_border_and_reads_as_it_was(separator, text):
    assert split_text(escape_separator(text, separator), separator) == [text]


@given(separators, st.lists(pieces, min_size=3, max_size=6))
def test_escaped_parts_come_back_as_they_were_joined(separator, parts):
    # A letter at both ends: white space is stripped, and a separator made of two parts belongs to neither.
    parts = [f"x{part}x" for part in parts]
    prompt = Prompt.from_text(separator.join(escape_separator(part, separator) for part in parts), separator)
    assert texts(prompt) == parts
    assert prompt.segments[0].kind is SegmentKind.SYSTEM


@given(st.integers(1, 50_000))
def test_long_runs_of_backslashes_take_linear_time(number):
    assert split_text("\\" * number + "x", "##") == ["\\" * number + "x"]
