"""Authentication middleware: every path needs a key, except a short list."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from kvmosaic.server.process.logs import PROBES
from kvmosaic.server.settings import ServerSettings
from kvmosaic.server.tenants.access import Tenants, authorization_of
from kvmosaic.web.errors import ApiError, reply_of_error
from kvmosaic.web.request_body import READING

OPEN_PATHS = frozenset({*PROBES, "/", "/favicon.ico", "/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css"})
"""Paths that need no key: the probes, the dashboard's page and that of the API, which hold no data."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class AuthenticationMiddleware:
    """Identifies the tenant before routing, so that no route can be forgotten."""

    def __init__(self, app: ASGIApp, tenants: Tenants, settings: ServerSettings) -> None:
        self._app = app
        self._tenants = tenants
        self._settings = settings
        self._names = LOOPBACK_NAMES | {name.lower() for name in (settings.host, *settings.allowed_hosts)}
        self._checks_host = _is_loopback(settings.host) and not tenants.needs_key and "*" not in settings.allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or replies with 401 or 403."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as refusal:
                return await reply_of_error(refusal, scope)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        connection = HTTPConnection(scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["method"] in READING and path in OPEN_PATHS:
            return
        connection.state.tenant = self._tenants.identify(authorization_of(connection.headers))
        if self._checks_host:
            self._check_host(connection)
        if scope["method"] not in READING:
            self._check_origin(connection)

    def _check_host(self, connection: HTTPConnection) -> None:
        """Refuses foreign Host headers: without keys, a page could point its name at this address (DNS rebinding)."""
        host = connection.headers.get("host")
        if host is None or _name_of(host) in self._names:  # browsers always send it
            return
        names = f"this server answers to localhost and {self._settings.host}, not to {host[:255]!r}"
        raise ApiError(403, f"{names}; see --allowed-hosts, or set a key", code="host")

    def _check_origin(self, connection: HTTPConnection) -> None:
        """Refuses foreign origins: without keys, a page of any site could make a visitor's browser change the store."""
        origin = connection.headers.get("origin")
        if origin is None or self._tenants.needs_key:
            return
        allowed = self._settings.allowed_origins
        if "*" in allowed or origin in allowed or urlsplit(origin).netloc == connection.headers.get("host"):
            return
        raise ApiError(403, "pages of other sites may not use this server; see --allowed-origins", code="origin")


_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,255}))(?::[0-9]{1,5})?")


def _name_of(host: str) -> str | None:
    """Returns the name in a Host header, without its port; None if malformed."""
    match = _HOST.fullmatch(host)
    return None if match is None else (match[1] or match[2]).lower()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
