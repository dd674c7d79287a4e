"""The front over a stand-in for vLLM's own routes, with a folder of documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.vllm.front import App


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def client(app: App, tmp_path: Path) -> Any:
    return app.client(documents_dir=str(tmp_path), max_documents=5)
