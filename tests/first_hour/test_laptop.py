"""A laptop, a folder of documents and a GGUF file: one command, then a question."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.files import docx_file, pdf_file
from support.server import serving

pytestmark = pytest.mark.slow
FERRY = "The ferry of Fenbury leaves at nine. The ferry goes to Oak Island."
PAGE = """<!doctype html><html><head><title>The mill</title></head><body><nav><a href="/">Home</a></nav>
<main><h1>The mill</h1><p>The miller of Tolbury is Otto Bramble. The mill grinds oats.</p></main>
<footer>Imprint</footer></body></html>"""


@pytest.fixture
def folder(home: Path) -> Path:
    """Documents as they lie about: formats, a sub-folder, something that is none, and one that is broken."""
    documents = home / "documents"
    (documents / "more").mkdir(parents=True)
    (documents / "ferry.txt").write_text(FERRY)
    (documents / "mill.html").write_text(PAGE)
    (documents / "more" / "bridge.md").write_text("# The bridge\n\nThe bridge of Fenbury was built in 1702.\n")
    (documents / "more" / "tower.pdf").write_bytes(pdf_file("The tower of Fenbury is forty metres high."))
    (documents / "report.docx").write_bytes(docx_file("Report", "The mayor of Fenbury is Renna Velley."))
    (documents / "photo.jpg").write_bytes(b"\xff\xd8")
    (documents / "broken.pdf").write_bytes(b"%PDF-1.7 and no more")
    return documents


def question(url: str, text: str, *names: str) -> tuple[str, dict[str, int]]:
    body = {
        "messages": [{"role": "user", "content": text}],
        "documents": [{"id": name} for name in names],
        "temperature": 0,
        "max_tokens": 12,
    }
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return reply["choices"][0]["message"]["content"].strip(), reply["usage"]["prompt_tokens_details"]


def test_one_command_serves_a_folder_and_the_first_question_is_answered_from_the_cache(folder: Path) -> None:
    pytest.importorskip("xllamacpp")
    from support.llama_engine import reader_file

    with serving(str(reader_file("Q8_0")), str(folder)) as served:
        said = served.log[: served.log.index("ready")]
        assert len(said.splitlines()) <= 11 and "5 stored" in said and "broken.pdf" in said
        stored = httpx.get(f"{served.url}/v1/documents").json()["data"]
        titles = {document["id"]: document["title"] for document in stored}
        assert titles.keys() == {"ferry.txt", "mill.html", "report.docx", "more/bridge.md", "more/tower.pdf"}
        assert titles["mill.html"] == "The mill"
        text = httpx.get(f"{served.url}/v1/documents/mill.html").json()["text"]
        assert "Otto Bramble" in text and "Home" not in text and "Imprint" not in text and "doctype" not in text
        answer, usage = question(served.url, "Who is the mayor of Fenbury?", "report.docx")
        assert answer.startswith("Renna Velley") and usage["composed_tokens"] > 10
        page = httpx.get(served.url).text
        assert "<title>kvmosaic</title>" in page


def test_a_question_in_the_terminal_reads_the_same_folder(
    folder: Path, kvmosaic: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    asked = kvmosaic("run", "reader", "--documents", "documents", "--question", "Where does the ferry go?")
    assert asked.returncode == 0 and "Where does the ferry go?" in asked.stdout, asked.stderr
    assert "broken.pdf" in asked.stderr and "read 5 documents" in asked.stderr and "Traceback" not in asked.stderr


def test_a_plan_has_three_numbers_and_a_line_that_works(
    home: Path, kvmosaic: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    planned = kvmosaic("plan", "reader", "--documents", "100", "--tokens-per-document", "500")
    rows = [line.split()[0] for line in planned.stdout.splitlines() if line.strip()]
    assert rows[:3] == ["weights", "documents", "free"] and planned.returncode == 0
    line = next(line for line in planned.stdout.splitlines() if "kvmosaic serve" in line)
    command = shlex.split(line.strip().removeprefix("serve").strip())
    assert command[:3] == ["kvmosaic", "serve", "reader"]
    assert not {"zipf", "beta", "worth"} & set(planned.stdout.split())
    with serving(*command[2:]) as served:
        assert httpx.get(f"{served.url}/readyz").is_success


def test_what_is_stored_is_listed_in_80_columns(
    folder: Path, kvmosaic: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    with serving("reader", str(folder)) as served:
        listed = kvmosaic("documents", "ls", "--server", served.url)
        assert listed.returncode == 0, listed.stderr
        assert max(map(len, listed.stdout.splitlines())) <= 80
        assert "more/tower.pdf" in listed.stdout and "mill.html" in listed.stdout
        again = kvmosaic("documents", "sync", "documents", "--server", served.url)
        assert "5 unchanged" in " ".join(again.stdout.split()), again.stdout + again.stderr
