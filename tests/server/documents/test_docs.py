"""What the page about documents shows, run against the server."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from server.documents.world import KEYS, DocumentServer

from kvmosaic.prompt.document import VERBS
from kvmosaic.server.middleware import OPEN_PATHS
from kvmosaic.server.settings import ServerSettings
from kvmosaic.server.tenants import Tenants
from kvmosaic.server.tenants.keys import read_keys_file

PAGES = Path(__file__).parents[3] / "docs" / "server"


def test_python_of_the_page_runs_from_top_to_bottom(
    server: DocumentServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    text = (PAGES / "documents.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    code = code.replace("http://localhost:8000", server.url).replace("Bearer none", f"Bearer {KEYS['alpha']}")
    code = code.replace('api_key="none"', f'api_key="{KEYS["alpha"]}"')
    (tmp_path / "blocks.py").write_text(code.replace("timeout=60", "timeout=60, trust_env=False"))
    runpy.run_path(str(tmp_path / "blocks.py"))["client"].close()
    assert "Otto Bramble" in capsys.readouterr().out


def test_page_names_every_route_and_every_verb(server: DocumentServer) -> None:
    text = (PAGES / "documents.md").read_text()
    for path, methods in server.app.openapi()["paths"].items():
        if path.startswith("/v1/documents"):
            for method in methods:
                assert f"{method.upper()} {path.replace('document_id', 'id')}" in text
    assert all(f"`:{verb}`" in text for verb in VERBS)


def test_page_says_the_limits_that_the_server_has() -> None:
    text, settings = (PAGES / "documents.md").read_text(), ServerSettings()
    assert settings.document_ttl is None and settings.max_documents == 10_000
    assert settings.max_documents_bytes == 256 * 2**20
    for flag in ("--document-ttl", "--max-documents", "--max-documents-bytes", "--max-body-bytes", "--long-chunks"):
        assert flag in text and flag[2:].replace("-", "_") in ServerSettings.model_fields


def test_keys_file_of_the_page_about_tenants_is_one(tmp_path: Path) -> None:
    text = (PAGES / "tenants.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "keys.yaml").write_text(block)
    tenants = Tenants(read_keys_file(tmp_path / "keys.yaml"))
    assert {each.name: (each.quota_bytes, each.is_admin) for each in tenants} == {
        "acme": (512 * 2**20, False),
        "bolt": (2 * 2**30, False),
        "operations": (None, True),
    }
    assert tenants.identify("Bearer test").name == "bolt"
    for flag in re.findall(r"`--([a-z-]+)", text):
        assert flag.replace("-", "_") in ServerSettings.model_fields, flag
    for path in OPEN_PATHS:
        is_of_page = path.startswith("/docs/")  # what `/docs` loads
        assert is_of_page or f"`{path}`" in text
