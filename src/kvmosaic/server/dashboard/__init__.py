"""Dashboard: one HTML file at `/` and the event stream of what it shows; and Swagger UI at `/docs`."""

from kvmosaic.server.dashboard.routes import docs_router, router

__all__ = ["docs_router", "router"]
