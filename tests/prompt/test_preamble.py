"""Where the preamble of a system text ends: rules, marks, template clocks, and what changes by itself."""

from __future__ import annotations

import time
from datetime import datetime
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cpu_time import least_cpu_seconds
from support.tokenizers import TEMPLATES, make_tokenizer

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidPreamble
from kvmosaic.prompt import Prompt, PromptEncoder, Segment, SegmentKind
from kvmosaic.prompt.preamble import preamble_rule, sentence_start, stable_end

STABLE = "You answer from the documents."
DOCUMENTS = [{"text": "The ferry goes to Oak Island."}, {"text": "Bellos is a donkey."}]
CLOCK = (
    "{{ '<s>' }}{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "<|system|>\nCutting Knowledge Date: December 2023\nToday Date: {{ date_string }}\n\n"
    "{%- for m in messages %}{{ m['content'] }}</s>{%- endfor %}"
)


def encoder_of(template: str = TEMPLATES["chatml"], **options: object) -> PromptEncoder:
    tokenizer = make_tokenizer(template, "byte_level")
    return PromptEncoder(tokenizer, ChunkCacheConfig(**options), vocab_size=len(tokenizer))


def chat(system: object, question: str = "Where to?") -> list[dict[str, object]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def texts(prompt: Prompt) -> dict[str, str | None]:
    """The text of the segments by kind; documents once."""
    return {str(segment.kind): segment.text for segment in prompt.segments}


@pytest.mark.parametrize(
    "changing",
    [
        "Today is 2026-11-23.",
        "Today is Monday, 23 November 2026.",
        "It is November 23rd in Fenbury.",
        "Heute ist Montag, der 23. November.",
        "今天是2026年11月23日。",
        "오늘은 2026년 11월 23일입니다.",
        "The time is 10:45.",
        "It is 5 pm now.",
        "Now: 10:45:12 UTC.",
        "Session 0f8fad5b-d9cb-469f-a165-70867728950e.",
        "You talk to ada.l+x@fenbury.example.",
        "User id 1700000000 is signed in.",
        "Date: 23/11/26.",
    ],
)
@pytest.mark.parametrize("before", [STABLE, f"{STABLE} Be brief!", f"# Rules\n\n- {STABLE}\n", "你根据文档回答。"])
def test_what_changes_with_the_day_or_the_user_is_the_rest(before: str, changing: str) -> None:
    text = f"{before} {changing} Never guess."
    assert text[: stable_end(text)] == before
    assert stable_end(f"{before}\n{changing}") == len(before) + 1


@pytest.mark.parametrize(
    "text",
    [
        STABLE,
        "Knowledge cutoff: December 2023. Answer in 3 sentences, at most 1,000 words.",
        "Rate from 1 to 10; version 2.5.1; Python 3.12; the May report; chapter 12:a.",
        "See section 4.2.1 and RFC 2119. In 2024 the rules changed.",
    ],
)
def test_what_stays_belongs_to_the_preamble(text: str) -> None:
    assert stable_end(text) == len(text)


@given(st.text(max_size=200), st.data())
def test_a_sentence_begins_before_its_place(text: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(text)))
    assert 0 <= sentence_start(text, place) <= place
    assert "\n" not in text[sentence_start(text, place) : place]


@pytest.mark.parametrize("unit", ["1", "a", "a@", "1:", "1-1-", "-", "a.", "0f8fad5b-", "x. ", " May", "@a"])
def test_a_long_system_text_takes_linear_time(unit: str) -> None:
    stable_end(unit * 1_000)
    # four times as long: sixteen times the time if it were quadratic
    short, long = (least_cpu_seconds(partial(stable_end, unit * number)) for number in (25_000, 100_000))
    assert long < 10 * max(short, 2e-3)


def test_documents_see_what_is_before_a_changing_sentence() -> None:
    encoder = encoder_of()
    prompts = [encoder.encode_chat(chat(f"{STABLE} Today is 2026-11-{day}."), DOCUMENTS) for day in (22, 23)]
    one, other = (prompt.segments for prompt in prompts)
    kinds = [SegmentKind.SYSTEM, SegmentKind.TEXT, SegmentKind.CHUNK, SegmentKind.CHUNK, SegmentKind.QUESTION]
    assert [segment.kind for segment in one] == kinds
    assert one[0] == other[0] and one[0].text.endswith(STABLE)
    assert one[1].text.startswith(" Today is 2026-11-22.") and one[1] != other[1]
    assert one[2:] == other[2:]
    assert (
        prompts[0].text == encoder.encode_chat(chat(f"{STABLE} Today is 2026-11-22."), DOCUMENTS, preamble="all").text
    )


def test_a_prompt_without_documents_is_not_split() -> None:
    encoder = encoder_of()
    assert encoder.encode_chat(chat("Today is 2026-11-23.")).is_plain
    assert encoder.joining().encode_chat(chat("Today is 2026-11-23."), DOCUMENTS).is_plain


@pytest.mark.parametrize(
    ("rule", "rest"),
    [
        ("before:Be", "Be kind. Today is 2026-11-23."),
        ("pattern:K?kind", "kind. Today is 2026-11-23."),
        ("before:nowhere", " Today is 2026-11-23."),
        ("auto", " Today is 2026-11-23."),
        ("all", None),
    ],
)
def test_rules_say_where_a_preamble_ends(rule: str, rest: str | None) -> None:
    system = f"{STABLE} Be kind. Today is 2026-11-23."
    for prompt in (
        encoder_of(preamble=rule).encode(Prompt.from_documents(["x"], "y?", system=system)),
        encoder_of().encode(Prompt.from_documents(["x"], "y?", system=system), preamble=rule),
    ):
        found = texts(prompt)
        assert found.get("text") == rest
        assert (found["system"] or "").endswith(system.removesuffix(rest or ""))
    in_chat = texts(encoder_of().encode_chat(chat(system), DOCUMENTS, preamble=rule)).get("text")
    assert (in_chat is None) == (rest is None) and (in_chat or "").startswith(rest or "")


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 10_000])
def test_a_preamble_of_so_many_tokens(num_tokens: int) -> None:
    encoder = encoder_of(preamble=num_tokens)
    system = f"{STABLE} Today is 2026-11-23."
    given = [
        Prompt.from_documents(["x"], "y?", system=system),
        Prompt.from_tokens(list(range(20)), [[1, 2]], [3]),
    ]
    for prompt in [*map(encoder.encode, given), encoder.encode_chat(chat(system), DOCUMENTS)]:
        before = [segment for segment in prompt.segments if segment.kind in (SegmentKind.SYSTEM, SegmentKind.TEXT)]
        if num_tokens in (1, 5):
            assert [segment.kind for segment in before] == [SegmentKind.SYSTEM, SegmentKind.TEXT]
            assert before[0].num_tokens == num_tokens
        else:
            assert [segment.kind for segment in before] == [SegmentKind.TEXT if num_tokens == 0 else SegmentKind.SYSTEM]
    whole, split = encoder_of().encode(given[1]), encoder.encode(given[1])
    assert whole.joined().segments[0].token_ids == split.joined().segments[0].token_ids


@pytest.mark.parametrize(
    ("parts", "rest"),
    [
        ((("Rules of 2026-11-23.", True), ("Today is Monday.", False)), "\nToday is Monday."),
        ((("Rules of 2026-11-23.", True),), None),
        ((("One.", False), ("Two.", True), ("Three.", False)), "\nThree."),
    ],
)
def test_a_mark_ends_the_preamble_before_any_rule(parts: tuple[tuple[str, bool], ...], rest: str | None) -> None:
    content = [
        {"type": "text", "text": text, **({"cache_control": {"type": "ephemeral"}} if marked else {})}
        for text, marked in parts
    ]
    for rule in ("auto", "all", 3, "before:e"):
        found = texts(encoder_of(preamble=rule).encode_chat(chat(content), DOCUMENTS)).get("text")
        if rest is None and rule == 3:
            continue  # so many tokens of the whole
        assert (found is None) == (rest is None)
        assert found is None or found.startswith(rest)


def test_what_a_template_writes_from_its_clock_is_the_rest() -> None:
    encoder = encoder_of(CLOCK)
    prompt = encoder.encode_chat(chat(STABLE), DOCUMENTS)
    found = texts(prompt)
    assert found["system"].endswith("Cutting Knowledge Date: December 2023\n")
    assert found["text"].startswith(datetime.now().strftime("Today Date: %d %b %Y"))
    assert "text" not in texts(encoder.encode_chat(chat(STABLE), DOCUMENTS, date_string="26 Jul 2024"))
    assert "text" not in texts(encoder.encode_chat(chat(STABLE), DOCUMENTS, preamble="all"))


def test_a_text_of_the_callers_own_is_the_rest() -> None:
    segments = (
        Segment(SegmentKind.SYSTEM, text="Rules of 2026-11-23."),
        Segment(SegmentKind.TEXT, text=" Be kind."),
        Segment(SegmentKind.CHUNK, text="x"),
        Segment(SegmentKind.QUESTION, text="y?"),
    )
    found = texts(encoder_of().encode(Prompt(segments)))
    assert found["text"] == " Be kind." and found["system"] == "Rules of 2026-11-23."


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("sometimes", "choose 'auto', 'all'"),
        (True, "choose 'auto'"),
        (None, "choose 'auto'"),
        ("-1", "choose 'auto'"),
        ("9" * 30, "choose 'auto'"),
        ("before:", "choose 'auto'"),
        ("before:" + "x" * 1_000, "at most 1000 characters"),
        ("pattern:(", "cannot be read"),
        ("pattern:x*", "matches an empty text"),
    ],
)
def test_rules_that_cannot_be(rule: object, told: str) -> None:
    with pytest.raises(InvalidPreamble, match=told):
        preamble_rule(rule)


def test_a_catastrophic_pattern_is_stopped() -> None:
    encoder = encoder_of(preamble="pattern:(a|aa)+$|(a*)*b")
    begin = time.thread_time()
    with pytest.raises(InvalidPreamble, match="takes more than"):
        encoder.encode(Prompt.from_documents(["x"], "y?", system="a" * 5_000 + "c"))
    assert time.thread_time() - begin < 5
