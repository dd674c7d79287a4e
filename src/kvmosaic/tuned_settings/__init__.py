"""A model's profile: how its documents are placed and repaired, as `kvmosaic tune` found by asking it."""

from kvmosaic.tuned_settings.file import MAX_PROFILE_BYTES, read_profile, write_profile
from kvmosaic.tuned_settings.following import (
    PROFILE_NAME,
    FoundProfile,
    ProfileChoice,
    ProfileUse,
    find_profile,
    profile_choice,
)
from kvmosaic.tuned_settings.profile import SETTINGS, Goal, Profile, TaskResult

__all__ = [
    "MAX_PROFILE_BYTES",
    "PROFILE_NAME",
    "SETTINGS",
    "FoundProfile",
    "Goal",
    "Profile",
    "ProfileChoice",
    "ProfileUse",
    "TaskResult",
    "find_profile",
    "profile_choice",
    "read_profile",
    "write_profile",
]
