"""Documents that are longer than the model's positions, warmed as the prompts that can hold them read them."""

from __future__ import annotations

import httpx
import pytest
from support.loaded import chatting_llama
from support.server import RunningServer


@pytest.mark.slow
def test_a_document_is_warmed_for_the_places_that_it_can_have() -> None:
    how = {"position_strategy": "auto", "max_model_len": 256, "max_chunk_tokens": 100, "repair": "none"}
    with RunningServer(loaded=chatting_llama(), **how) as server:
        for name, count in (("long", 40), ("short", 4)):
            text = " ".join(f"The {name} ferry of pier {number} leaves at nine." for number in range(count))
            assert httpx.put(f"{server.url}/v1/documents/{name}", json={"text": text}).status_code == 201
            warmed = httpx.post(f"{server.url}/v1/documents/{name}:warm", json={}, timeout=60).json()
            asked = {"messages": [{"role": "user", "content": "When?"}], "documents": [{"id": name}], "max_tokens": 1}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60).json()
            parts = reply["kvmosaic"]["documents"]
            assert all(part["reused_tokens"] == part["tokens"] for part in parts) and (len(parts) > 3) == (count == 40)
            expected = len(parts) if name == "long" else 2 * len(parts)
            assert warmed["data"][0]["chunks"] == expected, "a short one at the first place, and at a later one"
