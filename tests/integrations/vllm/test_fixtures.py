"""The engines of these tests, before anything is composed."""

from __future__ import annotations

import pytest
from support.vllm.asking import Ask, difference, documents
from support.vllm.models import MODELS
from support.vllm.own import own_answer

ASK = Ask(tuple(documents(1, 100)[0]))


@pytest.mark.parametrize("name", MODELS)
def test_without_the_plugin_vllm_and_our_engine_agree(vllm_engine, own_engine, name):
    engine = vllm_engine(name, plugin=False)
    theirs = engine.ask(ASK)
    ours = own_answer(own_engine(name), ASK)
    assert difference(theirs, ours) < 1e-4
    assert engine.ask(ASK).num_cached_tokens > 0
    state = engine.call("settle")
    assert state["free"] == state["num_blocks"] - 1 and not state["referenced"]
