"""HTML file of the dashboard and its Content-Security-Policy, which allows no other script or style."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Only this server's address, only the script and style of the file, no text as markup, no embedding in frames."""


@dataclass(frozen=True, slots=True)
class Markup:
    """The HTML file with its Content-Security-Policy header."""

    text: str
    policy: str

    @classmethod
    def read(cls) -> Markup:
        """Reads the file from the package; the policy allows script and style by their hashes."""
        text = files("kvmosaic.server.dashboard").joinpath("page.html").read_text(encoding="utf-8")
        return cls(text, POLICY.format(script=_hash_of("script", text), style=_hash_of("style", text)))


def _hash_of(element: str, text: str) -> str:
    contents = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    assert len(contents) == 1, f"one <{element}> without attributes, or the policy does not fit"
    return f"'sha256-{b64encode(sha256(contents[0].encode()).digest()).decode()}'"
