"""What is repaired where neither a request nor tuned settings say anything."""

DEFAULT_REPAIR = "first(8)"
