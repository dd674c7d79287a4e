from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.asking import DOCUMENTS, MESSAGES, QUESTION
from support.families import build
from support.nasty import nasty_texts
from support.tokenizers import DEFAULT_SYSTEM, PLACING_TEMPLATES, make_tokenizer

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig
from kvmosaic.api.documents import DocumentFields
from kvmosaic.documents import DocumentStore
from kvmosaic.errors import InvalidMessages
from kvmosaic.model import LoadedModel
from kvmosaic.server.generation.prompts import Rendering, chat_prompt
from kvmosaic.server.tenants import Tenant

TENANT = Tenant("t")


def services_over(template, separator=None):
    tokenizer = make_tokenizer(template)
    module = build("llama", torch.float32, vocab_size=len(tokenizer), max_position_embeddings=4096)
    llm = LLM(
        LoadedModel.from_module(module, tokenizer),
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size="1MiB"),
        engine_config=EngineConfig(request_cache_size="4MiB"),
        self_check=False,
    )
    return SimpleNamespace(
        llm=llm, settings=SimpleNamespace(chunk_separator=separator, strict=False), documents=DocumentStore()
    )


def kinds(composed):
    return [str(segment.kind) for segment in composed.prompt.segments]


def compose(services, messages=MESSAGES, documents=DOCUMENTS, rendering=None):
    body = DocumentFields.model_validate({"documents": documents})
    return chat_prompt(services, TENANT, body, messages, rendering or Rendering())


def test_a_model_without_a_template_takes_one_question_as_text():
    services = services_over(None)
    assert kinds(compose(services)) == ["system", "chunk", "chunk", "chunk", "question"]
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    assert compose(services, parts).prompt == services.llm.compose(parts, documents=DOCUMENTS)
    with pytest.raises(InvalidMessages, match="chat_template"):
        compose(services, documents=None)
    with pytest.raises(InvalidMessages, match="no chat template"):
        compose(services, rendering=Rendering(template_options={"a": 1}))


def test_variables_reach_the_template_and_nothing_else_does():
    services = services_over("{{ messages[0].content }}{% if loud %}!{% endif %}")
    loud = compose(services, MESSAGES[1:], None, Rendering(template_options={"loud": True}))
    assert loud.prompt.text == QUESTION + "!"
    assert compose(services, MESSAGES[1:], None).prompt.text == QUESTION
    for name in ("tokenize", "chat_template", "tools", "eos_token", "conversation", "a b", "__class__ "):
        with pytest.raises(InvalidMessages, match="cannot set"):
            compose(services, MESSAGES[1:], None, Rendering(template_options={name: True}))


@pytest.mark.parametrize("name", [*PLACING_TEMPLATES, "default_system"])
def test_no_text_changes_what_the_template_writes(name):
    services = services_over(PLACING_TEMPLATES.get(name, DEFAULT_SYSTEM))
    control = set(services.llm.model.tokenizer.all_special_ids)

    def shape(documents, marked, question):
        parts = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in marked]
        messages = [MESSAGES[0], {"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
        prompt = compose(services, messages, documents).prompt
        return [
            (segment.kind, [token for token in segment.token_ids if token in control]) for segment in prompt.segments
        ]

    texts = nasty_texts(visible=True)

    @settings(max_examples=15)
    @given(st.lists(texts, max_size=3), st.lists(texts, max_size=2), texts)
    def check(documents, marked, question):
        assert shape(documents, marked, question) == shape(["x"] * len(documents), ["x"] * len(marked), "x")

    check()
