"""The address that spans of requests are sent to, and whether the packages that send them are installed."""

from __future__ import annotations

from importlib import import_module
from urllib.parse import urlsplit

MAX_URL_CHARACTERS = 2_048
EXAMPLE = "http://localhost:4318/v1/traces"
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def read_trace_endpoint(url: str | None) -> str | None:
    """Checks the URL of an OTLP endpoint, and that spans can be sent.

    Raises:
        ValueError: not the full URL of an endpoint over HTTP, or OpenTelemetry is not installed.
    """
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port above 65535, half an IPv6 address
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        raise ValueError(f"must be the URL of an OTLP endpoint over HTTP, such as {EXAMPLE} (gRPC is not supported)")
    if "@" in parts.netloc:
        raise ValueError("must have no user and password: set OTEL_EXPORTER_OTLP_HEADERS, which is not logged")
    if not parts.path:
        raise ValueError(f"has no path; collectors take spans at /v1/traces, as in {EXAMPLE}")
    if not _is_installed():
        raise ValueError("tracing needs OpenTelemetry; install it with: pip install 'kvmosaic[otel]'")
    return url


def _is_installed() -> bool:
    try:
        for name in _MODULES:
            import_module(name)
    except ImportError:
        return False
    return True
