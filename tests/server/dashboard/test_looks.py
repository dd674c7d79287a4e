"""A dashboard with everything on it, looked at on a desk and on a phone, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from support.screen import Screen
from support.server import RunningServer

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
"""Texts whose colour is too close to the colour behind them (WCAG AA: 4.5 to 1)."""
NAMES = (Path(__file__).parent / "names.js").read_text()
"""Controls, pictures and regions without a name, and names that point nowhere."""
TOO_WIDE = """
return [...document.querySelectorAll('body *')]
  .filter((one) => one.checkVisibility() && !one.closest('.skip, .reader-only, svg'))
  .filter((one) => one.getBoundingClientRect().right > 361)
  .map((one) => one.outerHTML.slice(0, 90));
"""
TOO_SMALL = """
return [...document.querySelectorAll('button, input, select, summary')]
  .filter((one) => one.checkVisibility() && !one.matches('.reader-only, [type=checkbox]'))
  .filter((one) => Math.min(one.offsetWidth, one.offsetHeight) < 24)
  .map((one) => one.outerHTML.slice(0, 90));
"""
WINDOWS = [(1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")]


@pytest.fixture(scope="module")
def filled(server_of_module: RunningServer, browser: webdriver.Chrome) -> Iterator[Screen]:
    """A tab on which everything can be seen; tests only look."""
    screen = Screen(browser).open(server_of_module.url, width=360)
    screen.load_examples()
    screen.ask()
    screen.run("document.getElementById('strategy').value = 'sequential'")
    screen.click("#chosen > li:nth-child(1) [data-action='Move down']")
    screen.ask()
    screen.menu("#documents", "pin")
    screen.until(lambda: screen.text("#documents .mark") == "pinned", "the pin")
    screen.until(lambda: len(screen.all("#records > li")) >= 2, "two strips")
    screen.until(lambda: screen.all("#pools canvas"), "the block map")
    screen.run("document.getElementById('adding').open = true")
    yield screen
    screen.check_clean()
    browser.get("about:blank")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(filled: Screen, scheme: str) -> None:
    filled.look(width=360, height=740, scheme=scheme)
    assert filled.run("return innerWidth") == 360  # a phone widens its window for what does not fit
    assert filled.run("return document.documentElement.scrollWidth") == 360
    assert filled.run(TOO_WIDE) == []
    assert filled.run(TOO_SMALL) == []


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_every_text_stands_out_from_its_ground(filled: Screen, width: int, scheme: str) -> None:
    filled.look(width=width, scheme=scheme)
    filled.until(lambda: not filled.run("return document.getAnimations().length"), "the end of all transitions")
    red, green, blue = filled.run("return getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
    assert (red + green + blue < 384) == (scheme == "dark")
    assert filled.run(CONTRAST) == []


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_the_page_and_in_its_dialogs(filled: Screen, width: int, scheme: str) -> None:
    filled.look(width=width, scheme=scheme)
    assert filled.axe() == []
    filled.menu("#documents", "open")
    filled.find("#document-text").send_keys("!")
    assert filled.axe() == []
    filled.click("#document-close")
    assert filled.find("#confirm-yes").text == "Discard"
    assert filled.axe() == []
    filled.click("#confirm-yes")
    filled.run("askForKey('This server asks for a key.')")
    assert filled.axe() == []
    filled.run("document.getElementById('key-dialog').close()")


def test_every_control_and_picture_has_a_name(filled: Screen) -> None:
    assert filled.run(NAMES) == []
    assert filled.run("return document.getElementById('answer').getAttribute('aria-live')") == "polite"
    assert filled.run("return document.getElementById('notices').getAttribute('role')") == "status"


def test_no_segment_is_told_by_its_colour_alone(filled: Screen) -> None:
    words = (
        "return [...document.querySelectorAll('.box')].map((one) => [one.dataset.action, one.children[1].textContent])"
    )
    signs = {"reused": "=", "moved": "→", "computed": "+", "partly reused": "~"}
    drawn = filled.run(words)
    assert {"reused", "moved", "computed"} <= {action for action, _ in drawn}
    assert all(text.startswith(signs[action]) for action, text in drawn)


def test_segments_are_as_wide_as_they_have_tokens(filled: Screen) -> None:
    filled.look(width=1600)
    boxes = filled.run(
        "return [...document.querySelectorAll('#answer-strip .strip > li')]"
        ".map((one) => [one.offsetWidth, parseInt(one.firstChild.dataset.tip.split('\\n')[1])])"
    )
    wide = [(width, tokens) for width, tokens in boxes if width > 100]
    assert len(wide) >= 3
    per_token = [width / tokens for width, tokens in wide]
    assert max(per_token) < 1.05 * min(per_token)


def test_nothing_moves_for_those_who_asked_for_that(filled: Screen) -> None:
    moving = (
        "return [...document.querySelectorAll('*')].filter((one) => getComputedStyle(one).transitionDuration !== '0s' "
        "|| getComputedStyle(one).animationName !== 'none').length"
    )
    assert filled.run(moving) > 0
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    filled.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    assert filled.run(moving) == 0


@pytest.mark.slow
def test_the_question_comes_first_and_what_is_for_operators_is_folded(server: RunningServer, screen: Screen) -> None:
    screen.look(width=390, height=740)
    screen.browser.get(server.url)
    screen.find("#load-examples")
    tops = screen.run(
        "return ['ask-panel', 'documents-panel', 'records-panel', 'engine-room']"
        ".map((id) => document.getElementById(id).getBoundingClientRect().top)"
    )
    assert tops == sorted(tops) and tops[0] < 200
    for hidden in ("#pools", "#ttft-chart", "#strategy"):
        assert not screen.all(hidden)[0].is_displayed()
