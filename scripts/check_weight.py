"""Is the house as light as it was?

    python scripts/check_weight.py

Counts lines and files of every folder in `src`, words of the documents, and processor seconds of the fast tests (as
`tests/times.txt` has them); `scripts/weight.json` has the numbers of the last commit, and the modules that one cached
chat may pass through, which tests count. No total may rise: what raises one folder lowers another in the same change.
Where totals fall, the file is written anew, to be committed. `make check` runs it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WEIGHT = ROOT / "scripts/weight.json"
SOURCE = ROOT / "src/kvmosaic"
sys.path.insert(0, str(ROOT / "tests"))

from support.times import fast_seconds  # noqa: E402


def weigh() -> dict[str, Any]:
    """The numbers of now, without the modules, which tests count."""
    modules = sorted(SOURCE.rglob("*.py"))
    lines, files = dict[str, int](), dict[str, int]()
    for path in modules:
        folder = path.relative_to(SOURCE).parts[0] if path.parent != SOURCE else "."
        lines[folder] = lines.get(folder, 0) + len(path.read_text().splitlines())
        files[folder] = files.get(folder, 0) + 1
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {
        "lines": lines,
        "files": files,
        "docs_words": sum(len(path.read_text().split()) for path in documents),
        "fast_test_seconds": round(fast_seconds()),
    }


def heavier(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What has risen, as sentences."""
    found = []
    for name, value in now.items():
        total, allowed = (sum(each.values()) if isinstance(each, dict) else each for each in (value, before[name]))
        if total > allowed:
            grown = [
                f"{folder} {value[folder] - before[name].get(folder, 0):+,}"
                for folder in (value if isinstance(value, dict) else ())
                if value[folder] > before[name].get(folder, 0)
            ]
            where = f" ({', '.join(grown)})" if grown else ""
            found.append(f"{name}: {total:,}, at most {allowed:,}{where}: let as much leave")
    return found


def main() -> int:
    """Compares, and writes what has fallen; 1 if something has risen."""
    before, now = json.loads(WEIGHT.read_text()), weigh()
    if found := heavier(before, now):
        print(*found, sep="\n")
        return 1
    if not os.environ.get("CI"):
        WEIGHT.write_text(json.dumps({**before, **now}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
