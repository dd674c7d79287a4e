"""Schemathesis against the OpenAPI document: thousands of requests, good and bad, and never a 5xx."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
from support.server import RunningServer

NUM_CASES = 2_000
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
"""Not among them: positive_data_acceptance. A body that fits its schema may still be refused, for example white space
as a text, a context that is too long, or the name of a document that nobody has stored."""


def test_thousands_of_generated_requests_are_answered_as_documented(tmp_path: Path) -> None:
    with RunningServer(max_model_len=192, max_num_seqs=16, chunk_cache_size="4MiB", strict=True) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        command += ["--checks", ",".join(CHECKS), "--seed", "7", "--max-examples", "10", "--no-color"]
        command += ["--generation-database", "none", "--suppress-health-check", "all", "--request-timeout", "240"]
        # thousands of documents are computed in one request: a minute on a busy CPU
        # a list that is longer than its limit may make a body that is longer than its limit
        statuses = "[400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429]"
        config = f"[checks.negative_data_rejection]\nexpected-statuses = {statuses}\n"
        (tmp_path / "schemathesis.toml").write_text(config)
        command += ["--exclude-path", "/sleep"]  # whoever falls asleep answers nobody
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900, check=False)
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
        generated = re.search(r"([\d,]+) generated", result.stdout)
        assert generated is not None, result.stdout[-2000:]
        assert int(generated[1].replace(",", "")) >= NUM_CASES, result.stdout[-2000:]
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        server.call(server.services.engine.call, lambda engine: engine.check_invariants())
