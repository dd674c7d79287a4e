from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.keys import Keys
from support.files import pdf_file
from support.screen import Screen
from support.server import RunningServer

from kvmosaic.documents import DocumentDraft

ROW = "#documents > li[data-key='fenbury']"


def test_documents_are_warmed_pinned_and_deleted_by_clicking(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    places = [screen.all(place)[0].rect for place in (ROW, "#ask")]
    screen.until(lambda: screen.run("return known.documents.total") == 11, "the news of them")
    assert [screen.all(place)[0].rect for place in (ROW, "#ask")] == places, "what one is about to click moves away"
    assert screen.text(f"{ROW} .tier") == "not cached"
    screen.menu(ROW, "warm")
    screen.until(lambda: screen.text(f"{ROW} .tier") == "on device", "the warmed document")
    assert "tokens" in screen.text(f"{ROW} .facts")

    screen.menu(ROW, "pin")
    screen.until(lambda: screen.text(f"{ROW} .mark") == "pinned", "the pin")
    screen.until(lambda: "pinned" in screen.text("#pools .pool p"), "pinned blocks on the map")
    screen.click(f"{ROW} .more")
    assert screen.text("#document-menu .pin") == "Unpin"
    screen.click("#document-menu .pin")
    screen.until(lambda: not screen.text(f"{ROW} .mark"), "no pin")

    screen.menu(ROW, "delete")
    assert "Fenbury" in screen.find("#confirm-words").text
    screen.click("#confirm-no")
    assert screen.all(ROW)
    screen.menu(ROW, "delete")
    screen.click("#confirm-yes")
    screen.until(lambda: not screen.all(ROW), "the end of the document")
    names = [document.id for document in server.call(server.services.documents.documents, "default")]
    assert "fenbury" not in names
    assert len(names) == 10


@pytest.mark.slow
def test_the_menu_of_a_document_stays_beside_its_row_and_closes_when_that_is_out_of_sight(
    server: RunningServer, screen: Screen
) -> None:
    screen.open(server.url).load_examples()
    screen.click(f"{ROW} .more")
    is_open = "return document.getElementById('document-menu').matches(':popover-open')"
    beside = (
        "const of = (it) => document.querySelector(it).getBoundingClientRect();"
        "document.dispatchEvent(new Event('scroll'));"
        "const menu = of('#document-menu'), button = of(arguments[0]);"
        "return Math.min(Math.abs(menu.top - button.bottom), Math.abs(button.top - menu.bottom)) < 12"
    )
    for distance in (0, 40, -40):
        screen.run("scrollBy(0, arguments[0])", distance)
        assert screen.run(beside, f"{ROW} .more") and screen.run(is_open)
    screen.run("scrollBy(0, document.querySelector(arguments[0]).getBoundingClientRect().bottom + 9)", ROW)
    screen.until(lambda: not screen.run(is_open), "the closed menu")


def test_a_warmed_document_is_reused_by_the_first_question(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    screen.click("#warm-all")
    screen.until(
        lambda: screen.run("return document.querySelectorAll('.tier[data-tier=device]').length") == 11,
        "all documents in the cache",
    )
    assert {action for _, action in screen.ask()[:-1]} == {"reused"}


def test_a_document_is_read_and_edited_and_its_versions_stay_readable(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    screen.menu(ROW, "open")
    assert screen.value("#document-text").startswith("Fenbury")
    assert screen.text("#document-heading") == screen.value("#document-title") == "Fenbury"
    old = screen.value("#document-text")
    first = server.call(server.services.documents.get, "default", "fenbury").version
    new = "Fenbury is a harbour town. The mayor of Fenbury is Otto Bramble."
    screen.fill("#document-text", new)
    screen.click("#document-save")
    screen.until(lambda: not screen.all("#document-dialog[open]"), "the end of the dialog")
    assert f"“Fenbury” is stored as version {first + 1}." in screen.text("#notices")
    assert screen.run("return document.activeElement.matches(arguments[0])", f"{ROW} .more")
    screen.ask("Who is the mayor of Fenbury?")
    assert screen.text("#answer") == "Otto Bramble"

    screen.menu(ROW, "open")
    screen.find("#document-version")
    versions = "return [...document.querySelectorAll('#document-version option')].map((one) => one.textContent)"
    assert [text.split(" (")[0] for text in screen.run(versions)] == [f"{first + 1}, current", f"{first}"]
    screen.click("#document-version option:last-child")
    screen.until(lambda: screen.value("#document-text") == old, "the earlier text")
    assert screen.run("return document.getElementById('document-text').readOnly")
    assert not screen.all("#document-save")[0].is_displayed()
    screen.click("#document-version option:first-child")
    assert screen.value("#document-text") == new
    screen.click("#document-version option:last-child")
    screen.click("#document-edit")
    assert screen.value("#document-text") == old
    screen.click("#document-save")
    screen.until(lambda: f"stored as version {first + 2}" in screen.text("#notices"), "the third version")
    stored = server.call(server.services.documents.get, "default", "fenbury")
    assert (stored.version, stored.content.text) == (first + 2, old)


def test_an_edit_does_not_overwrite_what_was_stored_meanwhile(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    screen.forgiven = ("412", "404")
    store = server.services.documents
    theirs, mine = "The mayor of Fenbury is Ada Vint.", "The mayor of Fenbury is Otto Bramble."
    screen.menu(ROW, "open")
    screen.fill("#document-text", mine)
    server.call(store.put, "default", "fenbury", DocumentDraft(theirs, "Fenbury"))
    screen.click("#document-save")
    problem, version = screen.find("#document-problem"), server.call(store.get, "default", "fenbury").version
    words = f"Not saved: version {version} was stored meanwhile, and you began with version {version - 1}."
    assert words in problem.text
    assert problem.get_attribute("role") == "alert"
    assert screen.axe() == []
    assert screen.value("#document-text") == mine
    assert server.call(store.get, "default", "fenbury").content.text == theirs
    screen.click("#document-reload")
    assert screen.value("#document-text") == theirs

    screen.fill("#document-text", mine)
    server.call(store.put, "default", "fenbury", DocumentDraft("The town has no mayor.", "Fenbury"))
    screen.click("#document-save")
    screen.click("#document-overwrite")
    screen.until(lambda: not screen.all("#document-dialog[open]"), "the end of the dialog")
    assert server.call(store.get, "default", "fenbury").content.text == mine

    screen.menu(ROW, "open")
    screen.fill("#document-text", theirs)
    server.call(store.delete, "default", "fenbury")
    screen.click("#document-save")
    screen.until(lambda: "was deleted meanwhile" in screen.text("#document-problem"), "the deletion")
    screen.click("#document-overwrite")
    screen.until(lambda: not screen.all("#document-dialog[open]"), "the end of the dialog")
    assert server.call(store.get, "default", "fenbury").content.text == theirs


def pair(screen: Screen, name: str, value: str) -> None:
    screen.click("#metadata-add")
    screen.browser.switch_to.active_element.send_keys(name)
    screen.press(Keys.TAB)
    screen.browser.switch_to.active_element.send_keys(value)


def test_metadata_is_edited_without_a_new_version(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    store = server.services.documents
    text = server.call(store.get, "default", "fenbury").content.text
    first = server.call(store.put, "default", "fenbury", DocumentDraft(text, "Fenbury", {"filename": "f.txt"}))[
        0
    ].version
    screen.menu(ROW, "open")
    screen.click("#document-metadata summary")
    assert screen.text("#metadata-sum") == "(1 pair)"
    pair(screen, "language", "en")
    pair(screen, "filename", "<b>.txt")
    assert screen.axe() == []
    screen.click("#document-save")
    screen.until(lambda: screen.text("#document-problem-words") == "Two pairs have the name “filename”.", "the refusal")
    screen.click("#metadata-pairs > li:nth-child(1) button")
    assert screen.run("return document.activeElement.getAttribute('aria-label')") == "Name of pair 1"
    screen.click("#document-save")
    screen.until(lambda: "The metadata of “Fenbury” is stored." in screen.text("#notices"), "the end")
    stored = server.call(store.get, "default", "fenbury")
    assert (stored.version, dict(stored.metadata)) == (first, {"language": "en", "filename": "<b>.txt"})

    screen.menu(ROW, "open")
    screen.until(lambda: screen.value("#document-text") == text, "the dialog")
    screen.click("#metadata-pairs > li:nth-child(2) button")
    screen.fill("#document-text", "The mayor of Fenbury is Ada Vint.")
    screen.click("#document-save")
    screen.until(lambda: f"stored as version {first + 1}" in screen.text("#notices"), "the new text")
    stored = server.call(store.get, "default", "fenbury")
    assert len(stored.metadata) == 1

    screen.menu(ROW, "open")
    screen.until(lambda: "Ada Vint" in screen.value("#document-text"), "the dialog")
    pair(screen, "only", "a draft")
    screen.press(Keys.ESCAPE)
    assert "without saving" in screen.find("#confirm-words").text


def test_page_says_how_much_of_an_edited_text_is_kept(server: RunningServer, screen: Screen) -> None:
    text = " ".join(f"The ferry number {n} leaves at noon." for n in range(40))
    server.call(server.services.documents.put, "default", "long", DocumentDraft(text, "Ferries"))
    screen.open(server.url)
    screen.menu("#documents", "warm")
    screen.until(lambda: screen.text("#documents .tier") == "on device", "the warmed document")
    screen.menu("#documents", "open")
    screen.fill("#document-text", text + " The last ferry leaves at nine.")
    screen.click("#document-save")
    screen.until(lambda: "stored as version 2. The cache keeps " in screen.text("#notices"), "what was kept")


def test_what_was_edited_is_not_lost_by_closing(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    screen.menu(ROW, "open")
    screen.fill("#document-text", "Only a draft.")
    screen.press(Keys.ESCAPE)
    assert "without saving" in screen.find("#confirm-words").text
    screen.click("#confirm-no")
    assert screen.value("#document-text") == "Only a draft."
    screen.click("#document-close")
    screen.click("#confirm-yes")
    screen.until(lambda: not screen.all("dialog[open]"), "the end of both dialogs")
    screen.menu(ROW, "open")
    screen.find("#document-text")
    screen.press(Keys.ESCAPE)
    screen.until(lambda: not screen.all("dialog[open]"), "the end of the dialog")


def test_a_refused_text_is_said_in_the_dialog(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    screen.forgiven = ("422", "400")
    screen.menu(ROW, "open")
    screen.fill("#document-text", "   ")
    screen.click("#document-save")
    screen.until(lambda: "text" in screen.text("#document-problem-words"), "the refusal")
    assert not screen.all("#document-choices")[0].is_displayed()


def test_documents_that_others_delete_leave_the_list_and_the_question(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    server.call(server.services.documents.delete, "default", "fenbury")
    screen.until(lambda: not screen.all(ROW), "the row to leave")
    screen.until(lambda: not screen.all("#chosen > li[data-key='fenbury']"), "the document to leave the question")
    assert len(screen.all("#chosen > li")) == 4
    assert "“Fenbury” is no longer stored" in screen.text("#notices")


def test_a_document_can_be_written_in_the_form(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    assert "No documents yet" in screen.text("#documents-empty")
    screen.click("#adding summary")
    screen.find("#add-title").send_keys("<img src=x onerror=alert(1)>")
    screen.find("#add-text").send_keys(
        "Bellos is a donkey. Bellos lives in the boathouse. ## <script>alert(2)</script>"
    )
    screen.click("#add-form .main")
    screen.until(lambda: screen.all("#documents > li"), "the new document")
    assert screen.text("#documents .title") == "<img src=x onerror=alert(1)>"  # text, never markup
    assert not screen.all("#documents img")
    screen.click("#documents .choose")
    strip = screen.ask("Where does Bellos live?")
    assert strip[1] == ("<img src=x onerror=alert(1)>", "computed")
    assert screen.text("#answer") == "boathouse"


def test_files_can_be_added(server: RunningServer, screen: Screen, tmp_path: Path) -> None:
    good, bad, report = tmp_path / "Silver Heron.txt", tmp_path / "noise.txt", tmp_path / "report.pdf"
    good.write_text("The Silver Heron was built in 1874.")
    bad.write_bytes(b"\xff\xfe\x00")
    report.write_bytes(pdf_file("The harbour is deep."))
    screen.open(server.url)
    screen.run("document.getElementById('adding').open = true")
    screen.browser.find_element("id", "files").send_keys(f"{good}\n{bad}\n{report}")
    screen.until(lambda: screen.titles() == ["report.pdf", "Silver Heron.txt"], "the documents of the files")
    assert "2 files are stored." in screen.text("#notices")
    assert "'noise.txt' is not UTF-8 text" in screen.text("#notices")
    assert "deep" in server.call(server.services.documents.get, "default", "report.pdf").content.text
    good.write_text("The Silver Heron was built in 1875.")
    screen.browser.find_element("id", "files").send_keys(str(good))
    screen.until(lambda: "and 1 replaced" in screen.text("#notices"), "the new text")


def test_chosen_documents_keep_their_order_and_can_be_left_out(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    screen.load_examples()

    def chosen() -> list[str]:
        script = "return [...document.querySelectorAll('#chosen .title')].map((one) => one.textContent)"
        return list(screen.run(script))

    assert chosen() == ["Talmira Varlow", "Amber Pearl", "Corlow Lighthouse", "Golden Anchor Museum", "Fenbury"]
    screen.click("#chosen > li:nth-child(3) [data-action='Move up']")
    screen.click("#chosen > li:nth-child(1) [data-action='Leave out']")
    screen.click("#documents > li[data-key='bellos'] .choose")
    assert chosen() == ["Corlow Lighthouse", "Amber Pearl", "Golden Anchor Museum", "Fenbury", "Bellos"]
    assert not screen.run("return document.querySelector('#documents > li[data-key=talmira-varlow] .choose').checked")


def test_what_is_chosen_while_the_page_looks_what_is_stored_stays_chosen(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    screen.until(lambda: screen.text("#connection") == "Live", "the connection")
    screen.hold("v1/documents?limit=1000&id=")
    server.call(server.services.documents.create, "default", DocumentDraft("A mill."), "mill")
    screen.until(screen.num_held, "a look before the examples are stored")
    server.call(server.services.documents.delete, "default", "mill")
    screen.load_examples()
    assert len(screen.all("#chosen > li")) == 5
    screen.let_go()
    screen.until(lambda: len(screen.all("#suggestions button")) > 1, "suggestions, which come last")
    assert len(screen.all("#chosen > li")) == 5 and "no longer stored" not in screen.text("#notices")


@pytest.fixture(scope="module")
def full() -> Iterator[RunningServer]:
    """A server with 5,000 documents."""
    with RunningServer() as running:
        drafts = [
            (f"no/{n}", DocumentDraft(f"The ferry number {n} leaves at noon.", f"Ferry {n}")) for n in range(5_000)
        ]
        running.services.documents.put_many("default", drafts)
        yield running


def ids(screen: Screen) -> list[str]:
    return list(screen.run("return [...document.querySelectorAll('#documents > li')].map((one) => one.dataset.key)"))


def test_any_number_of_documents_is_searched_and_paged(full: RunningServer, screen: Screen) -> None:
    screen.open(full.url)
    screen.until(lambda: screen.text("#page-words") == "1 to 50 of 5,000, newest first", "the first page")
    assert ids(screen) == [f"no/{n}" for n in range(4_999, 4_949, -1)]
    assert screen.find("#page-before").get_attribute("aria-disabled") == "true"
    screen.click("#documents > li:nth-child(1) .choose")
    screen.run("document.querySelector('#documents > li:last-child .more').focus()")
    screen.tab_to("#page-after")
    screen.press(Keys.ENTER)
    screen.until(lambda: screen.text("#page-words").startswith("51 to 100 of"), "the second page")
    assert screen.run("return document.activeElement.id") == "page-after"
    assert ids(screen)[0] == "no/4949"
    assert screen.text("#chosen .title") == "Ferry 4999", "a document of another page stays chosen"
    screen.click("#page-before")
    screen.until(lambda: ids(screen)[0] == "no/4999", "the first page")

    screen.find("#search").send_keys("ferry 12")
    screen.until(lambda: screen.text("#page-words") == "1 to 50, and more found", "what was found")
    assert all("Ferry 12" in title for title in screen.titles())
    screen.find("#search").send_keys("34")
    screen.until(lambda: ids(screen) == ["no/1234"], "the one document")
    assert screen.text("#page-words") == "1 to 1 of 1 found"
    screen.menu("#documents", "warm")
    screen.until(lambda: screen.text("#documents .tier") == "on device", "the warmed document")
    screen.menu("#documents", "open")
    assert screen.value("#document-text") == "The ferry number 1234 leaves at noon."
    screen.click("#document-close")
    screen.find("#search").send_keys(" <b>")
    screen.until(lambda: screen.text("#page-words") == "No id or title contains “ferry 1234 <b>”.", "nothing found")
    assert screen.axe() == []


def test_recent_prompts_have_the_titles_of_documents_of_any_page(full: RunningServer, screen: Screen) -> None:
    screen.open(full.url)
    screen.until(lambda: screen.text("#connection") == "Live", "the connection")
    documents = [{"id": "no/7"}, {"id": "mine", "text": "The ferry is blue."}, {"id": "x" * 400, "text": "Or red."}]
    body = {"messages": [{"role": "user", "content": "When?"}], "documents": documents, "max_tokens": 1}
    httpx.post(full.url + "/v1/chat/completions", json=body, timeout=60).raise_for_status()
    strip = "#records > li:first-child"
    screen.until(lambda: {"Ferry 7", "mine", "x" * 400} < {name for name, _ in screen.segments(strip)}, "the titles")


def test_5000_documents_are_scrolled_and_searched_without_lag(full: RunningServer, screen: Screen) -> None:
    """By the CPU time of the page's main thread, of which a key and a page may take a tenth of a second each."""
    screen.open(full.url)
    screen.until(lambda: len(ids(screen)) == 50, "the first page")
    before = screen.main_thread_seconds()
    keys = "ferry 43"
    for key in keys:
        screen.find("#search").send_keys(key)
    screen.until(lambda: all("Ferry 43" in title for title in screen.titles()), "what was found")
    typed = screen.main_thread_seconds() - before
    for step in range(20):
        screen.run("document.getElementById('documents').scrollTop = arguments[0]", 150 * step)
    scrolled = screen.main_thread_seconds() - before - typed
    for _ in range(2):
        first = ids(screen)[0]
        screen.click("#page-after")
        screen.until(lambda first=first: ids(screen)[0] != first, "the next page")
    paged = screen.main_thread_seconds() - before - typed - scrolled
    assert typed < 0.1 * len(keys) and scrolled < 0.1 * 20 and paged < 0.2 * 2, (typed, scrolled, paged)


def test_all_documents_are_warmed_in_batches_until_they_are_stopped(full: RunningServer, screen: Screen) -> None:
    screen.open(full.url)
    screen.click("#warm-all")
    screen.until(lambda: int(screen.text("#warm-words").split(" ")[0]) > 16, "the second batch")
    assert screen.text("#warm-words").endswith(" of 5,000")
    assert screen.run("return document.getElementById('warm-progress').max") == 5_000
    assert screen.axe() == []
    screen.click("#warm-stop")
    screen.until(lambda: "Warming was stopped after " in screen.text("#notices"), "the end")
    assert not screen.all("#warming")[0].is_displayed()
    assert screen.run("return document.activeElement.id") == "warm-all"
    assert 16 < cached(full) < 5_000
    screen.until(
        lambda: screen.run("return document.querySelectorAll('.tier[data-tier=device]').length") > 0, "the list"
    )


@pytest.fixture
def small() -> Iterator[RunningServer]:
    """A server whose cache has no room for its documents."""
    with RunningServer(chunk_cache_size="1MiB") as running:
        drafts = [(f"no/{n}", DocumentDraft(f"The ferry number {n} leaves at noon.")) for n in range(300)]
        running.services.documents.put_many("default", drafts)
        yield running


def test_warming_all_ends_where_the_cache_is_full(small: RunningServer, screen: Screen) -> None:
    screen.open(small.url)
    screen.click("#warm-all")
    screen.until(lambda: "The cache is full: warming stopped after " in screen.text("#notices"), "the end")
    assert cached(small) < 100


def cached(server: RunningServer) -> int:
    return int(server.call(server.services.engine.call, lambda engine: len(engine.kv_cache.chunks())))


def test_the_stream_of_a_viewer_does_not_grow_with_its_documents(full: RunningServer) -> None:
    with httpx.stream("GET", full.url + "/dashboard/events", timeout=30) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        state = json.loads(next(lines).removeprefix("data: "))
        assert state["documents"] == {"total": 5_000, "bytes": state["documents"]["bytes"], "change": 5_000}
        assert sum(len(next(lines)) for _ in range(3)) < 10_000
