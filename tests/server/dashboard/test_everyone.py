"""Whether everyone can use it: without a mouse, on a phone, in light and dark, with a screen reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys
from support.screen import Screen
from support.server import RunningServer

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
"""Texts whose colour is too close to the colour behind them (WCAG AA: 4.5 to 1)."""
NAMES = (Path(__file__).parent / "names.js").read_text()
"""Controls, pictures and regions without a name, and names that point nowhere."""
FOCUS = """
const style = getComputedStyle(document.activeElement);
return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
"""
TOO_WIDE = """
return [...document.querySelectorAll('body *')]
  .filter((one) => one.checkVisibility() && !one.closest('.skip, .reader-only, svg'))
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => one.outerHTML.slice(0, 90));
"""
TOO_SMALL = """
return [...document.querySelectorAll('button, input, select, summary')]
  .filter((one) => one.checkVisibility() && !one.matches('.reader-only, [type=checkbox]'))
  .filter((one) => Math.min(one.offsetWidth, one.offsetHeight) < 24)
  .map((one) => one.outerHTML.slice(0, 90));
"""


def fill(server: RunningServer, screen: Screen) -> None:
    """A dashboard on which everything can be seen."""
    screen.load_examples()
    screen.ask()
    screen.run("document.getElementById('strategy').value = 'sequential'")
    screen.click("#chosen > li:nth-child(1) [data-action='Move down']")
    screen.ask()
    screen.click("#documents .pin")
    screen.until(lambda: screen.text("#documents .mark") == "pinned", "the pin")
    screen.until(lambda: len(screen.all("#records > li")) >= 2, "two strips")
    screen.until(lambda: screen.all("#pools canvas"), "the block map")
    screen.run("document.getElementById('adding').open = true")


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

    screen.tab_to("#documents > li:nth-child(2) .warm", back=True)
    screen.tab_to("#documents > li:nth-child(2) .delete")
    screen.press(Keys.ENTER)
    assert screen.run("return document.activeElement.id") == "confirm-no"
    screen.press(Keys.TAB, Keys.ENTER)
    screen.until(lambda: len(screen.all("#documents > li")) == 10, "the end of a document")
    screen.until(
        lambda: screen.run("return document.activeElement.matches('#documents input')"), "the focus in the list"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(
    server: RunningServer, screen: Screen, scheme: str
) -> None:
    screen.open(server.url, width=360, height=740, scheme=scheme)
    fill(server, screen)
    assert screen.run("return document.documentElement.scrollWidth") <= 360
    assert screen.run(TOO_WIDE) == []
    assert screen.run(TOO_SMALL) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(server: RunningServer, screen: Screen, scheme: str) -> None:
    screen.open(server.url, scheme=scheme)
    fill(server, screen)
    assert screen.run("return matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    brightness = screen.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in brightness.strip("rgb()").split(",")) < 384) == (scheme == "dark")
    assert screen.run(CONTRAST) == []


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


def test_every_control_and_picture_has_a_name(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    fill(server, screen)
    assert screen.run(NAMES) == []
    assert screen.run("return document.getElementById('answer').getAttribute('aria-live')") == "polite"
    assert screen.run("return document.getElementById('notices').getAttribute('role')") == "status"


def test_nothing_moves_for_those_who_asked_for_that(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    screen.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    moving = (
        "return [...document.querySelectorAll('*')].filter((one) => getComputedStyle(one).transitionDuration !== '0s' "
        "|| getComputedStyle(one).animationName !== 'none').length"
    )
    assert screen.run(moving) == 0


def test_tabs_that_were_left_give_their_connections_back(server: RunningServer, screen: Screen) -> None:
    for _ in range(8):  # a browser has six connections to a server
        screen.open(server.url)
        screen.until(lambda: screen.text("#connection") == "Live", "the connection")
