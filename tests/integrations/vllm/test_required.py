"""`--require-composing`: vLLM does not start where documents cannot be composed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.vllm.asking import compose, documents
from support.vllm.forking import CONNECTOR, Fork
from support.vllm.serving import ForkedServer, server_arguments

from kvmosaic.vllm.settings import REQUIRED_VARIABLE

REQUIRED = {REQUIRED_VARIABLE: "1"}
OFF = "--no-enable-prefix-caching"
IN_CONNECTOR = (
    f"--kv-transfer-config={json.dumps({**CONNECTOR, 'kv_connector_extra_config': {'require_composing': True}})}"
)


def ended(model: Path, *arguments: str, environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of a server that does not come up."""

    def main(end: Any) -> None:
        from support.vllm.serving import serve

        serve([*server_arguments(model), *arguments])

    fork = Fork(main, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment})
    try:
        _, status = os.waitpid(fork.process_id, 0)
        return os.waitstatus_to_exitcode(status), Path(fork.log).read_text(errors="replace")
    finally:
        fork.stop()


@pytest.mark.parametrize(
    ("arguments", "environment"), [((OFF,), REQUIRED), ((OFF, IN_CONNECTOR), {})], ids=["variable", "connector"]
)
def test_a_server_that_cannot_compose_exits_with_the_reason(vllm_model, arguments, environment):
    status, said = ended(vllm_model("llama"), *arguments, environment=environment)
    assert status == 1
    assert "documents cannot be composed here, and --require-composing (KVMOSAIC_REQUIRE_COMPOSING) is set" in said
    assert "prefix caching is off" in said


def test_a_server_that_can_compose_starts(vllm_model):
    server = ForkedServer(vllm_model("llama"), environment=REQUIRED)
    try:
        system, *chunks, question = documents(60, 40, 70, 65, 19)
        ask = compose(system, chunks, question)
        assert ask.composition is not None
        reply = server.complete(list(ask.token_ids), kv_transfer_params=ask.composition.to_params())
        assert not reply["kv_transfer_params"]["kvmosaic"]["bypass"]
    finally:
        server.stop()


def test_without_it_the_server_starts_and_answers_ordinary_prompts(vllm_model):
    server = ForkedServer(vllm_model("llama"), OFF)
    try:
        params = {"kvmosaic": {"system": 2, "chunks": [3, 4], "repair": 0}}
        reply = server.complete([*range(5, 20)], kv_transfer_params=params)
        assert "prefix caching is off" in reply["kv_transfer_params"]["kvmosaic"]["bypass"]
    finally:
        server.stop()
