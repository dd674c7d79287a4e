"""Markup: the HTML file of the dashboard, and the policy by which a browser runs nothing else."""

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
"""No address but ours, no script or style but the one in the file, no text that becomes markup, no frame around it."""


@dataclass(frozen=True, slots=True)
class Markup:
    """The file, and the Content-Security-Policy header that goes with it."""

    text: str
    policy: str

    @classmethod
    def read(cls) -> Markup:
        """Reads the file that comes with the package; script and style are known to the browser by their hashes."""
        text = files("kvmosaic.server.dashboard").joinpath("page.html").read_text(encoding="utf-8")
        return cls(text, POLICY.format(script=_hash_of("script", text), style=_hash_of("style", text)))


def _hash_of(element: str, text: str) -> str:
    contents = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    assert len(contents) == 1, f"one <{element}> without attributes, or the policy does not fit"
    return f"'sha256-{b64encode(sha256(contents[0].encode()).digest()).decode()}'"
