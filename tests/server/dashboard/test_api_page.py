"""The page of the API: Swagger UI in a real browser, from this server only."""

from __future__ import annotations

import re

import httpx
from selenium import webdriver
from support.screen import Screen
from support.server import RunningServer, wait_until


def operations(screen: Screen) -> list[str]:
    return [each.text for each in screen.all(".opblock-summary-path")]


def test_page_lists_the_routes_and_tries_one_without_any_other_server(screen: Screen, server: RunningServer) -> None:
    screen.open(server.url + "/docs")
    wait_until(lambda: len(operations(screen)) > 20)
    assert any("completions" in path.replace("\u200b", "") for path in operations(screen))
    loaded = screen.run("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert {url.removeprefix(server.url) for url in loaded} >= {"/docs/swagger-ui.css", "/openapi.json"}
    assert all(url.startswith((server.url, "data:")) for url in loaded)
    screen.run("document.querySelector('#operations-health-version button').click()")
    wait_until(lambda: screen.all("#operations-health-version .try-out__btn"))
    screen.click("#operations-health-version .try-out__btn")
    screen.click("#operations-health-version .execute")
    wait_until(lambda: screen.all("#operations-health-version .live-responses-table .response-col_status"))
    assert screen.text("#operations-health-version .live-responses-table tbody .response-col_status").startswith("200")


def test_page_asks_for_the_key_that_the_server_needs(browser: webdriver.Chrome) -> None:
    with RunningServer(api_key=["key-of-the-page"]) as closed:
        screen = Screen(browser)
        screen.forgiven = ("401",)
        assert httpx.get(closed.url + "/openapi.json").status_code == 401
        screen.open(closed.url + "/docs")
        wait_until(lambda: has_prompt(browser))
        browser.switch_to.alert.send_keys("key-of-the-page")
        browser.switch_to.alert.accept()
        wait_until(lambda: len(operations(screen)) > 20)
        screen.check_clean()


def has_prompt(browser: webdriver.Chrome) -> bool:
    try:
        return bool(browser.switch_to.alert.text)
    except Exception:
        return False


def test_page_and_its_files_name_no_other_address_to_load(server: RunningServer) -> None:
    page = httpx.get(server.url + "/docs")
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", page.text)
    assert "'unsafe-eval'" not in page.headers["content-security-policy"]
    assert "http" not in page.headers["content-security-policy"].replace("'self'", "")
    for path, kind in (("swagger-ui-bundle.js", "text/javascript"), ("swagger-ui.css", "text/css")):
        reply = httpx.get(f"{server.url}/docs/{path}")
        assert reply.headers["content-type"].startswith(kind) and "max-age" in reply.headers["cache-control"]
        assert len(reply.content) > 100_000
