"""The database of stored documents: one that other processes use, that survives, and that cannot be used."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import event
from support.programs import installed

from kvmosaic.documents import DocumentDraft, DocumentStore, Match, StoreLimits, database, document_place
from kvmosaic.documents.database import FILE_NAME, SCHEMA_VERSION
from kvmosaic.errors import (
    DocumentDamaged,
    DocumentStoreUnavailable,
    InvalidConfig,
    InvalidDocument,
    KVMosaicError,
    UnknownDocument,
)
from kvmosaic.prompt.companions import STORED

TENANT = "default"


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def text_of(store: DocumentStore, document_id: str, version: int | None = None) -> str:
    return store.resolve(TENANT, [(document_id, version)])[0].text


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real PostgreSQL server."""
    initdb = Path(installed("postgresql", "initdb", folders="usr/lib/postgresql/*/bin"))
    folder = tmp_path_factory.mktemp("postgresql")
    as_user: list[str] = []
    if os.geteuid() == 0:  # it refuses to run as root
        # Popen(user=...) forks a copy of this process, for which there may be no memory; without it, it does not
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        for path in (folder, *folder.parents):
            if path.stat().st_mode & 0o055 != 0o055:  # folders of tests are of one user
                path.chmod(path.stat().st_mode | 0o055)
        shutil.chown(folder, "postgres", "postgres")
    data, programs_at = folder / "data", initdb.parent
    subprocess.run(
        [
            *as_user, programs_at / "initdb", "-D", data, "-U", "kvmosaic", "-A", "trust", "-E", "UTF8",
            "--locale=C", "--no-sync",
        ],
        check=True, capture_output=True, cwd="/",
    )  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*as_user, programs_at / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", "", "-F"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/") as server:
        try:
            url = f"postgresql://kvmosaic@127.0.0.1:{port}/postgres"
            for _ in range(300):
                try:
                    DocumentStore(url).close()
                    break
                except InvalidConfig:
                    assert server.poll() is None
                    time.sleep(0.1)
            yield url
        finally:
            server.send_signal(signal.SIGINT)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """A database that several stores share."""
    return tmp_path if request.param == "sqlite" else str(request.getfixturevalue("postgresql"))


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> str:
    """A tenant for this test alone: the tests share one PostgreSQL server."""
    return request.node.name


def test_everything_of_a_document_survives_a_restart(place: Path | str, tenant: str) -> None:
    draft = DocumentDraft("The ferry runs at 8.\x00 日本語", "Ferry", {"lang": "en"}, 600, True, None, 0.9)
    with closing(DocumentStore(place)) as store:
        store.create(tenant, draft, "docs/a b.md")
        store.create(tenant, DocumentDraft("pinned", pinned=True), "pin")
        store.put(tenant, "docs/a b.md", DocumentDraft("It runs at 9.", "Ferry", {"lang": "en"}, 600, True))
        store.resolve(tenant, [("docs/a b.md", None)])
        before = store.get(tenant, "docs/a b.md")
    with closing(DocumentStore(place)) as store:
        assert store.get(tenant, "docs/a b.md") == before and before.hits == 1 and before.content.priority == 0.9
        assert before.expires_at is not None and abs(before.expires_at - time.time() - 600) < 30
        assert store.get(tenant, "docs/a b.md", 1).content.text == draft.text, "an earlier version"
        assert store.get(tenant, "pin").pinned
        assert [each.id for each in store.page(tenant).documents] == ["pin", "docs/a b.md"]
        assert store.usage(tenant).num_documents == 2
        store.delete(tenant, "pin")
    with closing(DocumentStore(place)) as store:
        assert store.create(tenant, DocumentDraft("again"), "pin").version == 2, (
            "an ETag of the deleted one fits it not"
        )
        store.check_invariants()


@pytest.mark.parametrize("damage", [f"text = CAST(x'{byte}' || substr(text, 2) AS BLOB)" for byte in ("ff", "41")])
def test_a_damaged_text_costs_its_document_only(tmp_path: Path, damage: str) -> None:
    texts = {name: f"The ferry of {name} goes to Oak Island twice a day." for name in ("a", "b", "c")}
    with closing(DocumentStore(tmp_path)) as store:
        for name, text in texts.items():
            store.create("t", DocumentDraft(text, "A", {"lang": "en"}), name)
        assert len(store.search("t", "\n".join(texts.values()))) == 3
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file, file:
            file.execute(f"UPDATE kvmosaic_document_texts SET {damage} WHERE id = 'b'")
            file.execute("UPDATE kvmosaic_documents SET metadata = '{broken' WHERE id = 'c'")
        with pytest.raises(DocumentDamaged, match="the stored document 'b' is damaged; store its text again"):
            store.resolve("t", [("a", None), ("b", None)])
        for opened in (store, DocumentStore(tmp_path)):
            assert [each.id for _, _, each in opened.search("t", "\n".join(texts.values()))] == ["a", "c"]
        listed = store.page("t").documents
        assert [each.id for each in listed] == ["c", "b", "a"] and "damaged" in listed[0].metadata
        assert store.companions("t", STORED, None) == tuple(f"A\n{texts[name]}" for name in ("a", "c"))
        store.put("t", "b", DocumentDraft(texts["b"]))
        assert store.resolve("t", [("b", None)])[0].text == texts["b"]
        opened.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
def test_a_full_disk_is_emptied_by_deleting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "RESERVE_BYTES", 2**19)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with closing(DocumentStore(tmp_path, version_seconds=0)) as store:
            with pytest.raises(DocumentStoreUnavailable, match="full"):
                for number in range(200):
                    store.create(TENANT, DocumentDraft(f"{number}" + "x" * 20_000), f"{number}")
            assert number > 10 and shutil.disk_usage(tmp_path).free < 2**19
            assert store.get(TENANT, "1").content.text.startswith("1x")
            for each in range(number):
                store.delete(TENANT, f"{each}")
            store.create(TENANT, DocumentDraft("y" * 20_000), "new")
        with closing(DocumentStore(tmp_path)) as store:
            assert store.get(TENANT, "new").version == 1 and shutil.disk_usage(tmp_path).free > 2**19
            store.check_invariants()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_texts_of_before_there_were_checksums_are_read(tmp_path: Path) -> None:
    with closing(DocumentStore(tmp_path)) as store:
        store.create("t", DocumentDraft("The ferry."), "a")
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file, file:
        file.execute("ALTER TABLE kvmosaic_document_texts DROP COLUMN checksum")
    with closing(DocumentStore(tmp_path)) as store:
        assert store.get("t", "a").content.text == "The ferry."


def test_nobody_else_reads_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with closing(DocumentStore(folder)) as store:
        store.create("t", DocumentDraft("The ferry."), "a")
        (folder / FILE_NAME).chmod(0o644)  # as an earlier version left it
    with closing(DocumentStore(folder)) as store:
        store.create("t", DocumentDraft("The mill."), "b")
        assert {path.stat().st_mode & 0o777 for path in folder.glob(f"{FILE_NAME}*")} == {0o600}
        assert folder.stat().st_mode & 0o777 == 0o700 and len(list(folder.iterdir())) == 4


def test_stores_of_one_database_see_each_others_changes_at_once(place: Path | str, tenant: str) -> None:
    text = "The mayor of Fenbury is Renna Velley, a baker."
    with closing(DocumentStore(place)) as one, closing(DocumentStore(place)) as other:
        one.create(tenant, DocumentDraft(text), "x")
        assert [found[2].id for found in other.search(tenant, f"Read: {text}")] == ["x"]
        one.put(tenant, "x", DocumentDraft("The mayor of Fenbury is now Otto Velley, a miller."))
        assert other.search(tenant, f"Read: {text}") == []
        assert len(other.search(tenant, "Read: The mayor of Fenbury is now Otto Velley, a miller.")) == 1
        one.delete(tenant, "x")
        assert other.search(tenant, "Read: The mayor of Fenbury is now Otto Velley, a miller.") == []
        with pytest.raises(UnknownDocument):
            other.get(tenant, "x")


def test_writers_at_once_lose_no_version(place: Path | str, tenant: str) -> None:
    stores = [DocumentStore(place) for _ in range(4)]

    def write(store: DocumentStore) -> None:
        for _ in range(10):
            store.put(tenant, "x", DocumentDraft("a" * 1_000))
            store.create(tenant, DocumentDraft("b"))

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].get(tenant, "x").version == 40 and stores[0].usage(tenant).num_documents == 41
    for store in stores:
        store.check_invariants()
        store.close()


def test_memory_file_and_server_answer_alike(tmp_path: Path, postgresql: str) -> None:
    numbers = iter(range(10**6))

    class Three(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.clock, number = Clock(), next(numbers)
            self.tenant = f"alike-{number}"
            limits = StoreLimits(max_documents=3, max_bytes=40)
            self.stores = [
                DocumentStore(place, version_seconds=6, limits=limits, clock=self.clock)
                for place in (None, tmp_path / str(number), postgresql)
            ]

        def all(self, call: Callable[[DocumentStore], Any]) -> None:
            results = []
            for store in self.stores:
                try:
                    results.append(call(store))
                except KVMosaicError as error:
                    results.append((type(error), str(error)))
            assert results[0] == results[1] == results[2]

        @rule(
            name=st.sampled_from("abcd"),
            text=st.text("xyz☃", min_size=1, max_size=12),
            ttl=st.none() | st.integers(1, 9),
            refresh=st.booleans(),
            pinned=st.none() | st.booleans(),
            version=st.none() | st.integers(1, 4),
        )
        def put(self, name: str, version: int | None, **fields: Any) -> None:
            match = None if version is None else Match(frozenset([version]))
            draft = DocumentDraft(
                fields["text"], ttl_seconds=fields["ttl"], refresh_ttl_on_hit=fields["refresh"], pinned=fields["pinned"]
            )
            self.all(lambda store: store.put(self.tenant, name, draft, match))

        @rule(texts=st.lists(st.tuples(st.sampled_from("abcde"), st.text("xyz☃", min_size=1, max_size=9)), max_size=5))
        def put_many(self, texts: list[tuple[str, str]]) -> None:
            drafts = [(name, DocumentDraft(text)) for name, text in texts]
            self.all(lambda store: [shown(each) for each in store.put_many(self.tenant, drafts)])

        @rule(name=st.sampled_from("abcd"), pinned=st.booleans())
        def pin(self, name: str, pinned: bool) -> None:
            self.all(lambda store: store.set_pinned(self.tenant, name, pinned))

        @rule(name=st.sampled_from("abcd"))
        def delete(self, name: str) -> None:
            self.all(lambda store: store.delete(self.tenant, name))

        @rule(name=st.sampled_from("abcd"), version=st.none() | st.integers(1, 4))
        def resolve(self, name: str, version: int | None) -> None:
            self.all(lambda store: (store.resolve(self.tenant, [(name, version)]), store.get(self.tenant, name)))

        @rule(name=st.sampled_from("abcd"))
        def list_versions(self, name: str) -> None:
            self.all(lambda store: store.versions(self.tenant, name))

        @rule(search=st.sampled_from(["", "A", "_"]), order=st.sampled_from(["asc", "desc"]))
        def look(self, search: str, order: Any) -> None:
            self.all(lambda store: store.page(self.tenant, limit=2, order=order, search=search))
            self.all(lambda store: store.usage(self.tenant))

        @rule(seconds=st.integers(1, 5))
        def wait(self, seconds: int) -> None:
            self.clock.now += seconds

        @invariant()
        def is_sound(self) -> None:
            for store in getattr(self, "stores", ())[:2]:
                store.check_invariants()

        def teardown(self) -> None:
            for store in self.stores:
                store.close()

    run_state_machine_as_test(Three, settings=settings(max_examples=15, stateful_step_count=25, deadline=None))


def shown(result: Any) -> Any:
    return str(result) if isinstance(result, KVMosaicError) else result


_KILLED = """
import os, signal, sys, time
from contextlib import closing
from pathlib import Path
from kvmosaic.documents import DocumentDraft, DocumentStore

folder, number = Path(sys.argv[1]), 0
for round_number in range(int(sys.argv[2])):
    reading, writing = os.pipe()
    if not (child := os.fork()):
        store = DocumentStore(folder)
        while True:
            number += 1
            store.put("default", f"d{number % 20}", DocumentDraft(f"{number} " * 400, metadata={"number": str(number)}))
            os.write(writing, f"{number}\\n".encode())  # acknowledged
    os.close(writing)
    with os.fdopen(reading) as lines:
        acknowledged = [int(lines.readline())]
        time.sleep(0.001 * (round_number * 7 % 50))
        os.kill(child, signal.SIGKILL)
        acknowledged += [int(line) for line in lines if line.endswith("\\n")]
    os.waitpid(child, 0)
    number = acknowledged[-1]
    with closing(DocumentStore(folder)) as store:
        store.check_invariants()
        stored = {}
        for head in store.documents("default"):
            written = int(head.metadata["number"])
            text = store.get("default", head.id).content.text
            assert text == f"{written} ".strip() + f" {written}" * 399, "half a text"
            stored[head.id] = written
        assert stored[f"d{number % 20}"] >= number, "an acknowledged text is lost"
        number = max(stored.values())
"""


def test_killed_while_writing_it_loses_nothing_acknowledged_and_serves_nothing_half(tmp_path: Path) -> None:
    """`KILLS` sets how often a process is killed while it writes, at any moment."""
    kills = os.environ.get("KILLS", "50")
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), kills], check=True)


@pytest.mark.parametrize("jump", [-(10**6), -100.0, 0.0, 10**6], ids=str)
def test_times_to_live_go_on_where_the_systems_clock_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    with closing(DocumentStore(tmp_path)) as store:
        store.create(TENANT, DocumentDraft("short", ttl_seconds=1), "short")
        store.create(TENANT, DocumentDraft("long", ttl_seconds=3_600), "long")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    with closing(DocumentStore(tmp_path)) as store:
        long = store.get(TENANT, "long")
        assert long.expires_at is not None and abs(long.expires_at - time.time() - 3_600) < 60
        while store.usage(TENANT).num_documents == 2:
            time.sleep(0.05)
        assert [each.id for each in store.documents(TENANT)] == ["long"]


def test_ten_thousand_documents_open_and_are_listed_soon(tmp_path: Path) -> None:
    with closing(DocumentStore(tmp_path)) as store:
        for start in range(0, 10_000, 1_000):
            texts = [(f"d{number}", DocumentDraft(f"{number} " * 300)) for number in range(start, start + 1_000)]
            assert not any(isinstance(each, KVMosaicError) for each in store.put_many(TENANT, texts))
    begun = time.process_time()
    with closing(DocumentStore(tmp_path)) as store:
        assert store.usage(TENANT).num_documents == 10_000
        assert time.process_time() - begun < 2
        after, seconds = None, []
        for _ in range(20):
            begun = time.thread_time()
            page = store.page(TENANT, limit=100, after=after)
            seconds.append(time.thread_time() - begun)
            after = page.next_after
        assert sorted(seconds)[10] < 0.05


def test_a_place_that_cannot_be_used_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidConfig, match=r"cannot be written to .* --documents-dir"):
        DocumentStore(tmp_path / "file" / "folder")
    (tmp_path / FILE_NAME).write_text("This is a letter to my aunt, and no database. " * 20)
    with pytest.raises(InvalidConfig, match="is damaged or no database"):
        DocumentStore(tmp_path)
    for url, why in (
        ("sqlite:///x", "write it as postgresql://"),
        ("no url", "is no URL"),
        ("postgresql://u:secret@127.0.0.1:1/x", "cannot be used"),
    ):
        with pytest.raises(InvalidConfig, match=why) as found:
            DocumentStore(url)
        assert "secret" not in str(found.value)
    with pytest.raises(InvalidConfig, match="both set"):
        document_place("folder", "postgresql://x")


def test_a_file_of_a_later_version_is_refused_and_stays(tmp_path: Path) -> None:
    DocumentStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        file.execute("UPDATE kvmosaic_document_clock SET schema_version = ?", (SCHEMA_VERSION + 1,))
        file.commit()
    with pytest.raises(InvalidConfig, match="written by a later version"):
        DocumentStore(tmp_path)


def test_a_locked_database_gives_an_error_and_no_half_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmosaic.documents.database._BUSY_SECONDS", 0.1)
    with closing(DocumentStore(tmp_path)) as store, closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
        store.create(TENANT, DocumentDraft("one"), "x")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DocumentStoreUnavailable, match="locked"):
            store.put(TENANT, "x", DocumentDraft("two"))
        assert text_of(store, "x") == "one"
        other.rollback()
        store.put(TENANT, "x", DocumentDraft("two"))


def test_texts_are_read_while_the_database_is_locked_and_their_hits_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmosaic.documents.database.SHORT_SECONDS", 0.05)
    monkeypatch.setattr("kvmosaic.documents.store.HITS_SECONDS", 0.0)
    with closing(DocumentStore(tmp_path)) as store, closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
        store.create(TENANT, DocumentDraft("one", ttl_seconds=60, refresh_ttl_on_hit=True), "x")
        store.put(TENANT, "x", DocumentDraft("two", ttl_seconds=60, refresh_ttl_on_hit=True))
        other.execute("BEGIN IMMEDIATE")
        assert text_of(store, "x") == "two" and text_of(store, "x", 1) == "one"
        assert store.usage(TENANT).num_documents == 1
        other.rollback()
        store.save()
    with closing(DocumentStore(tmp_path)) as store:
        assert store.get(TENANT, "x").hits == 2


def test_a_locked_database_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmosaic.documents.database.SHORT_SECONDS", 0.05)
    store = DocumentStore(tmp_path)
    store.create(TENANT, DocumentDraft("one"), "x")
    text_of(store, "x")
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
        other.execute("BEGIN IMMEDIATE")
        store.close()


@pytest.mark.parametrize("text", ["\0", "a\0b", "a\ud800"])
def test_what_no_database_can_hold_is_not_found_and_no_failure_of_it(place: Path | str, tenant: str, text: str) -> None:
    with closing(DocumentStore(place)) as store:
        store.create(tenant, DocumentDraft("one"), "x")
        assert store.page(tenant, search=text).documents == ()
        assert [each.id for each in store.page(tenant, ids=[text, "x"]).documents] == ["x"]
        for ask in (
            lambda: store.page(tenant, after=text),
            lambda: store.get(tenant, text),
            lambda: store.resolve(tenant, [(text, None)]),
            lambda: store.delete(tenant, text),
            lambda: store.set_pinned(tenant, text, True),
        ):
            with pytest.raises(UnknownDocument):
                ask()
        results = store.put_many(tenant, [(text, DocumentDraft("two")), ("y", DocumentDraft("two"))])
        assert isinstance(results[0], InvalidDocument) and not isinstance(results[1], KVMosaicError)


@pytest.mark.parametrize("fields", [{"title": "a\0b"}, {"metadata": {"k": "\0"}}, {"metadata": {"\0": "v"}}])
def test_title_and_metadata_hold_no_nul(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocument, match="NUL"):
        DocumentDraft("text", **fields)


def test_search_ignores_case_in_any_alphabet(tmp_path: Path) -> None:
    with closing(DocumentStore(tmp_path)) as store:
        store.create(TENANT, DocumentDraft("x", "ÜBERSEE"), "Éclair")
        for part in ("éclair", "ÉCLAIR", "übersee", "Über"):
            assert [each.id for each in store.page(TENANT, search=part).documents] == ["Éclair"], part
        assert not store.page(TENANT, search="%").documents and not store.page(TENANT, search="_").documents


def test_deleted_text_is_not_left_in_the_file(tmp_path: Path) -> None:
    with closing(DocumentStore(tmp_path)) as store:
        for number in range(20):
            store.create(TENANT, DocumentDraft("the secret recipe " * 1_000), str(number))
    with closing(DocumentStore(tmp_path)) as store:
        for number in range(20):
            store.delete(TENANT, str(number))
    assert b"secret recipe" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_of_lines_with_the_same_id_the_last_that_can_be_stored_is_written(tmp_path: Path) -> None:
    drafts = [("same", DocumentDraft(f"text {number}")) for number in range(500)]
    others = [(f"other {number}", DocumentDraft(f"text {number}")) for number in range(500)]
    with closing(DocumentStore(tmp_path)) as store:
        store.put_many(TENANT, others)
        rows = _count_read_rows(store, lambda: store.put_many(TENANT, [*drafts[:250], *others[:250]]))
        assert store.get(TENANT, "same").version == 1 and text_of(store, "same") == "text 249"
        store.limits = StoreLimits(max_characters=9)
        done = store.put_many(TENANT, [*drafts[:2], ("same", DocumentDraft("x" * 10))])
        assert [isinstance(each, KVMosaicError) for each in done] == [False, False, True]
        assert store.get(TENANT, "same").version == 2 and text_of(store, "same") == "text 1"
        store.check_invariants()
    assert rows < 20_000


def _count_read_rows(store: DocumentStore, act: Callable[[], object]) -> int:
    """The parameters of all statements of a call, of which each id that is read is one."""
    count = 0

    def note(*given: Any) -> None:
        nonlocal count
        parameters = given[3]
        count += len(parameters) if isinstance(parameters, tuple) else sum(map(len, parameters))

    event.listen(store._database._engine, "before_cursor_execute", note)
    act()
    return count


def test_without_a_setting_documents_are_in_the_users_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert document_place(None, None) == tmp_path / "kvmosaic" / "documents"
    assert document_place("none", None) is None
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert document_place(None, None) is None
    assert "in memory" in caplog.text
