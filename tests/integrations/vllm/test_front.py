"""The front against vLLM's own requests, tools and templates."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.asking import DOCUMENTS, MESSAGES

from kvmosaic.api.errors import ApiError
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.documents import DocumentStore
from kvmosaic.vllm.contract import How
from kvmosaic.vllm.front.body_prompt import Renderer
from kvmosaic.vllm.front.body_rewrite import rewritten
from kvmosaic.vllm.front.served_model import ServedModel, find_model, template_tools

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer(vllm_model: Callable[[str], Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(vllm_model("llama"))


def body_of(tokenizer: Any, route: Any, **body: Any) -> dict[str, Any]:
    front = Renderer(ServedModel(tokenizer, len(tokenizer), 4096), ChunkCacheConfig(), DocumentStore())
    found = rewritten(json.dumps(body).encode(), route, lambda: front, How())
    assert found is not None
    read: dict[str, Any] = json.loads(found.content)
    return read


def test_vllm_reads_token_ids_and_borders_of_a_conversation(tokenizer: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    marked = {"type": "text", "text": "A letter.", "cache_control": {"type": "ephemeral"}}
    messages = [MESSAGES[0], {"role": "user", "content": [marked, {"type": "text", "text": "What?"}]}]
    asked = {"messages": messages, "documents": DOCUMENTS, "tools": [TOOL], "tool_choice": "none"}
    with pytest.raises(ApiError, match="does not show tools"):
        body_of(tokenizer, "chat", **asked)
    showing = copy.copy(tokenizer)
    showing.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tokenizer.chat_template
    body = body_of(showing, "chat", **asked)
    request = ChatCompletionRequest.model_validate(body)
    params = request.kv_transfer_params
    assert params == body["kv_transfer_params"] and len(params["prompt_token_ids"]) > 20
    sampling = request.to_sampling_params(4, {})
    assert sampling.extra_args["kv_transfer_params"]["kvmosaic"] == params["kvmosaic"]


def test_vllm_reads_token_ids_and_borders_of_a_text(tokenizer: Any) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    body = body_of(tokenizer, "completion", prompt="What?", documents=["One.", "Two."], max_tokens=3)
    request = CompletionRequest.model_validate(body)
    assert request.prompt == body["prompt"]
    sampling = request.to_sampling_params(3, {})
    assert sampling.extra_args["kv_transfer_params"] == body["kv_transfer_params"]


def test_the_text_is_what_vllm_itself_would_write(tokenizer: Any) -> None:
    from vllm.renderers.hf import safe_apply_chat_template

    documents = [{"title": each.get("title", ""), "text": each["text"]} for each in DOCUMENTS]
    text = safe_apply_chat_template(
        SimpleNamespace(), tokenizer, MESSAGES, chat_template=tokenizer.chat_template, tokenize=False,
        documents=documents, add_generation_prompt=True,
    )  # fmt: skip
    body = body_of(tokenizer, "chat", messages=MESSAGES, documents=DOCUMENTS)
    assert tokenizer.decode(body["kv_transfer_params"]["prompt_token_ids"]) == text


@pytest.mark.parametrize("effort", [None, "none", "high"])
@pytest.mark.parametrize("given", [None, {"enable_thinking": True}, {"reasoning_effort": "own"}])
@pytest.mark.parametrize("defaults", [{}, {"enable_thinking": False, "reasoning_effort": "mine"}])
def test_variables_are_what_vllm_itself_would_set(tokenizer: Any, effort: Any, given: Any, defaults: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = {"messages": MESSAGES, "reasoning_effort": effort, "chat_template_kwargs": given}
    showing = copy.copy(tokenizer)
    showing.chat_template = tokenizer.chat_template + "[{{ reasoning_effort }} {{ enable_thinking }}]"
    params = ChatCompletionRequest.model_validate(asked).build_chat_params(None, "auto").with_defaults(defaults)
    theirs = {name: params.chat_template_kwargs.get(name) for name in ("reasoning_effort", "enable_thinking")}
    shown = " ".join("" if value is None else str(value) for value in theirs.values())
    model = ServedModel(showing, len(showing), 4096, template_variables=defaults)
    front = Renderer(model, ChunkCacheConfig(), DocumentStore())
    prompt = front.chat({**asked, "documents": DOCUMENTS})
    assert prompt is not None
    token_ids = [token for segment in prompt.segments for token in segment.token_ids]
    assert showing.decode(token_ids).endswith(f"[{shown}]")


def test_tools_are_shown_as_vllm_shows_them() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    assert template_tools([TOOL]) == [ChatCompletionToolsParam.model_validate(TOOL).model_dump()]
    assert template_tools([3]) == [3]


def test_the_model_is_found_where_vllm_keeps_it(tokenizer: Any) -> None:
    from vllm.renderers.online_renderer import OnlineRenderer

    door = OnlineRenderer.__new__(OnlineRenderer)
    door.renderer = SimpleNamespace(tokenizer=tokenizer)
    door.model_config = SimpleNamespace(get_vocab_size=lambda: 10, max_model_len=20)
    door.chat_template, door.default_chat_template_kwargs = "{{ x }}", {"a": 1}
    door.reasoning_effort_map = {"high": "max"}  # of vLLM 0.33
    model = find_model(SimpleNamespace(online_renderer=door))
    assert model.takes_chat_tokens
    assert (model.vocab_size, model.max_positions, model.chat_template) == (10, 20, "{{ x }}")
    assert model.tokenizer is not tokenizer and model.template_variables == {"a": 1}
    assert model.efforts == {"high": "max"}
