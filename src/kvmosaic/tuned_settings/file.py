"""Files of profiles: small JSON objects, read with care and written in one piece."""

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
    """The profile of a file.

    Raises:
        InvalidProfile: it cannot be read, is too large, is no JSON, or is no profile of this version.
    """
    try:
        if not path.is_file():  # a pipe would be waited for
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
    """Writes a profile in place of the one that may be there; others see the old one or the new one, never a part.

    Raises:
        InvalidProfile: the place cannot be written.
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
