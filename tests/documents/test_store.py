"""The document store: versions, lists, times to live and limits, with a clock that stands still."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.documents import DocumentDraft, DocumentStore, Match, StoredDocument, StoreLimits, StoreUsage, shown_name
from kvmosaic.documents.stored import TextHead
from kvmosaic.errors import (
    DocumentChanged,
    DocumentExists,
    DocumentStoreFull,
    DocumentTooLarge,
    InvalidDocument,
    UnknownDocument,
)
from kvmosaic.prompt import read_documents
from kvmosaic.prompt.document import REFUSED_ID_PATTERN, VERBS, check_id


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_store(**limits: int) -> tuple[DocumentStore, Clock]:
    clock = Clock()
    return DocumentStore(version_seconds=0, limits=StoreLimits(**limits), clock=clock), clock


def head(document: StoredDocument) -> StoredDocument:
    """The document without its text, as lists have it."""
    content = document.content
    return replace(document, content=TextHead("", content.title, content.id, content.priority, label=content.label))


def text_of(store: DocumentStore, tenant: str, document_id: str) -> str:
    return store.resolve(tenant, [(document_id, None)])[0].text


def labels_of(store: DocumentStore) -> list[str]:
    return [superseded.label for superseded in store.take_superseded()]


def test_created_document_is_read_back_with_its_text_stripped() -> None:
    store, clock = make_store()
    made = store.create(
        "a", DocumentDraft("  The ferry runs at 8. \n", " Ferry ", {"lang": "en"}, ttl_seconds=60), "ferry"
    )
    assert store.get("a", "ferry") == made
    assert (made.version, made.content.text, made.content.title) == (1, "The ferry runs at 8.", "Ferry")
    assert (made.created_at, made.updated_at, made.expires_at) == (clock.now, clock.now, clock.now + 60)
    assert made.num_bytes == len("The ferry runs at 8.Ferry")
    assert store.usage("a") == StoreUsage(1, made.num_bytes, last_change=1)


def test_documents_without_id_get_ids_that_can_stand_in_an_address() -> None:
    store, _ = make_store()
    made = [store.create("a", DocumentDraft("text")).id for _ in range(50)]
    assert len(set(made)) == 50
    assert all(check_id(document_id) == document_id for document_id in made)


def test_tenants_do_not_see_each_other() -> None:
    store, _ = make_store()
    store.create("a", DocumentDraft("one"), "x")
    store.create("b", DocumentDraft("two"), "x")
    assert text_of(store, "a", "x") == "one"
    assert text_of(store, "b", "x") == "two"
    store.delete("a", "x")
    assert text_of(store, "b", "x") == "two"
    with pytest.raises(UnknownDocument, match="'x'"):
        store.get("a", "x")
    assert [document.id for document in store.page("b").documents] == ["x"]


def test_id_that_is_taken_is_refused_and_the_document_stays() -> None:
    store, _ = make_store()
    store.create("a", DocumentDraft("one"), "x")
    with pytest.raises(DocumentExists, match="PUT"):
        store.create("a", DocumentDraft("two"), "x")
    assert text_of(store, "a", "x") == "one"


@pytest.mark.parametrize(
    "document_id", ["", ".", "..", "a/../b", "./a", " a", "a ", "a\n", "a\x00b", "a\nb", "x" * 257, "~1", "a\ud800"]
)
def test_ids_that_no_address_can_hold_are_refused(document_id: str) -> None:
    store, _ = make_store()
    with pytest.raises(InvalidDocument):
        store.create("a", DocumentDraft("text"), document_id)


@pytest.mark.parametrize("verb", VERBS)
def test_ids_may_hold_colons_but_not_end_in_a_verb(verb: str) -> None:
    for good in (
        f"{verb}",
        f"{verb}:x",
        f"a:{verb}er",
        f"a:{verb}.",
        f"a:{verb.upper()}",
        "urn:isbn:0451",
        "x" * 256,
        "docs/a.md",
        "my file.pdf",
        "日本語",
        ".a",
        "a~",
    ):
        assert check_id(good) == good
    for bad in (f"a:{verb}", f":{verb}", f"a:b:{verb}", f"a:{verb}:{verb}"):
        with pytest.raises(InvalidDocument, match=verb):
            check_id(bad)


def test_replacing_counts_versions_and_keeps_hits_place_and_pin() -> None:
    store, clock = make_store()
    first = store.create("a", DocumentDraft("one", pinned=True, metadata={"k": "v"}), "x")
    store.resolve("a", [("x", None)])
    clock.now += 5
    second, is_new = store.put("a", "x", DocumentDraft("two"))
    assert not is_new
    assert (second.version, second.number, second.hits, second.pinned) == (2, first.number, 1, True)
    assert (second.created_at, second.updated_at, second.metadata) == (1_000, 1_005, {})
    assert first.content.text == "one", "who holds the old text keeps it"
    assert not store.put("a", "x", DocumentDraft("two", pinned=False))[0].pinned


def test_replaced_text_has_another_label_and_its_old_one_is_superseded_once() -> None:
    store, _ = make_store()
    first = store.create("a", DocumentDraft("one"), "x").content
    second = store.put("a", "x", DocumentDraft("two"))[0].content
    third = store.put("a", "x", DocumentDraft("one"))[0].content
    assert len({first.label, second.label, third.label}) == 3
    assert labels_of(store) == [first.label, second.label]
    assert labels_of(store) == []
    assert store.owners("a", [third.label]).get(third.label) == head(store.get("a", "x"))
    assert store.owners("a", [f"{third.label} (2/3)"]).get(f"{third.label} (2/3)") == head(store.get("a", "x"))
    for name in (first.label, "x", "x (1/2)", f"{third.label} more"):
        assert not store.owners("a", [name])
    assert not store.owners("b", [third.label])


def test_replacing_a_text_by_itself_keeps_its_chunks() -> None:
    store, _ = make_store()
    first = store.create("a", DocumentDraft("one", "title"), "x")
    second, _ = store.put("a", "x", DocumentDraft(" one ", "title", {"new": "pair"}))
    assert second.version == 2 and second.content == first.content
    assert labels_of(store) == []


def test_deleted_and_recreated_document_shares_no_label_and_no_version() -> None:
    store, _ = make_store()
    first = store.create("a", DocumentDraft("one"), "x")
    store.delete("a", "x")
    second = store.create("a", DocumentDraft("one"), "x")
    assert labels_of(store) == [first.content.label] != [second.content.label]
    assert second.version == 2, "an ETag of the deleted document must not fit the new one"
    assert second.hits == 0


def test_people_are_shown_the_id_and_the_part_but_not_the_label() -> None:
    store, _ = make_store()
    label = store.create("a", DocumentDraft("one"), "urn:x").content.label
    assert label != "urn:x" and shown_name(label) == "urn:x"
    assert shown_name(f"{label} (1/12)") == "urn:x (1/12)"
    for other in ("x", "issue #12", "x [stored]", "x [stored 1] ", "[stored 1]"):
        assert shown_name(other) == other


def test_stored_text_names_its_chunk_by_label_and_shows_the_template_its_id() -> None:
    store, _ = make_store()
    store.create("a", DocumentDraft("one", "title"), "x")
    (document,) = read_documents(store.resolve("a", [("x", None)]), 1)
    assert (document.id, document.title, document.text) == ("x", "title", "one")
    assert document.name == store.get("a", "x").content.label


def test_change_for_another_version_is_refused_and_nothing_changes() -> None:
    store, _ = make_store()
    store.create("a", DocumentDraft("one"), "x")
    store.put("a", "x", DocumentDraft("two"), Match.from_header('"1"'))
    for header in ('"1"', 'W/"2"', "2", '""', '"x"', "", '"99999999999999999999"'):
        with pytest.raises(DocumentChanged, match="version 2"):
            store.put("a", "x", DocumentDraft("three"), Match.from_header(header))
        with pytest.raises(DocumentChanged):
            store.delete("a", "x", Match.from_header(header))
    assert text_of(store, "a", "x") == "two"
    store.put("a", "x", DocumentDraft("three"), Match.from_header('"7", "2"'))
    store.put("a", "x", DocumentDraft("four"), Match.from_header("*"))
    assert store.get("a", "x").version == 4
    with pytest.raises(DocumentChanged, match="not stored"):
        store.put("a", "y", DocumentDraft("new"), Match.from_header("*"))


def test_document_expires_at_access_and_in_the_sweep() -> None:
    store, clock = make_store()
    first = store.create("a", DocumentDraft("one", ttl_seconds=10), "x")
    second = store.create("b", DocumentDraft("two", ttl_seconds=20), "y")
    store.create("b", DocumentDraft("three"), "z")
    clock.now += 9.9
    assert store.get("a", "x") == first
    clock.now += 0.1
    with pytest.raises(UnknownDocument):
        store.resolve("a", [("x", None)])
    assert (store.expire(), labels_of(store)) == (1, [first.content.label])
    clock.now += 10
    assert (store.expire(), labels_of(store)) == (1, [second.content.label])
    assert [document.id for document in store.documents("b")] == ["z"]
    assert store.create("a", DocumentDraft("again"), "x").version == 2


def test_expired_documents_are_not_listed_and_make_room() -> None:
    store, clock = make_store(max_documents=2)
    store.create("a", DocumentDraft("one", ttl_seconds=10), "x")
    store.create("a", DocumentDraft("two", ttl_seconds=99), "y")
    with pytest.raises(DocumentStoreFull):
        store.create("a", DocumentDraft("three"))
    clock.now += 10
    assert [document.id for document in store.page("a").documents] == ["y"]
    store.create("a", DocumentDraft("three"))


def test_hit_starts_the_time_anew_only_if_asked_for() -> None:
    store, clock = make_store()
    store.create("a", DocumentDraft("one", ttl_seconds=10, refresh_ttl_on_hit=True), "kept")
    store.create("a", DocumentDraft("two", ttl_seconds=10), "lost")
    assert text_of(store, "a", "lost") == "two"
    for _ in range(3):
        clock.now += 6
        assert text_of(store, "a", "kept") == "one"
        store.expire()
        store.check_invariants()
    assert text_of(store, "a", "kept") == "one"
    assert store.get("a", "kept").hits == 4 and store.get("a", "kept").last_used_at == clock.now
    with pytest.raises(UnknownDocument):
        store.get("a", "lost")


def test_looking_at_a_document_is_no_hit() -> None:
    store, _ = make_store()
    store.create("a", DocumentDraft("one"), "x")
    store.get("a", "x"), store.page("a"), store.documents("a")
    assert store.get("a", "x").hits == 0


def test_pinned_document_does_not_expire_and_begins_anew_when_unpinned() -> None:
    store, clock = make_store()
    store.create("a", DocumentDraft("one", ttl_seconds=10), "x")
    assert store.set_pinned("a", "x", True).expires_at is None
    clock.now += 1_000
    assert store.expire() == 0
    assert store.set_pinned("a", "x", False).expires_at == clock.now + 10
    clock.now += 10
    assert store.expire() == 1


def test_replacing_starts_the_time_anew() -> None:
    store, clock = make_store()
    store.create("a", DocumentDraft("one", ttl_seconds=10), "x")
    clock.now += 9
    store.put("a", "x", DocumentDraft("two", ttl_seconds=10))
    clock.now += 9
    assert store.expire() == 0
    assert store.put("a", "x", DocumentDraft("two", ttl_seconds=None))[0].expires_at is None
    clock.now += 1e9
    assert store.expire() == 0


def test_draft_outside_its_limits_is_refused() -> None:
    for wrong in (
        {"text": "  "},
        {"text": "x", "title": "t" * 5_000},
        {"text": "x", "ttl_seconds": 0},
        {"text": "x", "ttl_seconds": 31_536_001},
        {"text": "x", "metadata": {str(number): "" for number in range(17)}},
        {"text": "x", "metadata": {"": "v"}},
        {"text": "x", "metadata": {"k" * 65: "v"}},
        {"text": "x", "metadata": {"k": "v" * 513}},
        {"text": "x", "metadata": {"k": "\ud800"}},
        {"text": "x\ud800"},
    ):
        with pytest.raises(InvalidDocument):
            DocumentDraft(**wrong)  # type: ignore[arg-type]


def test_store_refuses_what_a_tenant_may_not_store_and_keeps_what_it_had() -> None:
    store, _ = make_store(max_documents=3, max_bytes=20, max_characters=15)
    with pytest.raises(DocumentTooLarge, match="16 characters; at most 15"):
        store.create("a", DocumentDraft("x" * 16))
    with pytest.raises(DocumentTooLarge, match="24 bytes"):
        store.create("a", DocumentDraft("ä" * 12))
    store.create("a", DocumentDraft("x" * 15), "x")
    with pytest.raises(DocumentStoreFull, match="21 bytes"):
        store.create("a", DocumentDraft("y" * 6), "y")
    assert [document.id for document in store.documents("a")] == ["x"]
    store.create("b", DocumentDraft("y" * 6), "y")
    store.put("a", "x", DocumentDraft("ä"))
    store.create("a", DocumentDraft("y"))
    with pytest.raises(DocumentStoreFull, match="20 bytes more"):
        store.put("a", "x", DocumentDraft("z" * 15, "t" * 5))
    assert text_of(store, "a", "x") == "ä"
    store.create("a", DocumentDraft("y"))
    with pytest.raises(DocumentStoreFull, match="3 documents"):
        store.create("a", DocumentDraft("y"))
    store.put("a", "x", DocumentDraft("w"))
    store.check_invariants()


def read_list(store: DocumentStore, limit: int, order: str, *, by_cursor: bool) -> list[str]:
    seen: list[str] = []
    after = None
    for _ in range(20):
        part = store.page("a", limit=limit, after=after, order=order)  # type: ignore[arg-type]
        seen += [document.id for document in part.documents]
        if not part.has_more:
            return seen
        after = part.next_after if by_cursor else seen[-1]
    raise AssertionError(f"the list does not end: {seen}")


def test_list_is_read_in_parts_in_both_orders() -> None:
    store, _ = make_store()
    for number in range(7):
        store.create("a", DocumentDraft("text"), f"d{number}")
    names = [f"d{number}" for number in range(7)]
    for limit in (1, 2, 3, 6, 7, 8):
        for by_cursor in (True, False):
            assert read_list(store, limit, "asc", by_cursor=by_cursor) == names
            assert read_list(store, limit, "desc", by_cursor=by_cursor) == names[::-1]
    assert store.page("b").documents == () and store.page("b").next_after is None


def test_list_goes_on_behind_a_deleted_document() -> None:
    store, _ = make_store()
    for number in range(6):
        store.create("a", DocumentDraft("text"), f"d{number}")
    part = store.page("a", limit=2, order="asc")
    for document_id in ("d0", "d1", "d2"):
        store.delete("a", document_id)
    for after in ("d1", part.next_after):
        assert [each.id for each in store.page("a", after=after, order="asc").documents] == ["d3", "d4", "d5"]
    store.create("a", DocumentDraft("text"), "d1")  # the id stands at the end now; the cursor still knows the place
    after_cursor = store.page("a", after=part.next_after, order="asc").documents
    assert [each.id for each in after_cursor] == ["d3", "d4", "d5", "d1"]


@pytest.mark.parametrize("after", ["unknown", "~", "~x", "~-1", "", "~" + "9" * 19])
def test_place_that_is_not_in_the_list_is_refused(after: str) -> None:
    store, _ = make_store()
    with pytest.raises(UnknownDocument, match="after"):
        store.page("a", after=after)


@settings(max_examples=examples(60))
@given(st.data())
def test_list_read_while_others_write_shows_each_lasting_document_once(data: st.DataObject) -> None:
    store, clock = make_store()
    order = data.draw(st.sampled_from(["asc", "desc"]))
    lasting = [store.create("a", DocumentDraft("text"), f"kept{number}").id for number in range(6)]
    passing = [store.create("a", DocumentDraft("text", ttl_seconds=50), f"gone{number}").id for number in range(4)]
    seen: list[str] = []
    after = None
    for _ in range(40):
        part = store.page("a", limit=data.draw(st.integers(1, 3)), after=after, order=order)
        seen += [document.id for document in part.documents]
        if not part.has_more:
            break
        after = data.draw(st.sampled_from([part.next_after, seen[-1]]))
        match data.draw(st.sampled_from(["delete", "create", "put", "wait", "nothing"])):
            case "delete" if passing:
                gone = passing.pop()
                if gone in {document.id for document in store.documents("a")}:
                    store.delete("a", gone)
            case "create":
                store.create("a", DocumentDraft("new"))
            case "put":
                store.put(
                    "a", data.draw(st.sampled_from(lasting)), DocumentDraft(data.draw(st.sampled_from(["text", "new"])))
                )
            case "wait":
                clock.now += 20
        store.check_invariants()
    assert [name for name in seen if name.startswith("kept")] == (lasting if order == "asc" else lasting[::-1])
    assert len(seen) == len(set(seen))


def test_refused_ids_are_the_same_in_code_and_in_the_published_pattern() -> None:
    import re

    for document_id in ("a", "a:warm", ".", "..", "...", "warm", "a:warm:b", ":pin"):
        is_refused = re.search(REFUSED_ID_PATTERN, document_id) is not None
        try:
            check_id(document_id)
        except InvalidDocument:
            assert is_refused
        else:
            assert not is_refused


def test_store_needs_neither_torch_nor_fastapi() -> None:
    code = (
        "import sys, kvmosaic.documents\n"
        "assert not {'torch', 'fastapi', 'starlette', 'pydantic'} & set(sys.modules), 'imported too much'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
