"""Advice on lost reuse: the reasons of misses, and what is said where reuse is lost again and again."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.asking import chat
from support.server import RunningServer

from kvmosaic import LLM, ChunkCacheConfig, RequestOutput, SamplingParams
from kvmosaic.advice import MAX_TENANTS, ReuseAdvisor
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.prompt.companions import are_short
from kvmosaic.prompt.text_pieces import common_length
from kvmosaic.sampling.reuse import ReuseReport, SegmentReuse

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
TOWER = "The tower of Fenbury is forty metres high, and older than the town."
MILL = "The mill of Tolbury grinds oats, and belongs to the Denwick family."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM("reader", chunk_cache_config=ChunkCacheConfig(repair="none"))


def asked(system: str = "Answer.", question: str = "How high is it?") -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def ask(llm: LLM, *texts: str, said: list[dict[str, str]] | None = None, **how: Any) -> RequestOutput:
    documents = [{"id": f"d{number}", "text": text} for number, text in enumerate(texts)]
    (output,) = llm.chat(said or asked(), GREEDY, documents=documents or None, **how)
    return output


def misses(output: RequestOutput) -> list[str | None]:
    return [segment.miss for segment in output.reuse.segments if segment.kind == "chunk"]


def test_a_first_document_was_never_seen_and_a_hit_has_no_reason(llm: LLM) -> None:
    assert misses(ask(llm, TOWER)) == ["never_seen"]
    output = ask(llm, TOWER)
    assert misses(output) == [None] and output.reuse.advice == ()


def test_a_changing_system_text_is_told_with_the_setting_that_mends_it() -> None:
    system = "Answer the question from the documents. You talk to {}."
    names = ["Ada", "Bob", "Cyd", "Dan", "Eve"]
    llm = LLM("reader", chunk_cache_config=ChunkCacheConfig(preamble="all"))
    outputs = [ask(llm, TOWER, said=asked(system.format(name))) for name in names]
    assert [misses(output)[0] for output in outputs] == ["never_seen"] + ["other_system_text"] * 4
    assert [bool(output.reuse.advice) for output in outputs] == [False, False, False, True, True]
    (told,) = outputs[-1].reuse.advice
    assert "differ in 100% of requests" in told and "set preamble=" in told
    assert f"lost reuse: {told}" in str(outputs[-1].reuse)
    assert llm.engine.advisor.lost["system_text"] == 4 * outputs[0].reuse.segments[-2].num_tokens

    num_tokens = int(told.partition("set preamble=")[2].partition(",")[0])
    mended = LLM("reader", chunk_cache_config=ChunkCacheConfig(preamble=num_tokens))
    later = [ask(mended, TOWER, said=asked(system.format(name))) for name in names]
    assert [misses(output)[0] for output in later] == ["never_seen"] + [None] * 4
    assert not any(mended.engine.advisor.lost.values())


def test_a_rare_system_text_of_another_kind_does_not_change_the_advice() -> None:
    system = "Answer the question from the documents. You talk to {}."
    told = [system.format(name) for name in ("Ada", "Bob", "Cyd", "Dan")]
    advised = []
    for others in ([], ["Translate."]):
        llm = LLM("reader", chunk_cache_config=ChunkCacheConfig(preamble="all"))
        outputs = [ask(llm, TOWER, said=asked(text)) for text in [*told[:2], *others, *told[2:], system.format("Eve")]]
        advised.append(outputs[-1].reuse.advice[0].partition("set ")[2])
    assert advised[0].startswith("preamble=") and advised[1] == advised[0]


def test_system_texts_with_nothing_in_common_get_no_preamble() -> None:
    llm = LLM("reader", chunk_cache_config=ChunkCacheConfig(preamble="all"))
    outputs = [ask(llm, TOWER, said=asked(f"{name}, you answer.")) for name in ("Ada", "Bob", "Cyd", "Dan", "Eve")]
    assert "put what changes at their end" in outputs[-1].reuse.advice[0]


def test_eviction_is_told() -> None:
    # two documents at most; in float32, since "auto" depends on the CPU
    llm = LLM("reader", dtype="float32", chunk_cache_config=ChunkCacheConfig(chunk_cache_size="2MiB"))
    texts = [f"{TOWER} {MILL} Number {word} of the archive is kept in the hall." * 3 for word in "abcdefghijklmnop"]
    for _ in range(2):
        outputs = [ask(llm, text) for text in texts]
    assert misses(outputs[-1]) == ["evicted"]
    assert "a larger chunk_cache_size" in outputs[-1].reuse.advice[0]


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda n: MILL.replace(" of ", " of" + " " * (n + 1)), "white_space"),
        (lambda n: f"Result {n} of 9, score 0.{n}7: {MILL}", "counter"),
    ],
)
def test_texts_that_differ_in_nothing_but_white_space_or_numbers(write: Any, reason: str) -> None:
    llm = LLM("reader")
    outputs = [ask(llm, write(number)) for number in range(5)]
    assert [misses(output)[0] for output in outputs] == ["never_seen"] + [reason] * 4
    assert reason.split("_")[0] in outputs[-1].reuse.advice[0] or "numbers" in outputs[-1].reuse.advice[0]


def test_a_changed_text_is_told_with_the_place_of_the_difference(llm: LLM) -> None:
    ask(llm, "The bridge was built of oak, and burned down long ago.", salt="changed")
    output = ask(llm, "The bridge was built of stone, and burned down long ago.", salt="changed")
    (document,) = [segment for segment in output.reuse.segments if segment.kind == "chunk"]
    assert document.miss == "changed_text"
    assert "its text changed at character " in document.note and document.note.endswith(": 'stone, and burned down l'")


def test_a_text_that_changes_near_its_end_is_a_changed_text(llm: LLM) -> None:
    for ending in ("oak", "stone"):
        output = ask(llm, "The bridge burned down long ago. " * 140 + ending, salt="changed at the end")
    (document,) = [segment for segment in output.reuse.segments if segment.kind == "chunk"]
    assert (document.miss, document.note.endswith("its text changed after character 4096")) == ("changed_text", True)


def test_histories_of_many_long_documents_stay_small() -> None:
    """Of one tenant: what is kept does not grow with the number or length of documents in a request."""
    sizes = list[int]()
    for num_chunks, length in ((64, 2_000), (512, 2_000), (512, 60_000)):
        advisor = ReuseAdvisor()
        tracemalloc.start()
        for number in range(2):
            chunks = (
                Segment(SegmentKind.CHUNK, (1, 2), f"{number} {index}" + "\u2603" * length, name=f"{number} {index}")
                for index in range(num_chunks)
            )
            reports = (SegmentReuse("chunk", 2, "computed", miss="never_seen") for _ in range(num_chunks))
            prompt = Prompt((*chunks, Segment(SegmentKind.QUESTION, (3,), "?")))
            advisor.explain(prompt, ReuseReport((*reports, SegmentReuse("question", 1, "computed"))))
        del prompt
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert max(sizes) < 3 * 2**20


def test_another_order_in_a_conversation_is_told() -> None:
    llm = LLM("reader", chunk_cache_config=ChunkCacheConfig(position_strategy="sequential", repair="none"))
    for number in range(4):
        question = f"How high is {'abcd'[number]}?"
        first = ask(llm, TOWER, MILL, said=asked(question=question))
        later = [
            *asked(question=question),
            {"role": "assistant", "content": first.outputs[0].text},
            {"role": "user", "content": "And who owns the mill?"},
        ]
        documents = [{"id": "d1", "text": MILL}, {"id": "d0", "text": TOWER}]
        (output,) = llm.chat(later, GREEDY, documents=documents)
    assert llm.engine.advisor.lost["order"] > 0
    assert "send them in the same order" in output.reuse.advice[0]


def test_conversations_that_began_elsewhere_are_told() -> None:
    llm = LLM("reader")
    for number in range(3):
        later = [
            *asked(question=f"{'abc'[number]} is the first question that was asked before?"),
            {"role": "assistant", "content": "That was answered by another server."},
            {"role": "user", "content": "And how high is it?"},
        ]
        output = ask(llm, TOWER, said=later)
    assert "another replica" in output.reuse.advice[0]


def test_documents_in_messages_are_told_in_the_first_reply_and_when_they_cost() -> None:
    llm, texts = LLM("reader"), [TOWER, MILL, "The Silver Heron was built in 1874. Its cargo is timber."]
    told = []
    for number in range(4):
        order = texts[number % 3 :] + texts[: number % 3]
        sources = "\n".join(f"[{place}] {text}" for place, text in enumerate(order))
        said = asked(question=f"Read:\n{sources}\n\nHow high is {number}?", system=f"Answer {number}.")
        told.append(ask(llm, said=said).reuse.advice)
    assert told[0] == (
        "3 documents seem to be part of the text (pattern numbered): with find_documents='patterns', or in the field "
        "documents, they are computed once",
    )
    assert told[1] == told[0], "once more where it first costs"
    other = "\n".join(f"Source: {place}.txt\n{text}" for place, text in enumerate(texts))
    assert "pattern headed" in ask(llm, said=asked(question=f"{other}\n\nHow high?")).reuse.advice[0], "of each form"
    assert "tokens of documents in the text of messages computed again" in told[-1][0]
    assert llm.engine.advisor.lost["unmarked"] > 100
    assert not llm.engine.placer.reads_in_full([10, 10]), "made for reading documents apart"


WRITTEN = {
    "bullets": lambda texts: "Context:\n" + "\n".join(f"- {text}" for text in texts),
    "parts": lambda texts: [{"type": "text", "text": text} for text in texts],
}


@pytest.mark.parametrize("form", WRITTEN)
def test_documents_in_other_forms_are_told_in_the_first_reply_too(form: str) -> None:
    llm, texts = LLM("reader"), [2 * TOWER, 2 * MILL, 2 * "The Silver Heron was built in 1874. Its cargo is timber."]
    told = []
    for number in range(4):
        content = WRITTEN[form](texts[number % 3 :] + texts[: number % 3])  # type: ignore[operator]
        content = (
            f"{content}\n\nWhy {number}?" if isinstance(content, str) else [*content, content[0] | {"text": "Why?"}]
        )
        said = [*asked(system=f"Answer {number}.")[:1], {"role": "user", "content": content}]
        told.append(ask(llm, said=said).reuse.advice)
    assert len(told[0]) == 1 and "in the field documents" in told[0][0] and "computed once" in told[0][0]
    assert "computed again" in told[-1][0] and llm.engine.advisor.lost["unmarked"] > 100


def test_no_advice_is_given_for_documents_that_would_be_read_in_full() -> None:
    text = "\n".join(f"[{number}] {2 * TOWER}" for number in range(3))
    prompt = Prompt((Segment(SegmentKind.PLAIN, token_ids=(1,) * 200, text=text),))
    report, advisor = ReuseReport((SegmentReuse("plain", 200, "computed"),)), ReuseAdvisor(are_short)
    assert advisor.explain(prompt, report).advice == ()
    advisor = ReuseAdvisor(lambda lengths: are_short([2 * each for each in lengths]))
    assert "pattern numbered" in advisor.explain(prompt, report).advice[0]


def test_a_long_question_of_one_text_is_no_reason_for_advice() -> None:
    text = f"Summarize this:\n{8 * TOWER}"
    prompt = Prompt((Segment(SegmentKind.PLAIN, token_ids=(1,) * 200, text=text),))
    assert ReuseAdvisor().explain(prompt, ReuseReport((SegmentReuse("plain", 200, "computed"),))).advice == ()


def test_tenants_have_histories_of_their_own_and_there_are_not_too_many() -> None:
    advisor = ReuseAdvisor()
    report = ReuseReport(
        (
            SegmentReuse("chunk", 90, "computed", miss="evicted"),
            SegmentReuse("question", 10, "computed"),
        )
    )
    told = {}
    for number in range(MAX_TENANTS + 10):
        prompt = Prompt.from_tokens(None, [[1] * 90], [2] * 10)
        prompt = type(prompt)(prompt.segments, tenant=f"t{number}")
        told[number] = [advisor.explain(prompt, report).advice for _ in range(3)]
    assert all([bool(each) for each in every] == [False, False, True] for every in told.values())
    assert len(advisor.advice) == MAX_TENANTS == len(advisor._tenants)
    assert advisor.lost["evicted"] == 3 * 90 * (MAX_TENANTS + 10)


@given(st.text("ab", max_size=30), st.text("ab", max_size=30))
def test_common_length_is_that_of_a_loop(one: str, other: str) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_length(one, other) == expected


def test_over_http(caplog: pytest.LogCaptureFixture) -> None:
    documents = [{"id": "tower", "text": TOWER}]
    with (
        caplog.at_level(logging.WARNING, "kvmosaic.advice"),
        RunningServer(preamble="all") as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http,
    ):
        replies = [
            chat(http, messages=asked(f"You talk to {name}, and answer briefly."), documents=documents)
            for name in ("Ada", "Bob", "Cyd", "Dan", "Eve", "Fay")
        ]
        metrics = http.get("/metrics").text
        server.call(lambda: None)
        advice = server.services.llm.engine.advisor.advice
    reports = [reply["kvmosaic"] for reply in replies]
    assert [report["documents"][0]["miss"] for report in reports] == ["never_seen"] + ["other_system_text"] * 5
    assert reports[0]["advice"] == [] and "set preamble=" in reports[-1]["advice"][0]
    line = next(line for line in metrics.splitlines() if 'reason="system_text"' in line)
    assert line.startswith("kvmosaic:lost_reuse_tokens_total{")
    assert float(line.split()[-1]) == 5 * reports[0]["documents"][0]["tokens"]
    assert [record.getMessage().count("lost reuse") for record in caplog.records] == [1]
    assert next(iter(advice.values())) == tuple(reports[-1]["advice"])


def test_an_equal_text_under_another_salt_is_no_white_space(llm: LLM) -> None:
    for salt in ("one", "two"):
        output = ask(llm, "The harbour of Halport freezes in every winter.", salt=salt)
        assert misses(output) == ["never_seen"]
