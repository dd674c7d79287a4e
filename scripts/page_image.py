"""Photographs the dashboard of a server with the bundled model, as docs/images/page.png and page-dark.png.

python scripts/page_image.py [FOLDER]

It needs Chromium, its driver and selenium. The server listens on a free loopback port; nothing else is asked.
"""

import base64
import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
from selenium import webdriver

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WIDTH, HEIGHT, SCALE = 1440, 1000, 1
MARGIN = 40
"""Empty room at the end that the picture does without."""
MAX_HEIGHT = 1_395
"""As far as three recent prompts."""
PINNED = ("amber-pearl",)
ORDERS = 9
"""Prompts that are asked before the picture is taken."""


def main() -> None:
    """Starts a server, asks it some questions and takes the pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    command = [sys.executable, "-m", "kvmosaic", "serve", "--port", str(port), "--chunk-cache-size", "32MiB"]
    command += ["--request-cache-size", "32MiB", "--position-strategy", "sequential", "--uvicorn-log-level", "error"]
    command += ["--documents-dir", "none"]
    server = subprocess.Popen(command, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})  # noqa: S603
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_until_ready(client)
            use(client)
            photograph(str(client.base_url), folder)
    finally:
        server.terminate()
        server.wait(30)


def wait_until_ready(client: httpx.Client, seconds: float = 120) -> None:
    """Waits until the model is loaded."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if client.get("/readyz").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"the server was not ready within {seconds} s")


def use(client: httpx.Client) -> None:
    """Stores the examples and asks about them, each time about other ones in another order."""
    examples = client.get("/dashboard/examples").json()
    ids = [document["id"] for document in examples["documents"]]
    for document in examples["documents"]:
        client.post("/v1/documents", json=document).raise_for_status()
    for document_id in PINNED:
        client.post(f"/v1/documents/{document_id}:pin").raise_for_status()
    questions = itertools.cycle(examples["questions"])
    for turn in range(ORDERS):
        asked = next(questions)
        others = [ids[(3 * turn + step) % len(ids)] for step in (0, 4, 9)]
        chosen = list(dict.fromkeys([*others[: turn % 4], *asked["documents"][turn % 3 :]]))
        ask(client, asked["question"], chosen)


def ask(client: httpx.Client, question: str, document_ids: list[str]) -> None:
    """Asks one question about stored documents."""
    messages = [
        {"role": "system", "content": "Answer the question from the documents."},
        {"role": "user", "content": question},
    ]
    documents = [{"id": document_id} for document_id in document_ids]
    body = {"model": "reader", "messages": messages, "temperature": 0, "max_tokens": 32, "documents": documents}
    client.post("/v1/chat/completions", json=body).raise_for_status()


def photograph(address: str, folder: Path) -> None:
    """Asks one more question in the browser, and takes a picture in light and one in dark."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    # a driver given by its path: selenium would otherwise ask the network for one
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": SCALE, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(address)
        time.sleep(2)
        browser.execute_script("document.querySelector('#suggestions button').click()")
        browser.execute_script("document.getElementById('ask-form').requestSubmit()")
        time.sleep(3)
        browser.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
        height = browser.execute_script("return document.querySelector('main').getBoundingClientRect().bottom")
        whole = {"x": 0, "y": 0, "width": WIDTH, "height": min(height - MARGIN, MAX_HEIGHT), "scale": 1}
        for name, scheme in (("page.png", "light"), ("page-dark.png", "dark")):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            time.sleep(1)
            picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": whole})
            (folder / name).write_bytes(base64.b64decode(picture["data"]))
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
