"""The coding agent, end to end: a real server, its own tools, and histories that it compacts."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from support.server import RunningServer

OpenAI = pytest.importorskip("openai").OpenAI
APPLICATION = Path(__file__).parents[2] / "examples" / "agent" / "agent.py"
LINES = [f"def function_{number}(x):\n    return x + {number}\n" for number in range(12)]


def folder_of(path: Path) -> Path:
    for name in ("ferry", "mill", "tower"):
        (path / f"{name}.py").write_text(f"# {name}\n" + "".join(LINES).replace("function", name))
    return path


def test_tools_return_what_is_there_and_say_what_is_not(tmp_path: Path) -> None:
    folder = runpy.run_path(str(APPLICATION))["Folder"](folder_of(tmp_path))
    assert folder.call("list_files", "{}") == "ferry.py\nmill.py\ntower.py"
    assert folder.call("read_file", '{"path": "mill.py"}').startswith("# mill\ndef mill_0")
    assert folder.call("search", '{"text": "mill_3("}') == "mill.py:8: def mill_3(x):"
    assert folder.call("search", '{"text": "nowhere"}') == "(nothing)"
    for name, arguments in (("read_file", '{"path": "/etc/passwd"}'), ("search", "["), ("delete", "{}")):
        assert folder.call(name, arguments).startswith("error: ")


@pytest.mark.slow
def test_the_agent_computes_less_with_documents_than_with_prefixes_alone(tmp_path: Path) -> None:
    parts, computed = runpy.run_path(str(APPLICATION)), {}
    folder = parts["Folder"](folder_of(tmp_path))
    files = sorted((APPLICATION.parents[1] / "documents").glob("*.txt"))
    texts = [" ".join(file.read_text() for file in files[number::3]) for number in range(3)]
    folder.tools = [tool for tool in folder.tools if tool["function"]["name"] == "read_file"]
    with RunningServer() as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        for is_plain in (False, True):
            agent = parts["Agent"](client, "reader", folder, budget=1_500, plain=is_plain, forced=True)
            # in place of the choice of the bundled model, which hardly makes any
            later = iter([*texts, texts[1], texts[0], texts[2], texts[1]])
            folder.call = lambda *_, later=later: next(later)
            steps = list(agent.run("What does mill_3 return?", 7))
            assert len(steps) == 7 and sum(step.dropped for step in steps) >= 3
            computed[is_plain] = sum(step.prompt_tokens - step.reused_tokens for step in steps)
    assert computed[False] < 0.7 * computed[True]


@pytest.mark.slow
def test_the_command_prints_what_was_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunningServer() as server:
        arguments = [str(folder_of(tmp_path)), "What?", "--server", f"{server.url}/v1", "--steps", "1"]
        monkeypatch.setattr(sys, "argv", [str(APPLICATION), *arguments])
        runpy.run_path(str(APPLICATION), run_name="__main__")
    assert re.search(r"all +\d+ of +\d+ tokens computed, \d+% reused", capsys.readouterr().out)
