"""The index of stored texts against a search that compares every text at every place."""

from __future__ import annotations

import random
import string
import sys
import threading
import time

from hypothesis import given
from hypothesis import strategies as st
from support.cpu_time import least_cpu_seconds
from support.target import slowness

from kvmosaic.documents import DocumentDraft, DocumentStore
from kvmosaic.documents.rows import ANCHOR_CHARACTERS, MAX_SAME_ANCHOR, TextIndex

WORDS = ["tower ", "bridge ", "mill ", "Ürzig ", "of ", "the ", "\N{GRINNING FACE} ", "a", "aa"]
texts = st.lists(st.sampled_from(WORDS), min_size=8, max_size=24).map("".join)


def naive(stored: dict[str, str], text: str) -> list[tuple[int, int]]:
    """First the leftmost, of those the longest, without overlap."""
    found, end = [], 0
    while end < len(text):
        here = [len(each) for each in stored.values() if len(each) >= ANCHOR_CHARACTERS and text.startswith(each, end)]
        if here:
            found.append((end, end + max(here)))
        end += max(here, default=1)
    return found


@given(st.lists(texts, min_size=1, max_size=8, unique=True), st.data())
def test_what_is_found_is_what_a_slow_search_finds(stored, data):
    index = TextIndex()
    for number, text in enumerate(stored):
        index.add(str(number), text)
    kept = {str(number): text for number, text in enumerate(stored)}
    for number in data.draw(st.lists(st.sampled_from(sorted(kept)), max_size=3, unique=True)):
        index.remove(number)
        del kept[number]
    prompt = "".join(data.draw(st.lists(st.sampled_from([*stored, *WORDS]), max_size=12)))
    found = index.find(prompt)
    assert [(start, end) for start, end, _ in found] == naive(kept, prompt)
    assert all(prompt[start:end] == kept[number] for start, end, number in found)


def test_texts_are_not_kept() -> None:
    index = TextIndex()
    index.add("long", "😀" * 2**15)
    assert sum(map(sys.getsizeof, index._texts["long"])) < 600
    assert index.find("x" + "😀" * 2**15) == [(1, 2**15 + 1, "long")]


def test_a_replaced_text_is_not_found_any_more():
    index = TextIndex()
    index.add("a", "x" * 40 + "tower")
    index.add("a", "y" * 40 + "bridge")
    assert index.find("x" * 40 + "tower") == []
    assert index.find("y" * 40 + "bridge") == [(0, 46, "a")]
    assert len(index) == 1


def test_texts_with_one_beginning_get_other_anchors():
    head, index = "Confidential. Property of the town of Fenbury. ", TextIndex()
    stored = {str(n): head + f"Paragraph {n}: " + "".join(random.Random(n).choices(string.ascii_letters, k=99))
              for n in range(500)}  # fmt: skip
    for number, text in stored.items():
        index.add(number, text)
    assert len(index) == 500
    for number, text in stored.items():
        assert index.find(f"Say: {text}!") == [(5, 5 + len(text), number)]


def test_texts_that_are_alike_everywhere_are_bounded():
    index = TextIndex()
    for number in range(1_000):
        index.add(str(number), "a" * (40 + number))
    assert len(index) == MAX_SAME_ANCHOR
    assert least_cpu_seconds(lambda: index.find("a" * 1_000_000)) < 2 * slowness()


def test_a_long_prompt_is_searched_for_100_000_texts_in_5_ms():
    draws = random.Random(1)
    words = ["".join(draws.choices(string.ascii_lowercase, k=draws.randint(2, 9))) for _ in range(5_000)]
    stored = [" ".join(draws.choices(words, k=60)) for _ in range(100_000)]
    index = TextIndex()
    for number, text in enumerate(stored):
        index.add(str(number), text)
    chosen = draws.sample(range(100_000), 250)
    prompt = "".join(" ".join(draws.choices(words, k=5)) + f" {stored[number]} " for number in chosen)[:100_000]
    seconds = []
    for _ in range(7):
        began = time.thread_time()
        found = index.find(prompt)
        seconds.append(time.thread_time() - began)
    assert len(found) >= 200 and [number for _, _, number in found] == [str(number) for number in chosen[: len(found)]]
    print(f"{sorted(seconds)[3] * 1e3:.2f} ms of CPU for {len(prompt)} characters and {len(index)} texts")
    assert sorted(seconds)[3] < 5e-3 * slowness()


def test_a_store_finds_its_tenants_documents_and_counts_hits():
    now = [0.0]
    store = DocumentStore(clock=lambda: now[0])
    tower, mill = "The tower of Fenbury is forty metres high.", "The mill of Tolbury grinds oats for the town."
    store.create("ada", DocumentDraft(tower), "tower")
    assert store.search("ada", f"Context: {tower}") == [(9, 9 + len(tower), store.get("ada", "tower").content)]
    assert store.get("ada", "tower").hits == 1
    assert store.search("bob", tower) == []
    store.create("ada", DocumentDraft(mill, ttl_seconds=60), "mill")
    assert [found.id for _, _, found in store.search("ada", f"{mill} {tower}")] == ["mill", "tower"]
    now[0] = 61.0
    assert [found.id for _, _, found in store.search("ada", f"{mill} {tower}")] == ["tower"]
    store.delete("ada", "tower")
    assert store.search("ada", tower) == []


def test_documents_may_change_while_a_long_text_is_searched(monkeypatch):
    """A writer does not wait for the search, and what was replaced meanwhile is not found under its new text."""
    store, searches, may_go_on = DocumentStore(), threading.Event(), threading.Event()
    texts = {name: f"The {name} of Fenbury is older than the town." for name in ("tower", "mill", "bridge")}
    for name, text in texts.items():
        store.create("ada", DocumentDraft(text), name)
    hashed = TextIndex._window_hashes

    def slow(index, text):
        searches.set()
        assert may_go_on.wait(300)
        return hashed(index, text)

    monkeypatch.setattr(TextIndex, "_window_hashes", slow)
    found = []
    search = threading.Thread(target=lambda: found.extend(store.search("ada", " ".join(texts.values()))), daemon=True)
    search.start()
    assert searches.wait(60)

    def change():
        store.put("ada", "tower", DocumentDraft("The tower burned down, and nothing of it is left."))
        store.delete("ada", "mill")
        store.create("ada", DocumentDraft("The windmill of Tolbury grinds oats, and nothing else."), "windmill")

    changes = threading.Thread(target=change, daemon=True)
    changes.start()
    changes.join(60)
    was_blocked = changes.is_alive()
    may_go_on.set()
    changes.join(60)
    search.join(60)
    assert not was_blocked
    assert [document.id for _, _, document in found] == ["bridge"]
