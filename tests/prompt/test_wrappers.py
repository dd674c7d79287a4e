import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.prompt.chat_template.document_placement import NUMBER, cut_gap, unify, written


def test_numbers_that_change_are_found_and_others_stay():
    assert unify(["a1b7", "a12b7"]) == ("a", NUMBER, "b", "7")
    assert written(("a", NUMBER, "b", "7")) == "ab7"
    assert unify(["same", "same"]) == tuple("same")
    assert unify(["a1", "b1"]) is None
    assert unify(["a1", "a"]) is None


@pytest.mark.parametrize(
    ("prefix", "suffix", "before", "after"),
    [
        ("<|document|>", "\n", "<s>system\n", "<|user|>hi"),
        ("<|document|>", "\n", "<s>", "<|user|>hi"),
        ("<doc>", "</doc>", "<docs>", "</docs>"),
        ("<|start|>document<|sep|>", "<|end|>", "<|start|>system<|sep|>x<|end|>", "<|start|>user<|sep|>"),
        ("<|start|>document\n", "<|end|>\n", "x<|end|>\n", "<|start|>user\n"),
        ("title: ", "\n", "<results>\n", "</results>"),
        ("[1] ", "\n", "Sources:\n", "\nQuestion"),
        ("- ", "\n", "Documents:\n", ""),
        ("", "\n\n", "Documents:\n\n", "Now"),
    ],
)
def test_the_wrapper_of_one_document_is_cut_where_a_reader_would(prefix, suffix, before, after):
    gap = unify([suffix + prefix])
    cut = cut_gap(gap, before + prefix, suffix + after)
    assert written(gap[: cut.place]) == suffix
    assert written(gap[cut.place :]) == prefix
    assert (before + prefix)[: cut.head_end] == before
    assert (suffix + after)[cut.tail_start :] == after


texts = st.text(alphabet="ab\n<>01", max_size=8)


@settings(max_examples=examples(300))
@given(texts, texts, texts, texts, texts)
def test_head_wrappers_and_tail_together_are_the_whole_text(head, prefix, suffix, joiner, tail):
    gap = unify([suffix + joiner + prefix])
    cut = cut_gap(gap, head + prefix, suffix + tail)
    front, back = written(gap[cut.place :]), written(gap[: cut.place])
    assert (head + prefix)[: cut.head_end] + front == head + prefix
    rest = (suffix + tail)[cut.tail_start :]
    assert (back + rest).startswith(suffix[: len(back)])
    if not joiner:
        assert back + rest == suffix + tail
