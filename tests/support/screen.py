"""A headless Chromium that looks at the dashboard, and what a test wants to know from it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from support.programs import installed

SECONDS = 60.0
_REMEMBER_VIOLATIONS = (
    "window.violations = [];"
    "document.addEventListener('securitypolicyviolation', (event) => window.violations.push(event.violatedDirective));"
)


def start_browser() -> webdriver.Chrome:
    """Chromium and its driver, as installed."""
    driver = installed("chromium-driver", "chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = installed("chromium", "chromium", "chromium-browser", "google-chrome")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _REMEMBER_VIOLATIONS})
    return browser


_AXE = """
const tags = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice', 'experimental'];
const words = ({ id, impact, nodes }) =>
  nodes.map((node) => `${id} (${impact}): ${node.html.slice(0, 120)}: ${node.failureSummary}`);
axe.run(document, { runOnly: { type: 'tag', values: tags } })
  .then(({ violations }) => arguments[0](violations.flatMap(words)));
"""


@cache
def _axe() -> str:
    return files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


class Screen:
    """One tab of the browser, which remembers nothing of others.

    Whatever a test does, in the end there must be no error in the console and nothing the policy had to stop.
    """

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser
        browser.get("about:blank")  # a page that is open may still write what it remembers
        browser.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
        browser.get_log("browser")  # what others left there
        self.slow(0)
        self.forgiven: tuple[str, ...] = ()
        """Parts of console messages that this test brings about, such as the status of a refused request."""

    def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Screen:
        """Opens the dashboard in a window of this size."""
        self.look(width=width, height=height, scheme=scheme)
        self.browser.get(url)
        if not url.endswith("/docs"):
            self.run(
                "for (const id of ['settings', 'engine-room']) document.getElementById(id)?.setAttribute('open', '')"
            )
        return self

    def menu(self, row: str, action: str) -> None:
        """Chooses from the menu of a document."""
        self.click(f"{row} .more")
        self.click(f"#document-menu .{action}")

    def look(self, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Changes the size of the window, and whether light or dark is wanted."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def slow(self, milliseconds: int) -> None:
        """Every answer of the server takes this much longer, in this test."""
        self.browser.execute_cdp_cmd("Network.enable", {})
        conditions = {"offline": False, "latency": milliseconds, "downloadThroughput": -1, "uploadThroughput": -1}
        self.browser.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)

    def hold(self, beginning: str) -> None:
        """From now on, answers to requests for paths that begin so are late, until `let_go`."""
        self.run(
            "const call = fetch, held = []; window.numHeld = () => held.length;"
            "window.letGo = () => { window.fetch = call; for (const go of held) go(); };"
            "window.fetch = async (path, ...rest) => { const reply = await call(path, ...rest);"
            " if (path.startsWith(arguments[0])) await new Promise((go) => held.push(go)); return reply; };",
            beginning,
        )

    def num_held(self) -> int:
        """Answers that are late."""
        return int(self.run("return window.numHeld()"))

    def let_go(self) -> None:
        self.run("window.letGo()")

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self.browser.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        """The first visible element."""
        return self.until(lambda: next((one for one in self.all(selector) if one.is_displayed()), None), selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        element = self.until(lambda: self._at_rest(selector), selector)
        element.click()

    def _at_rest(self, selector: str) -> WebElement | None:
        """The first visible element, if it may be clicked and no news move it while one looks."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        before = element.rect
        time.sleep(0.03)
        return element if element.is_enabled() and element.rect == before else None

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def value(self, selector: str) -> str:
        """What is in a field."""
        return str(self.find(selector).get_property("value"))

    def fill(self, selector: str, text: str) -> None:
        """Types a text in place of that in a field."""
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def titles(self) -> list[str]:
        """The titles in the list of documents."""
        return list(
            self.run("return [...document.querySelectorAll('#documents .title')].map((one) => one.textContent)")
        )

    def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Waits until something is true, and returns it."""
        end = time.monotonic() + SECONDS
        while not (value := condition()):
            assert time.monotonic() < end, f"not within {SECONDS} s: {what}; notices: {self.text('#notices')!r}"
            time.sleep(0.03)
        return value

    def axe(self) -> list[str]:
        """What axe finds wrong for people who use assistive technology, with its experimental rules."""
        self.until(lambda: not self.run("return document.getAnimations().length"), "the end of all transitions")
        if not self.run("return 'axe' in window"):
            self.run(_axe())
        return list(self.browser.execute_async_script(_AXE))

    def main_thread_seconds(self) -> float:
        """CPU seconds that the main thread of this tab has used."""
        self.browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        metrics = self.browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    def press(self, *keys: str) -> None:
        """Types into whatever has the focus."""
        actions = ActionChains(self.browser)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def tab_to(self, selector: str, *, back: bool = False) -> None:
        """Goes on with the tabulator until an element has the focus."""
        for _ in range(80):
            if self.run("return document.activeElement.matches(arguments[0])", selector):
                return
            actions = ActionChains(self.browser)
            if back:
                actions.key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
            else:
                actions.send_keys(Keys.TAB).perform()
        raise AssertionError(f"the tabulator does not reach {selector}")

    def ask(self, question: str | None = None) -> list[tuple[str, str]]:
        """Asks, waits for the answer, and returns name and action of each segment of its strip."""
        if question is not None:
            self.run("document.getElementById('question').value = arguments[0]", question)
        self.click("#ask")
        self.until_answered()
        return self.segments("#answer-strip")

    def until_answered(self) -> None:
        self.until(lambda: self.text("#usage") and not self.is_asking(), "the answer")

    def is_asking(self) -> bool:
        return bool(self.run("return document.getElementById('answer').hasAttribute('aria-busy')"))

    def segments(self, place: str) -> list[tuple[str, str]]:
        script = (
            "return [...document.querySelectorAll(arguments[0] + ' .box')]"
            ".map((box) => [box.querySelector('b').textContent, box.dataset.action])"
        )
        return [(name, action) for name, action in self.run(script, place)]

    def load_examples(self) -> None:
        self.click("#load-examples")
        self.until(lambda: len(self.all("#documents > li")) == 11, "eleven documents")
        self.until(lambda: self.all("#chosen > li"), "chosen documents")

    def check_clean(self) -> None:
        """No error in the console, and nothing stopped by the policy."""
        logged = [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] != "INFO"]
        errors = [message for message in logged if not any(part in message for part in self.forgiven)]
        assert not errors, json.dumps(errors, indent=1)
        assert self.run("return window.violations") == []
