from __future__ import annotations

from pathlib import Path

from support.screen import Screen
from support.server import RunningServer

ROW = "#documents > li[data-key='fenbury']"


def test_documents_are_warmed_pinned_and_deleted_by_clicking(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    assert screen.text(f"{ROW} .tier") == "not cached"
    screen.click(f"{ROW} .warm")
    screen.until(lambda: screen.text(f"{ROW} .tier") == "on device", "the warmed document")
    assert "tokens" in screen.text(f"{ROW} .facts")

    screen.click(f"{ROW} .pin")
    screen.until(lambda: screen.text(f"{ROW} .mark") == "pinned", "the pin")
    screen.until(lambda: "pinned" in screen.text("#pools .pool p"), "pinned blocks on the map")
    assert screen.text(f"{ROW} .pin") == "Unpin"
    screen.click(f"{ROW} .pin")
    screen.until(lambda: screen.text(f"{ROW} .pin") == "Pin", "no pin")

    screen.click(f"{ROW} .delete")
    assert "Fenbury" in screen.find("#confirm-words").text
    screen.click("#confirm-no")
    assert screen.all(ROW)
    screen.click(f"{ROW} .delete")
    screen.click("#confirm-yes")
    screen.until(lambda: not screen.all(ROW), "the end of the document")
    names = [document.id for document in server.call(server.services.documents.documents, "default")]
    assert "fenbury" not in names
    assert len(names) == 10


def test_a_warmed_document_is_reused_by_the_first_question(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    screen.click("#warm-all")
    screen.until(
        lambda: screen.run("return document.querySelectorAll('.tier[data-tier=device]').length") == 11,
        "all documents in the cache",
    )
    assert {action for _, action in screen.ask()[:-1]} == {"reused"}


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


def test_text_files_can_be_added(server: RunningServer, screen: Screen, tmp_path: Path) -> None:
    good, bad = tmp_path / "Silver Heron.txt", tmp_path / "noise.txt"
    good.write_text("The Silver Heron was built in 1874.")
    bad.write_bytes(b"\xff\xfe\x00")
    screen.open(server.url)
    screen.run("document.getElementById('adding').open = true")
    screen.browser.find_element("id", "files").send_keys(f"{good}\n{bad}")
    screen.until(lambda: screen.text("#documents .title") == "Silver Heron", "the document of the file")
    assert "“noise.txt” is not UTF-8 text" in screen.text("#notices")


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
