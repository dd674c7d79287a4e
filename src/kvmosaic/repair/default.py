"""Default repair policy, without a request's or tuned settings."""

DEFAULT_REPAIR = "first(8)"
