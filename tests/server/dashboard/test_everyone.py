from __future__ import annotations

from selenium.webdriver.common.keys import Keys
from support.screen import Screen
from support.server import RunningServer

FOCUS = """
const style = getComputedStyle(document.activeElement);
return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
"""


def test_everything_can_be_done_with_the_keyboard_alone(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    screen.find("#load-examples")
    screen.press(Keys.TAB)
    assert screen.run("return document.activeElement.className") == "skip"
    screen.tab_to("#load-examples")
    assert screen.run(FOCUS)
    screen.press(Keys.ENTER)
    screen.until(lambda: screen.run("return document.activeElement.id") == "question", "the focus on the question")
    screen.until(lambda: len(screen.all("#documents > li")) == 11, "the documents")
    screen.press(Keys.ENTER)
    screen.until_answered()
    assert screen.text("#answer") == "Talmira Varlow"

    screen.tab_to("[data-action='Move down']")
    screen.press(Keys.ENTER)
    assert screen.text("#chosen > li:nth-child(2) .title") == "Talmira Varlow"
    assert screen.run("return document.activeElement.getAttribute('aria-label')") == "Move down: Talmira Varlow"
    screen.tab_to("#strategy")
    screen.press("seq")
    assert screen.run("return document.activeElement.value") == "sequential"
    screen.tab_to("#ask")
    assert screen.run(FOCUS)
    screen.press(Keys.SPACE)
    screen.until(lambda: ("Talmira Varlow", "moved") in screen.segments("#answer-strip"), "a moved document")

    screen.tab_to("#answer-strip .box")
    assert screen.find("#tip").text.startswith("system")
    screen.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert screen.find("#tip").text.startswith("Talmira Varlow")
    assert screen.run(FOCUS)
    screen.press(Keys.ESCAPE)
    assert not screen.all("#tip")[0].is_displayed()

    screen.tab_to("#documents > li:nth-child(2) .more")
    screen.press(Keys.ENTER)
    assert screen.run("return document.activeElement.textContent") == "Open" and screen.run(FOCUS)
    screen.press(Keys.ESCAPE)
    assert screen.run("return document.activeElement.matches('.more')")
    screen.press(Keys.ENTER, Keys.ARROW_UP)
    assert screen.run("return document.activeElement.getAttribute('aria-label')") == "Delete Bellos"
    screen.press(Keys.ENTER)
    assert screen.run("return document.activeElement.id") == "confirm-no"
    screen.press(Keys.TAB, Keys.ENTER)
    screen.until(lambda: len(screen.all("#documents > li")) == 10, "the end of a document")
    screen.until(
        lambda: screen.run("return document.activeElement.matches('#documents input')"), "the focus in the list"
    )


def test_the_theme_can_be_chosen_and_is_remembered(server: RunningServer, screen: Screen) -> None:
    def ground() -> str:
        return str(screen.run("return getComputedStyle(document.body).backgroundColor"))

    screen.open(server.url, scheme="light")
    light = ground()
    screen.click("#theme")
    assert screen.text("#theme") == "Theme: light"
    screen.click("#theme")
    assert screen.text("#theme") == "Theme: dark"
    assert ground() != light
    screen.open(server.url, scheme="light")
    assert screen.text("#theme") == "Theme: dark"
    assert ground() != light
    screen.run("localStorage.clear()")
