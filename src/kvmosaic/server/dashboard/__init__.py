"""The dashboard: one HTML file at `/`, and what it shows, as a stream of events."""

from kvmosaic.server.dashboard.routes import router

__all__ = ["router"]
