from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from support.server import RunningServer

from kvmosaic.server.middleware import HEADERS, OPEN_PATHS

KEY, ACME, OTHER = "sk-the-operator", "sk-acme-1234", "sk-umbra-1234"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with keys."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(f"- {{key: {ACME}, tenant: acme, quota: 16MiB}}\n- {{key: {OTHER}, tenant: umbra}}\n")
    with RunningServer(api_key=(KEY,), keys_file=Path(path)) as server:

        @server.app.get("/test/forgotten")
        async def forgotten() -> str:
            return "secret"

        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def walk(routes: Iterable[Any]) -> Iterator[Any]:
    """All routes, those of included routers among them."""
    for route in routes:
        if hasattr(route, "original_router"):
            yield from walk(route.original_router.routes)
        else:
            assert hasattr(route, "methods"), f"{route} answers something this test does not ask for"
            yield route


def addresses(server: RunningServer) -> list[tuple[str, str]]:
    """Every method and path of the app, FastAPI's own among them."""
    routes = list(walk(server.app.routes))
    assert sum(isinstance(route, APIRoute) for route in routes) > 20
    paths = [(method, re.sub(r"{\w+(:\w+)?}", "x", route.path)) for route in routes for method in route.methods]
    documented = [
        (method.upper(), re.sub(r"{\w+}", "x", path))
        for path, item in server.app.openapi()["paths"].items()
        for method in item
    ]
    return sorted({*paths, *documented})


def test_no_route_answers_without_a_key(closed: RunningServer) -> None:
    found = addresses(closed)
    assert (
        ("GET", "/test/forgotten") in found
        and ("GET", "/openapi.json") in found
        and ("GET", "/dashboard/events") in found
    )
    with httpx.Client(base_url=closed.url) as client:
        for method, path in found:
            reply = client.request(method, path)
            if path in OPEN_PATHS and method in ("GET", "HEAD"):
                assert reply.status_code != 401, path
                continue
            assert reply.status_code == 401, (method, path)
            if method != "HEAD":
                error = reply.json()["error"]
                assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")
            assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["//livez", "/livez/", "/LIVEZ", "/livez/../openapi.json", "/%6civez/x", "/nothing"])
def test_only_the_exact_open_paths_are_open(closed: RunningServer, path: str) -> None:
    assert httpx.get(closed.url + path).status_code == 401


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer  x y", f"Basic {KEY}", f"Bearer {KEY}x", KEY, f"Bearer {'x' * 5_000}", "Bearer \xff"],
)
def test_wrong_keys_are_refused(closed: RunningServer, header: str) -> None:
    reply = httpx.get(closed.url + "/openapi.json", headers={"Authorization": header.encode("latin-1")})
    assert reply.status_code == 401
    assert KEY not in reply.text


@pytest.mark.parametrize("key", [KEY, ACME, OTHER])
def test_every_key_opens(closed: RunningServer, key: str) -> None:
    assert httpx.get(closed.url + "/openapi.json", headers=bearer(key)).status_code == 200


def test_keys_belong_to_tenants(closed: RunningServer) -> None:
    tenants = closed.services.tenants
    assert [tenants.identify(f"bearer {key}").name for key in (KEY, ACME, OTHER)] == ["default", "acme", "umbra"]
    assert tenants.identify(f"Bearer {ACME}").quota_bytes == 16 * 2**20
    assert [tenant.name for tenant in tenants] == ["default", "acme", "umbra"]


def test_only_admins_read_the_metrics(closed: RunningServer) -> None:
    assert httpx.get(closed.url + "/metrics", headers=bearer(KEY)).status_code == 200
    reply = httpx.get(closed.url + "/metrics", headers=bearer(ACME))
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_only")


@pytest.mark.parametrize("path", ["/livez", "/openapi.json", "/nothing"])
def test_every_reply_has_an_id_and_careful_headers(server: RunningServer, path: str) -> None:
    reply = httpx.get(server.url + path)
    assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["x-request-id"])
    assert all(name in reply.headers for name in HEADERS)


def test_refusals_have_them_too(closed: RunningServer) -> None:
    reply = httpx.get(closed.url + "/openapi.json", headers={"X-Request-Id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1" and reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("given", ["x" * 129, "a b", "a\xff", "<script>"])
def test_request_id_that_is_no_id_is_replaced(server: RunningServer, given: str) -> None:
    reply = httpx.get(server.url + "/livez", headers={"X-Request-Id": given.encode("latin-1")})
    assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["x-request-id"])


def test_pages_of_other_sites_cannot_change_anything(server: RunningServer) -> None:
    for origin, status in (("http://evil.example", 403), ("null", 403), (server.url, 404)):
        reply = httpx.post(server.url + "/v1/nothing", headers={"Origin": origin})
        assert reply.status_code == status, origin


def test_pages_of_other_sites_are_told_nothing_unless_allowed(server: RunningServer) -> None:
    origin = "https://example.org"
    preflight = {"Origin": origin, "Access-Control-Request-Method": "PATCH"}
    assert "access-control-allow-origin" not in httpx.options(server.url + "/v1/models", headers=preflight).headers
    with RunningServer(allowed_origins=(origin,), api_key=(KEY,)) as allowing:
        reply = httpx.options(allowing.url + "/v1/models", headers=preflight)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, origin)
        refused = httpx.get(allowing.url + "/openapi.json", headers={"Origin": origin})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
        other = httpx.options(allowing.url + "/v1/models", headers={**preflight, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_api_document_says_who_needs_a_key(server: RunningServer, closed: RunningServer) -> None:
    for running, needed in ((server, []), (closed, [{"key": []}])):
        paths = httpx.get(running.url + "/openapi.json", headers=bearer(KEY)).json()["paths"]
        assert paths["/livez"]["get"]["security"] == []
        assert paths["/v1/chat/completions"]["post"]["security"] == needed


def test_every_operation_has_a_name_of_its_own(server: RunningServer) -> None:
    paths = server.app.openapi()["paths"]
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(names) == len(set(names)) > 15
    assert not any("422" in operation["responses"] for path in paths.values() for operation in path.values())


CLIENT = httpx.Client(trust_env=False)
"""One for all: making one takes longer than asking."""


@pytest.fixture(scope="module", autouse=True)
def _closed_client() -> Iterator[None]:
    yield
    CLIENT.close()


def asked_as(server: RunningServer, host: str, path: str = "/v1/models", **headers: str) -> httpx.Response:
    return CLIENT.get(server.url + path, headers={"Host": host, **headers})


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:8000"])
def test_server_without_keys_answers_to_its_own_names(server: RunningServer, host: str) -> None:
    assert asked_as(server, host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", "[", ""),
        *("localhost:80:90", "localhost:", "localhost:x", "evil.example@localhost", "localhost/evil", "localhost#evil"),
    ],
)
def test_site_that_points_its_name_at_this_machine_is_refused(server: RunningServer, host: str) -> None:
    for path in ("/v1/models", "/openapi.json", "/dashboard/events", "/metrics"):
        reply = asked_as(server, host, path, Origin=f"http://{host}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host"), path
    assert "--allowed-hosts" in reply.json()["error"]["message"]


def test_server_with_keys_answers_to_any_name(closed: RunningServer) -> None:
    assert asked_as(closed, "kv.example.org", **bearer(KEY)).status_code == 200


def test_allowed_hosts_are_answered() -> None:
    with RunningServer(allowed_hosts=("kv.example.org",)) as server:
        assert asked_as(server, "KV.example.org:443").status_code == 200
        assert asked_as(server, "localhost").status_code == 200
        assert asked_as(server, "evil.example").status_code == 403
    with RunningServer(allowed_hosts=("*",)) as server:
        assert asked_as(server, "anything.example").status_code == 200
    with RunningServer(host="0.0.0.0") as server:
        assert asked_as(server, "anything.example").status_code == 200
