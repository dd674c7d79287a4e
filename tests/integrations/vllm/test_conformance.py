"""vLLM behind the engine protocol: the same cases as for our own engine."""

from __future__ import annotations

import pytest
from support.engine_conformance import CASES
from support.vllm.conformance import conforms


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("case", CASES)
def test_vllm_conforms(vllm_engine, vllm_model, case: str, name: str) -> None:
    vllm_engine(name).call(conforms, case=case, folder=str(vllm_model(name)))
