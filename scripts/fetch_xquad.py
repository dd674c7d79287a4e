"""Fetches XQuAD, for `kvmosaic eval --data`: questions on paragraphs of Wikipedia in twelve languages (CC BY-SA 4.0).

python scripts/fetch_xquad.py FOLDER [LANGUAGE …]        from https://github.com/google-deepmind/xquad
python scripts/fetch_xquad.py FOLDER [LANGUAGE …] --from FOLDER_OR_URL

The files are data of their authors and are never committed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

SOURCE = "https://raw.githubusercontent.com/google-deepmind/xquad/master"
LANGUAGES = ("ar", "de", "el", "en", "es", "hi", "ro", "ru", "th", "tr", "vi", "zh")
MAX_BYTES = 2**24
SECONDS = 60


def main() -> int:
    """Fetches the files that are not there yet; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("languages", nargs="*", default=["en"], metavar="LANGUAGE", help=f"of {', '.join(LANGUAGES)}")
    parser.add_argument("--from", dest="source", default=SOURCE, help="a folder, or the address of one")
    options = parser.parse_args()
    if unknown := sorted(set(options.languages) - set(LANGUAGES)):
        parser.error(f"XQuAD has no language {unknown[0]!r}; choose of {', '.join(LANGUAGES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for language in options.languages:
        target = options.folder / f"xquad.{language}.json"
        if target.exists():
            print(f"{target} is there already")
            continue
        try:
            content = read(options.source, target.name)
            count = sum(len(p["qas"]) for article in json.loads(content)["data"] for p in article["paragraphs"])
        except (OSError, URLError, ValueError, KeyError) as error:
            print(f"cannot fetch {target.name} from {options.source}: {error!r:.200}", file=sys.stderr)
            return 1
        part = target.with_suffix(".part")
        part.write_bytes(content)
        part.replace(target)
        print(f"{target}: {count} questions")
    if (licence := Path(options.source) / "LICENSE.txt").is_file():
        shutil.copy(licence, options.folder)
    return 0


def read(source: str, name: str) -> bytes:
    """The bytes of a file in a folder, or at an address.

    Raises:
        OSError: it is not there, or larger than `MAX_BYTES`.
    """
    if "://" not in source:
        return (Path(source) / name).read_bytes()
    if not source.startswith(("https://", "http://")):
        raise OSError(f"{source} is no address of the web")
    with urlopen(f"{source.rstrip('/')}/{name}", timeout=SECONDS) as answer:  # noqa: S310 - checked above
        content: bytes = answer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"{name} is larger than {MAX_BYTES} bytes")
    return content


if __name__ == "__main__":
    sys.exit(main())
