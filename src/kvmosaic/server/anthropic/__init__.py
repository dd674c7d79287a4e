"""Routes of Anthropic's API: messages and the number of their tokens."""

from __future__ import annotations

from kvmosaic.server.anthropic.messages import router

__all__ = ["router"]
