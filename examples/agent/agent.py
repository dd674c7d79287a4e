"""A small coding agent over a folder: three tools, a history that is compacted, and what was not computed again.

    pip install -c constraints.txt '.[server]' openai                  # in a checkout
    kvmosaic serve Qwen/Qwen2.5-Coder-1.5B-Instruct                     # in another terminal
    python examples/agent/agent.py src/kvmosaic/cache "What evicts a chunk?"

The agent drops its oldest results when the history gets long, as coding agents do. With `find_documents="agents"` the
server keeps what the tools returned, wherever it is in the next request; with prefix caching alone (--plain),
everything after the first change is computed again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

MAX_RESULT_CHARACTERS = 6_000
TEXTS = (".py", ".md", ".txt", ".toml", ".yaml", ".json", ".js", ".ts", ".c", ".h", ".rs", ".go")
SYSTEM = "You are a coding agent. Read what you need with the tools, then answer the question in a few sentences."


class Folder:
    """The tools: what they are, and what they return."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(path for path in folder.rglob("*") if path.suffix in TEXTS and path.is_file())
        self._files = {path.relative_to(folder).as_posix(): path for path in paths[:200]}
        name = {"type": "string", "enum": sorted(self._files)}
        self.tools = [
            _tool("list_files", "The names of all files.", {}),
            _tool("read_file", "The text of a file.", {"path": name}),
            _tool("search", "All lines with a text, with file and number.", {"text": {"type": "string"}}),
        ]

    def call(self, name: str, arguments: str) -> str:
        """The result of a call, or what is wrong with it, for the model to read."""
        try:
            given = json.loads(arguments or "{}")
            result = {"list_files": self._list, "read_file": self._read, "search": self._search}[name](**given)
        except (KeyError, TypeError, ValueError, OSError) as error:
            return f"error: {type(error).__name__}: {error}"
        return result[:MAX_RESULT_CHARACTERS] or "(nothing)"

    def _list(self) -> str:
        return "\n".join(self._files)

    def _read(self, path: str) -> str:
        return self._files[path].read_text(encoding="utf-8", errors="replace")

    def _search(self, text: str) -> str:
        found = (
            f"{name}:{number}: {line.strip()}"
            for name in self._files
            for number, line in enumerate(self._read(name).splitlines(), start=1)
            if text in line
        )
        return "\n".join(line for line, _ in zip(found, range(100), strict=False))


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(frozen=True)
class Step:
    """One request: what the model did, and its tokens."""

    said: str
    prompt_tokens: int
    reused_tokens: int
    """In the cache: equal prefixes, and results that were read there before."""
    dropped: int
    """Results that the agent dropped from its history before this request."""


class Agent:
    """Asks a model, calls its tools, and keeps the history short."""

    def __init__(self, client: OpenAI, model: str, folder: Folder, *, budget: int, plain: bool, forced: bool) -> None:
        self._client, self._model, self._folder = client, model, folder
        self._budget, self._forced = budget, forced
        self._extra = {"find_documents": "none" if plain else "agents"}

    def run(self, question: str, max_steps: int) -> Iterator[Step]:
        """The steps until the model answers."""
        head = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        turns: list[list[dict[str, Any]]] = []
        for number in range(1, max_steps + 1):
            dropped = self._compact(turns)
            choice = "none" if number == max_steps else "required" if self._forced else "auto"
            reply = self._client.chat.completions.create(
                model=self._model,
                messages=[*head, *(message for turn in turns for message in turn)],  # type: ignore[arg-type]
                tools=self._folder.tools,  # type: ignore[arg-type]
                tool_choice=choice,  # type: ignore[arg-type]
                max_tokens=300,
                temperature=0,
                extra_body=self._extra,
            )
            message, usage = reply.choices[0].message, reply.usage
            details = usage.prompt_tokens_details if usage else None
            calls = [call.model_dump() for call in message.tool_calls or ()]
            said = "; ".join(f"{call['function']['name']}{call['function']['arguments']}" for call in calls)
            yield Step(
                said or message.content or "",
                usage.prompt_tokens if usage else 0,
                (details.cached_tokens or 0) if details else 0,
                dropped,
            )
            if not calls:
                return
            results = [
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": self._folder.call(call["function"]["name"], call["function"]["arguments"]),
                }
                for call in calls
            ]
            turns.append([{"role": "assistant", "content": message.content, "tool_calls": calls}, *results])

    def _compact(self, turns: list[list[dict[str, Any]]]) -> int:
        """Drops the oldest turns until the history fits."""
        before = len(turns)
        while len(turns) > 1 and sum(len(each["content"] or "") for turn in turns for each in turn) > self._budget:
            turns.pop(0)
        return before - len(turns)


def main() -> None:
    """Runs the agent once and prints its steps."""
    parser = argparse.ArgumentParser(description="Ask an agent about the files of a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--server", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--steps", type=int, default=12, help="requests at most")
    parser.add_argument("--budget", type=int, default=24_000, help="characters of a history")
    parser.add_argument("--plain", action="store_true", help="without documents: prefix caching alone")
    parser.add_argument("--forced", action="store_true", help="call a tool in every step but the last one")
    options = parser.parse_args()
    client = OpenAI(base_url=options.server, api_key="none")
    model = next(iter(client.models.list())).id
    agent = Agent(
        client, model, Folder(options.folder), budget=options.budget, plain=options.plain, forced=options.forced
    )
    prompt = reused = 0
    for number, step in enumerate(agent.run(options.question, options.steps), start=1):
        prompt, reused = prompt + step.prompt_tokens, reused + step.reused_tokens
        dropped = f", {step.dropped} dropped" if step.dropped else ""
        computed = step.prompt_tokens - step.reused_tokens
        print(f"{number:2}  {computed:6} of {step.prompt_tokens:6} tokens computed{dropped}  {step.said[:100]}")
    print(f"all {prompt - reused:6} of {prompt:6} tokens computed, {reused / max(prompt, 1):.0%} reused")


if __name__ == "__main__":
    main()
