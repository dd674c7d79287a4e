"""An operator: a file of settings, a key, probes, metrics, an orderly end."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from support.server import serving

pytestmark = pytest.mark.slow


def test_a_server_with_a_file_of_settings_a_key_and_metrics(home: Path) -> None:
    Path("kvmosaic.yaml").write_text("chunk_cache_size: 64MiB\nserved_model_name: [docs]\nmax_num_seqs: 8\n")
    with serving("reader", "--config", "kvmosaic.yaml", "--api-key", "a-long-enough-key") as served:
        assert httpx.get(f"{served.url}/readyz").is_success
        body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
        refused = httpx.post(f"{served.url}/v1/chat/completions", json=body)
        assert refused.status_code == 401
        headers = {"Authorization": "Bearer a-long-enough-key"}
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert reply.json()["model"] == "docs"
        assert "kvmosaic:chunk_lookups_total" in httpx.get(f"{served.url}/metrics", headers=headers).text
