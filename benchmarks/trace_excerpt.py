"""Excerpt of a RAGPulse trace for tests: its first requests, with blocks numbered anew.

    python benchmarks/trace_excerpt.py RAGPULSE tests/bench/traces/ragpulse [--requests 400]

RAGPULSE is the folder `data` of https://github.com/flashserve/RAGPulse (MIT). Only what a replay needs is written: the
time of a request, its blocks, and their lengths.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PARTS = {
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "history": ("3_history.jsonl", "history_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
}
REQUESTS = "0_trace.jsonl"


def objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes one object per line, without spaces."""
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Reads, numbers and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("excerpt", type=Path)
    parser.add_argument("--requests", type=int, default=400)
    chosen = parser.parse_args()
    requests = sorted(objects(chosen.trace / REQUESTS), key=lambda each: int(each["timestamp"]))[: chosen.requests]
    numbers: dict[int, int] = {}
    rows = [
        {
            "timestamp": each["timestamp"],
            "hash_ids": {
                part: [numbers.setdefault(block, len(numbers)) for block in each["hash_ids"][part]] for part in PARTS
            },
        }
        for each in requests
    ]
    chosen.excerpt.mkdir(parents=True, exist_ok=True)
    write(chosen.excerpt / REQUESTS, rows)
    for name, field in PARTS.values():
        known = [(numbers[each[field]], each) for each in objects(chosen.trace / name) if each[field] in numbers]
        lengths = [{field: number, "token_length": each["token_length"]} for number, each in sorted(known, key=_first)]
        write(chosen.excerpt / name, lengths)
    (chosen.excerpt / "LICENSE").write_text((chosen.trace / "LICENSE").read_text(encoding="utf-8"), encoding="utf-8")


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


if __name__ == "__main__":
    main()
