"""Tuned settings: a model's profile for placing and repairing documents, as measured by `kvmosaic tune`."""

from kvmosaic.tuned_settings.lookup import (
    MAX_PROFILE_BYTES,
    PROFILE_NAME,
    FoundProfile,
    ProfileChoice,
    ProfileUse,
    find_profile,
    profile_choice,
    read_profile,
    write_profile,
)
from kvmosaic.tuned_settings.profile import SETTINGS, Goal, Profile, TaskResult
