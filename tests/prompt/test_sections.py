"""Sections: divided at headings, blank lines and tokens, in places that an edit elsewhere does not move."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_time import least_cpu_seconds
from support.examples import examples
from support.tokenizers import CHATML, make_tokenizer

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.layout import arrange
from kvmosaic.prompt import Prompt, PromptEncoder, Segment
from kvmosaic.prompt.splits import _local_minima, section_borders

TOKENIZER = make_tokenizer(CHATML)
WORDS = "The ferry leaves at noon and comes back at six. " * 3


def sections_of(text: str, max_section_tokens: int = 40, **options: int) -> list[Segment]:
    settings = ChunkCacheConfig(long_chunks="sections", max_section_tokens=max_section_tokens, **options)
    encoder = PromptEncoder(TOKENIZER, settings, vocab_size=len(TOKENIZER))
    return list(encoder.encode(Prompt.from_documents([{"text": text, "id": "guide"}], "Why?")).chunks)


def texts_of(text: str, max_section_tokens: int = 40) -> list[str]:
    parts = [part.text or "" for part in sections_of(text, max_section_tokens)]
    assert "".join(parts) == text
    return [part.strip() for part in parts]


def test_a_long_document_is_divided_at_the_highest_headings_that_suffice():
    short = "Two words. " * 3
    text = f"# One\n\n{short}\n\n## Ferries\n\n{short}\n\n## Trains\n\n{short}\n\n### By night\n\n{short}\n\n{short}"
    text = text.strip()
    assert texts_of(text, 500) == [text], "short enough as it is"
    firsts = [part.splitlines()[0] for part in texts_of(text, 60)]
    assert firsts[:3] == ["# One", "## Ferries", "## Trains"] and "### By night" in firsts


def test_headings_of_html_divide_too():
    paragraph = "<p>Some words of a page.</p>\n" * 4
    text = f"<h1>Guide</h1>\n{paragraph}<H2 class='x'>Ferries</H2>\n{paragraph}<h2>Trains</h2>\n{paragraph}"
    firsts = [part.splitlines()[0] for part in texts_of(text.strip(), 120)]
    assert firsts == ["<h1>Guide</h1>", "<H2 class='x'>Ferries</H2>", "<h2>Trains</h2>"]


def test_sections_have_the_names_of_parts_and_a_bounded_size():
    text = "word " * 300 + "\n\n# Next\n\n" + "other " * 10
    parts = sections_of(text)
    assert [part.name for part in parts] == [f"guide ({n}/{len(parts)})" for n in range(1, len(parts) + 1)]
    assert all(part.num_tokens <= 40 and part.is_section for part in parts)
    assert any((part.text or "").startswith("# Next") for part in parts)
    assert all(part.num_tokens <= 20 for part in sections_of(text, max_chunk_tokens=20))


def test_only_long_documents_are_divided():
    (part,) = sections_of("# One\n\nSome words.\n\n# Two\n\nMore words.")
    assert part.part is None and not part.is_section


def test_token_ids_are_divided_by_number():
    settings = ChunkCacheConfig(long_chunks="sections", max_section_tokens=16)
    encoder = PromptEncoder(None, settings, vocab_size=99)
    prompt = encoder.encode(Prompt.from_tokens(chunks=[range(40)], question=[1]))
    assert [part.num_tokens for part in prompt.chunks] == [16, 16, 8]


def guide(num_sections: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    words = ["ferry", "island", "harbour", "boat", "leaves", "early", "late", "never"]
    return [
        f"## Section {number}\n\n" + " ".join(chance.choices(words, k=30)) + ".\n\n" for number in range(num_sections)
    ]


@given(section=st.integers(0, 19), text=st.text(alphabet="abc .\n", max_size=40))
@settings(max_examples=examples(30))
def test_an_edit_in_one_section_changes_this_section_only(section, text):
    before = guide(20)
    after = before.copy()
    after[section] = after[section].rstrip() + " edited" + text.rstrip() + ".\n\n"
    old, new = ({part.token_ids for part in sections_of("".join(each), 200)} for each in (before, after))
    assert len(old) == 20
    assert len(old - new) == 1, "nothing else of the old text is lost"


@pytest.mark.parametrize("place", [0.0, 0.3, 0.5, 0.9])
def test_an_edit_moves_no_far_borders_of_a_text_without_headings(place):
    chance = random.Random(7)
    paragraphs = [" ".join(chance.choices(["ferry", "boat", "late", "early"], k=12)) + ".\n\n" for _ in range(200)]
    edited = paragraphs.copy()
    edited[int(place * 200)] = "Something entirely different stands here now, and it is longer.\n\n"
    old, new = ([part.token_ids for part in sections_of("".join(each), 400)] for each in (paragraphs, edited))
    assert len(old) > 10 and max(map(len, old)) <= 400
    assert len(set(new) - set(old)) <= 4


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=30),
    st.integers(0, 6),
)
def test_local_minima_are_those_of_a_look_at_all(steps, distance):
    places, marks, place = [], [], 0
    for step, mark in steps:
        place += step
        places.append(place)
        marks.append(mark)
    expected = [
        place
        for index, place in enumerate(places)
        if all(
            (marks[index], index) <= (marks[other], other)
            for other in range(len(places))
            if abs(places[other] - place) <= distance
        )
    ]
    assert _local_minima(places, marks, distance) == expected


def test_sections_are_computed_at_one_place_and_read_one_after_the_other():
    parts = sections_of("".join(guide(5)), 200)
    prompt = Prompt.from_tokens([1] * 7, [part.token_ids for part in parts], [1])
    chunks = iter(parts)
    segments = [next(chunks) if segment.kind == "chunk" else segment for segment in prompt.segments]
    layout = arrange(Prompt(tuple(segments)), "sequential", "system")
    assert {span.start for span in layout.spans[1:-1]} == {7}
    ends = [layout.position_of(index) + layout.spans[index].num_tokens for index in range(len(layout.spans) - 1)]
    assert [layout.position_of(index) for index in range(1, len(layout.spans))] == ends
    shared = arrange(Prompt(tuple(segments)), "shared", "system")
    assert [shared.position_of(index) for index in range(1, len(shared.spans))] == ends
    assert {span.start for span in shared.spans[1:-1]} == {7}
    fixed = arrange(Prompt(tuple(segments)), "shared", "system", moves_sections=False)
    assert [fixed.position_of(index) for index in range(1, len(fixed.spans))] == ends and not fixed.is_moved


@pytest.mark.parametrize("text", ["# a\n" * 50_000, "\n" * 200_000, " " * 200_000, "a\n\n" * 60_000, "\n   " * 50_000])
def test_borders_cost_linear_time(text):
    starts = list(range(len(text)))
    assert least_cpu_seconds(lambda: section_borders(text, starts, 1_000), tries=1) < 6, "a fraction of a second"


@pytest.mark.parametrize("fence", ["```", "~~~~"])
def test_comments_in_blocks_of_code_are_no_headings(fence):
    code = f"{fence}sh\n# install\nmake\n# run\n{fence}\n"
    text = "".join(f"## Part {number}\n{WORDS}\n{code}{WORDS}\n" for number in range(6))
    starts = [found.start() for found in re.finditer(r"\S+\s*", text)]
    borders = [text[starts[border] :] for border in section_borders(text, starts, 30)]
    assert len(borders) == 5 and all(part.startswith("## Part") for part in borders)
    opened = text.replace(f"{fence}\n", "")
    starts = [found.start() for found in re.finditer(r"\S+\s*", opened)]
    assert any(opened[starts[border] :].startswith("# run") for border in section_borders(opened, starts, 30))


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_blank_lines_divide_whatever_ends_a_line(line_break):
    text = (line_break * 2).join(f"Paragraph {number}. {WORDS}" for number in range(60))
    starts = [found.start() for found in re.finditer(r"\S+\s*", text)]
    borders = section_borders(text, starts, 60)
    assert len(borders) > 5 and all(text[starts[border] :].startswith("Paragraph") for border in borders)
