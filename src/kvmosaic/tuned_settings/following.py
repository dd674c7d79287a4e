"""Following a profile: which file it is, whether it is for this model, and what it changes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidConfig, InvalidProfile
from kvmosaic.tuned_settings.file import read_profile
from kvmosaic.tuned_settings.profile import Profile

logger = logging.getLogger("kvmosaic")

PROFILE_NAME = "kvmosaic_profile.json"
"""The file next to a model's weights; with a GGUF file, the end of its name."""

ProfileChoice = bool | str | Path
"""True: the file next to the model, if there is one; False: none; or a file."""


def profile_choice(text: str) -> ProfileChoice:
    """A choice from an option or a variable: "auto", "none", or the path of a file."""
    return {"auto": True, "none": False}.get(text, text)


@dataclass(frozen=True, slots=True)
class ProfileUse:
    """What became of a profile."""

    config: ChunkCacheConfig
    """The settings that count."""
    profile: Profile | None = None
    """The one that is followed."""
    note: str = ""
    """In one sentence: what it sets, or why it is not followed; empty if there is none."""


@dataclass(frozen=True, slots=True)
class FoundProfile:
    """A profile that may be followed, once it is known which model it is for."""

    path: Path | None = None
    profile: Profile | None = None
    trouble: str = ""
    """Why the file next to the model cannot be used."""
    is_named: bool = False
    """Somebody asked for this file, and must be told if it cannot be used."""

    def used_for(self, fingerprint: str, config: ChunkCacheConfig) -> ProfileUse:
        """Follows it, if it is for this model.

        Raises:
            InvalidProfile: the caller named a file that is for another model.
        """
        if self.path is None:
            return ProfileUse(config)
        if self.profile is None:
            return self._ignored(config, self.trouble)
        if self.profile.fingerprint != fingerprint:
            why = (
                f"{self.path} was made for another model, dtype or quantization ({self.profile.model}, "
                f"{self.profile.fingerprint[:12]}; this one is {fingerprint[:12]}); tune again"
            )
            if self.is_named:
                raise InvalidProfile(why)
            return self._ignored(config, why)
        note = _told(self.path, self.profile, config)
        logger.info("%s", note)
        return ProfileUse(self.profile.applied_to(config), self.profile, note)

    def _ignored(self, config: ChunkCacheConfig, why: str) -> ProfileUse:
        note = f"the model's profile is not followed: {why}"
        logger.warning("%s", note)
        return ProfileUse(config, None, note)


def find_profile(place: Path | None, choice: ProfileChoice) -> FoundProfile:
    """Looks for a profile; reads it, so that what is wrong with a named one is told before weights are loaded.

    Args:
        place: the file next to the model, if there is one; None: the model has no place here.
        choice: see `ProfileChoice`.

    Raises:
        InvalidProfile: a file was named, and it cannot be used.
        InvalidConfig: something that is no choice.
    """
    if not isinstance(choice, bool | str | Path) or choice == "":
        raise InvalidConfig(f"profile must be True, False or the path of a file, got {choice!r:.80}")
    if choice is False or (choice is True and place is None):
        return FoundProfile()
    if not isinstance(choice, bool):
        path = Path(choice).expanduser()
        return FoundProfile(path, read_profile(path), is_named=True)
    assert place is not None
    if not place.exists():
        return FoundProfile()
    try:
        return FoundProfile(place, read_profile(place))
    except InvalidProfile as error:
        return FoundProfile(place, trouble=str(error))


def _told(path: Path, profile: Profile, config: ChunkCacheConfig) -> str:
    """The sentence about a profile that is followed."""
    text = (
        f"{path.name} of {profile.date} is followed: {profile.position_strategy} positions, documents saw: "
        f"{profile.chunk_context}, repair {profile.repair}; {profile.reached}"
    )
    if overruled := profile.overruled_by(config):
        kept = ", ".join(f"{name}={str(getattr(config, name))!r}" for name in overruled)
        text += f"; except for {kept}, which was asked for, so that what was measured does not hold"
    return text
