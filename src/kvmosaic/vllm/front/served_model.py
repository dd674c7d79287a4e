"""Served model: tokenizer, template and limits of a running vLLM, read from its app's state."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.api.errors import ApiError
from kvmosaic.prompt import PromptEncoder
from kvmosaic.prompt.settings import PromptSettings
from kvmosaic.vllm.contract import ModelFacts
from kvmosaic.vllm.plugin import NAME

_PLACES = ("online_renderer", "openai_serving_render")
"""Attributes in which vLLM 0.32 and 0.23 keep the conversation renderer."""


@dataclass(frozen=True)
class ServedModel:
    """Tokenizer, template and limits of one served model."""

    tokenizer: Any
    vocab_size: int
    max_positions: int | None
    chat_template: str | None = None
    """Overrides the tokenizer's own."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    efforts: Mapping[str, str] = field(default_factory=dict)
    """Values of the template for efforts of requests (`--reasoning-effort-map`, vLLM 0.33)."""
    takes_other_templates: bool = False
    takes_chat_tokens: bool = True
    """Whether this vLLM takes token ids for a conversation that was rendered elsewhere."""
    reasons: bool = False
    """Whether vLLM separates the reasoning from the answers."""
    config: Any = None
    has_connector: bool = True
    """Whether our connector runs in its engine."""

    @property
    def facts(self) -> ModelFacts:
        """What decides how its documents are placed."""
        return ModelFacts(self.max_positions) if self.config is None else ModelFacts.of(self.config)

    def encoder(self, settings: PromptSettings) -> PromptEncoder:
        """The encoder of its prompts."""
        return PromptEncoder(self.tokenizer, settings, vocab_size=self.vocab_size, max_positions=self.max_positions)

    def rendering(self, wanted: str | None = None, tools: Any = None) -> tuple[str, dict[str, Any]]:
        """The template that vLLM would use ("": none), and the options of `encode_chat` that make it the one."""
        options: dict[str, Any] = {"tools": template_tools(tools)} if tools else {}
        template = self.template_for(wanted, options.get("tools"))
        if template is not None:
            options["chat_template"] = template
        return template or str(getattr(self.tokenizer, "chat_template", None) or ""), options

    def template_for(self, wanted: str | None, tools: Any) -> str | None:
        """The template that vLLM would use; None: the tokenizer's own."""
        wanted = wanted or self.chat_template
        if self.config is None:
            return wanted
        try:
            from vllm.renderers.hf import resolve_chat_template

            found = resolve_chat_template(self.tokenizer, wanted, tools, model_config=self.config)
        except Exception:  # another vLLM, or a tokenizer that is not from transformers
            return wanted
        return None if found is None else str(found)


def find_model(state: Any) -> ServedModel:
    """Reads the served model from the state of vLLM's app.

    Raises:
        ApiError: 503, before the app is up; 501, a model whose prompts only vLLM itself can render.
    """
    door = next((found for name in _PLACES if (found := getattr(state, name, None)) is not None), None)
    if door is None:
        raise ApiError(503, "this server does not answer prompts yet, or not at all; ask again, or another server")
    tokenizer = getattr(door.renderer, "tokenizer", None)
    if getattr(door, "use_harmony", False) or not hasattr(tokenizer, "added_tokens_decoder"):
        raise ApiError(
            501, "the prompts of this model are written by vLLM alone; send the documents as text of a message"
        )
    config = door.model_config
    return ServedModel(
        tokenizer=copy.deepcopy(tokenizer),  # vLLM's threads use the original
        vocab_size=config.get_vocab_size(),
        max_positions=config.max_model_len,
        chat_template=getattr(door, "chat_template", None),
        template_variables=dict(getattr(door, "default_chat_template_kwargs", None) or {}),
        efforts=dict(getattr(door, "reasoning_effort_map", None) or {}),
        takes_other_templates=bool(getattr(door, "trust_request_chat_template", False)),
        takes_chat_tokens=_takes_chat_tokens(type(door)),
        reasons=getattr(door, "reasoning_parser", None) is not None,
        config=config,
        has_connector=_has_connector(state),
    )


def _has_connector(state: Any) -> bool:
    """Whether the connector is ours, or includes it; True if the state does not tell."""
    config = getattr(state, "vllm_config", None)
    if config is None:
        return True
    transfer = config.kv_transfer_config
    return transfer is not None and NAME in f"{transfer.kv_connector} {transfer.kv_connector_extra_config}"


def template_tools(tools: Any) -> Any:
    """Tools as vLLM passes them to a template: with the fields that a request omitted."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

        return [ChatCompletionToolsParam.model_validate(tool).model_dump() for tool in tools]
    except Exception:  # another vLLM; or invalid tools, which vLLM itself reports best
        return tools


def _takes_chat_tokens(kind: type) -> bool:
    """Whether the module that renders conversations reads token ids; an older one would ignore them."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, KeyError, TypeError):
        return False
    return '"prompt_token_ids"' in source and "kv_transfer_params" in source
