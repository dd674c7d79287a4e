"""Profile files: read, written atomically, and found next to a model, with the settings that apply."""

from __future__ import annotations

import json
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidConfig, InvalidProfile
from kvmosaic.tuned_settings.profile import Profile

MAX_PROFILE_BYTES = 2**16
logger = logging.getLogger("kvmosaic")
PROFILE_NAME = "kvmosaic_profile.json"
"""The file next to a model's weights; for a GGUF file, the suffix of its name."""
ProfileChoice = bool | str | Path
"""True: the file next to the model, if there is one; False: none; or a file."""


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


def profile_choice(text: str) -> ProfileChoice:
    """Parses an option or a variable: "auto", "none", or the path of a file."""
    return {"auto": True, "none": False}.get(text, text)


@dataclass(frozen=True, slots=True)
class ProfileUse:
    """The outcome of a profile lookup."""

    config: ChunkCacheConfig
    """The effective settings."""
    profile: Profile | None = None
    """The profile that was applied."""
    note: str = ""
    """One sentence: what it sets, or why it is not applied; empty if there is none."""


@dataclass(frozen=True, slots=True)
class FoundProfile:
    """A profile that may be applied, once the model is known."""

    path: Path | None = None
    profile: Profile | None = None
    trouble: str = ""
    """Why the file next to the model cannot be used."""
    is_named: bool = False
    """This file was requested by name, so a failure to use it is an error."""

    @property
    def adapter(self) -> Path | None:
        """Folder of the adapter that it was measured with; None: the base model, or it is not followed."""
        if self.path is None or self.profile is None or not self.profile.adapter:
            return None
        return self.path.parent / Path(self.profile.adapter).expanduser()

    def used_for(self, fingerprint: str, config: ChunkCacheConfig, adapter_digest: str = "") -> ProfileUse:
        """Applies it, if it is for this model.

        Args:
            fingerprint: of the model.
            config: what the caller set.
            adapter_digest: of the adapter that computes prompts with documents; empty: the base model does.

        Raises:
            InvalidProfile: the caller named a file that is for another model or adapter.
        """
        if self.path is None:
            return ProfileUse(config)
        if self.profile is None:
            return self._ignored(config, self.trouble)
        if self.profile.fingerprint != fingerprint:
            why = (
                f"{self.path} was made for another model or dtype ({self.profile.model}, "
                f"{self.profile.fingerprint[:12]}; this one is {fingerprint[:12]}); tune again"
            )
            return self._refused(config, why)
        if self.profile.adapter_digest != adapter_digest:
            digests = self.profile.adapter_digest, adapter_digest
            made, now = (f"the adapter {each[:12]}" if each else "no adapter" for each in digests)
            return self._refused(config, f"{self.path} was made with {made}, and this model has {now}; tune again")
        note = _told(self.path, self.profile, config)
        logger.info("%s", note)
        return ProfileUse(self.profile.applied_to(config), self.profile, note)

    def _refused(self, config: ChunkCacheConfig, why: str) -> ProfileUse:
        if self.is_named:
            raise InvalidProfile(why)
        return self._ignored(config, why)

    def _ignored(self, config: ChunkCacheConfig, why: str) -> ProfileUse:
        note = f"the model's profile is not followed: {why}"
        logger.warning("%s", note)
        return ProfileUse(config, None, note)


def find_profile(place: Path | None, choice: ProfileChoice) -> FoundProfile:
    """Finds and reads a profile, so that errors in a named one are raised before weights are loaded.

    Args:
        place: the file next to the model, if there is one; None: the model is not a local one.
        choice: see `ProfileChoice`.

    Raises:
        InvalidProfile: a file was named, and it cannot be used.
        InvalidConfig: an invalid choice.
    """
    if not isinstance(choice, bool | str | Path) or choice == "":
        raise InvalidConfig(f"profile must be True, False or the path of a file, got {choice!r:.80}")
    if choice is False or (choice is True and place is None):
        return FoundProfile()
    if not isinstance(choice, bool):
        path = Path(choice).expanduser()
        return _with_adapter(FoundProfile(path, read_profile(path), is_named=True))
    assert place is not None
    if not place.exists():
        return FoundProfile()
    try:
        return _with_adapter(FoundProfile(place, read_profile(place)))
    except InvalidProfile as error:
        return FoundProfile(place, trouble=str(error))


def _with_adapter(found: FoundProfile) -> FoundProfile:
    """The same, once its adapter's folder is seen to exist."""
    if found.adapter is not None and not found.adapter.is_dir():
        raise InvalidProfile(
            f"{found.path} was made with the adapter in {found.adapter}, which is not there; put it there, or tune "
            "again"
        )
    return found


def _told(path: Path, profile: Profile, config: ChunkCacheConfig) -> str:
    """The sentence about an applied profile."""
    text = (
        f"{path.name} of {profile.date} is followed: {profile.position_strategy} positions, documents saw: "
        f"{profile.chunk_context}, repair {profile.repair}"
        f"{f', adapter {profile.adapter}' if profile.adapter else ''}; {profile.reached}"
    )
    if overruled := profile.overruled_by(config):
        kept = ", ".join(f"{name}={str(getattr(config, name))!r}" for name in overruled)
        text += f"; except for {kept}, which was asked for, so that what was measured does not hold"
    return text
