"""Are the texts of the project in the words of the field?

    python scripts/check_words.py [PATH ...]

Reads docstrings, comments, string literals (help, logs, errors) of the Python files, the documents and the metric
help, and reports each word of `BANNED` with what to write instead. Ends with 1 if it found one. `make check` runs it.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROSE = {".md", ".html", ".yaml", ".toml"}
SKIPPED = (
    "CHANGELOG.md",  # lists old names
    "benchmarks/results/",
    "scripts/check_words.py",
    "src/kvmosaic/bundled/",
    "src/kvmosaic/lab/eval/text/words.toml",  # texts for models
    "src/kvmosaic/vllm/worker/trial/text.py",
    "src/kvmosaic/prompt/companions.py",
    "tests/",
)

PROXIES = "proxy|gateway|router|ingress|load balancer|extra"
BANNED = {
    r"nobody|no one": "say who or what: 'no sequence', 'unreferenced', 'no caller'",
    r"whoever|whomever": "name it: 'the caller', 'the least recently used entry'",
    r"somebody|someone": "name it: 'a client', 'another sequence'",
    r"those that|those which|those who": "a noun: 'sequences that ...'",
    r"(?:is|are|was|were|be|been|being) told": "'receives', 'is notified', 'is passed'",
    r"stands?|stood|standing": "'is', 'is at position', 'is stored'",
    rf"behind(?! (?:a|an|the|your|one) (?:\w+ )?(?:{PROXIES}))": "'after', 'in', 'follows'",
    r"lets? go": "'releases'",
    r"(?:comes?|came|coming) to (?:its|their|an) end": "'ends', 'finishes'",
    r"(?:most|fewest)_[a-z_]+": "'max_...' or 'min_...'",
    r"oblivion|has no say": "plain words",
}
STRAY = re.compile(r'"""((?:max|min|num)_[a-z_]+)\b')
"""A docstring that begins like a name: a replaced word, where the file has no such name."""
PATTERNS = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), advice) for words, advice in BANNED.items()]


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line number, text) of what a person reads in a file."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(content.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line


def main(arguments: list[str]) -> int:
    """Prints what it found; returns the exit code."""
    command = ["git", "ls-files", "--", *arguments]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    found = 0
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if name.startswith(SKIPPED) or path.suffix not in {".py", *PROSE} or not path.exists():
            continue
        if path.suffix == ".py":
            content = path.read_text(encoding="utf-8")
            for name_of in STRAY.finditer(content):
                if content.count(name_of[1]) == 1:
                    print(f"{name}: a docstring begins with {name_of[1]!r}, which this file does not have")
                    found += 1
        for line, text in texts_of(path):
            for pattern, advice in PATTERNS:
                if match := pattern.search(text):
                    print(f"{name}:{line}: {match[0]!r}; write {advice}: {text.strip():.120}")
                    found += 1
    if found:
        print(f"{found} words of a private dialect", file=sys.stderr)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
