"""HTTP server: an OpenAI-compatible API whose prompts are composed from cached documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.server.app import build_app
    from kvmosaic.server.read import read_settings
    from kvmosaic.server.services import Services, build_services
    from kvmosaic.server.settings import ServerSettings

__all__ = ["ServerSettings", "Services", "build_app", "build_services", "check_installed", "read_settings"]

_PACKAGES = ("fastapi", "uvicorn", "pydantic_settings", "yaml", "prometheus_client", "llguidance")

# Imported on first use, so that `kvmosaic serve --help` imports neither torch nor fastapi.
_HOMES = {
    "app": ("build_app",),
    "read": ("read_settings",),
    "services": ("Services", "build_services"),
    "settings": ("ServerSettings",),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)


def check_installed() -> None:
    """Raises InvalidConfig if a package that only the server needs is missing."""
    from importlib.util import find_spec

    from kvmosaic.errors import InvalidConfig, pip_install

    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise InvalidConfig(f"the server needs {', '.join(missing)}; install it with: {pip_install('server')}")
