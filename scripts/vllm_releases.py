"""The names of vLLM that we use, by release: reads sources, and writes tests/integrations/vllm/releases.json.

    pip download --no-deps --only-binary :all: vllm==0.33.0
    python scripts/vllm_releases.py vllm-0.33.0-*.whl .venv-vllm/lib/python3.*/site-packages .venv-vllm/earlier

Each argument is a wheel, or a folder with `vllm/` in it. A wheel for GPUs is read, not imported, so it needs none. A
name of `tests/support/vllm/releases.py` that a release lacks is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.vllm.releases import RELEASES, USES  # noqa: E402
from support.vllm.signatures import Signatures, source_of, version_of  # noqa: E402

OUTPUT = ROOT / "tests" / "integrations" / "vllm" / "releases.json"


def main() -> int:
    """Reads the sources, writes the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", help="wheels, or folders with vllm/ in them")
    known = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    is_complete = True
    for place in parser.parse_args().sources:
        version, signatures = version_of(place), Signatures(source_of(place))
        known[version] = {use.key: signatures.find(use) for use in USES}
        for use in USES:
            found = known[version][use.key]
            lacking = list(use.members) if found is None else [name for name in use.members if name not in found]
            is_expected = use.since and _number(version) < _number(use.since)
            if (found is None or lacking) and not is_expected:
                print(f"{version} lacks {use.key} {lacking}")
                is_complete = False
    ordered = {version: known[version] for version in sorted(known, key=_number) if version in RELEASES}
    releases = (
        f"{json.dumps(version)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(found)}" for key, found in uses.items())
        + "\n}"
        for version, uses in ordered.items()
    )
    OUTPUT.write_text("{" + ",\n".join(releases) + "}\n")
    print(f"{', '.join(ordered)} -> {OUTPUT}")
    return 0 if is_complete else 1


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


if __name__ == "__main__":
    sys.exit(main())
