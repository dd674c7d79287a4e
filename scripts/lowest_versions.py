"""Constraints that hold every direct dependency to its lower bound in pyproject.toml, for `make test-oldest`.

python scripts/lowest_versions.py [NAME==VERSION ...]    with other versions of these
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_BOUND = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*(?:>=|==)\s*([0-9][0-9.]*)")


def lowest() -> dict[str, str]:
    """The lowest version of each dependency, of the package and of its extras for users."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = {
        name: wanted for name, wanted in project["optional-dependencies"].items() if name not in ("vllm", "test", "dev")
    }
    wanted = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    return {found[1]: found[2] for each in wanted if (found := _BOUND.match(each))}


if __name__ == "__main__":
    versions = lowest() | dict(each.split("==", 1) for each in sys.argv[1:])
    print(
        *(
            f"{name}=={version}" if version.count(".") > 1 else f"{name}=={version}.*"
            for name, version in versions.items()
        ),
        sep="\n",
    )
