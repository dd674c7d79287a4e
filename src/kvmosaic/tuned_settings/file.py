"""Profile files: small JSON objects, validated on reading and written atomically."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kvmosaic.errors import InvalidProfile
from kvmosaic.tuned_settings.profile import Profile

MAX_PROFILE_BYTES = 2**16


def read_profile(path: Path) -> Profile:
    """Reads a profile from a file.

    Raises:
        InvalidProfile: it cannot be read, is too large, is not JSON, or is not a profile of this version.
    """
    try:
        if not path.is_file():  # reading a pipe would block
            raise InvalidProfile(f"there is no file {path}; `kvmosaic tune` writes one")
        with path.open("rb") as file:
            content = file.read(MAX_PROFILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise InvalidProfile(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_PROFILE_BYTES:
        raise InvalidProfile(f"{path} has more than {MAX_PROFILE_BYTES} bytes; a profile is smaller")
    try:
        read = json.loads(content.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise InvalidProfile(f"{path} is not JSON; write it with `kvmosaic tune`") from None
    try:
        return Profile.from_dict(read)
    except InvalidProfile as error:
        raise InvalidProfile(f"{path}: {error}") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Writes a profile, replacing an existing one; readers see the old one or the new one, never a part.

    Raises:
        InvalidProfile: the path cannot be written.
    """
    text = json.dumps(profile.to_dict(), indent=2, ensure_ascii=False) + "\n"
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            with beside.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidProfile(f"cannot write {path}: {why}; name another file with --profile FILE") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
