"""Dashboard: one HTML file at `/` and the event stream of what it shows."""

from kvmosaic.server.dashboard.routes import router

__all__ = ["router"]
