"""Prompts with documents for vLLM's Python `LLM`: `generate` and `chat`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidConfig, InvalidPrompt
from kvmosaic.layout import ChunkContext, context_with
from kvmosaic.prompt import Prompt
from kvmosaic.repair import WordFinder
from kvmosaic.vllm.contract import EncodedRequest, How, ModelFacts, composed
from kvmosaic.vllm.front.served_model import ServedModel
from kvmosaic.vllm.plugin import NAME

MAX_PROMPTS = 2**20


def engine_arguments(**options: Any) -> dict[str, Any]:
    """The arguments that vLLM's `LLM` needs for documents: `LLM(model, **engine_arguments())`.

    Args:
        options: connector options, for its `kv_connector_extra_config`.
    """
    connector: dict[str, Any] = {"kv_connector": NAME, "kv_role": "kv_both"}
    if options:
        connector["kv_connector_extra_config"] = options
    return {"kv_transfer_config": connector, "enable_prefix_caching": True}


def generate(
    llm: Any,
    prompts: Prompt | str | Iterable[Prompt | str | Sequence[int]],
    sampling_params: Any = None,
    *,
    position_strategy: str = "auto",
    chunk_context: ChunkContext | None = None,
    repair: Any = None,
    preamble: str | int = "auto",
    separator: str | None = None,
    companions: Sequence[str] | None = None,
    **options: Any,
) -> list[Any]:
    """Answers prompts; each document is computed once and reused at any position in any later prompt.

    Args:
        llm: a `vllm.LLM`, created with `engine_arguments()`.
        prompts: `Prompt`s, such as Prompt.from_documents(…); token ids; or texts, which are ordinary prompts unless a
            separator is given.
        sampling_params: vLLM's, one for all or one for each; None: the model's defaults.
        position_strategy: "sequential" (documents follow each other), "shared" (they overlap), or "auto": the
            former if the prompt fits the model's max trained position, else the latter.
        chunk_context: what a document saw when it was computed: "system", "companions" or "none"; None: companions
            where documents are one after the other, else the system text.
        repair: "none", or "first(16)" to recompute the first 16 tokens of each document at its position; None: the
            default repair, where the engine can.
        preamble: how much of a system text documents see: "auto", "all", a number of tokens, "before:TEXT" or
            "pattern:REGEX"; its rest may change with every prompt.
        separator: what separates the segments of a text such as "System text. ## A document. ## Question?": "##" here;
            None or "": texts are never split.
        companions: texts that documents see when they are computed, best three of their kind; None: a paragraph.
        options: options of vLLM's `LLM.generate`, such as use_tqdm and lora_request.

    Returns:
        vLLM's `RequestOutput`s; `kv_transfer_params["kvmosaic"]` of each is the reuse report.

    Raises:
        InvalidPrompt: a prompt that cannot be read, with the value, the limit and the fix.
        InvalidConfig: a choice that vLLM does not support.
    """
    how = _how(position_strategy, context_with(companions, chunk_context), repair)
    options_of = ChunkCacheConfig(chunk_separator=separator, preamble=preamble)
    encoder = _model_of(llm).encoder(options_of).beside(companions)
    listed = [prompts] if isinstance(prompts, str | Prompt) else list(prompts)
    if len(listed) > MAX_PROMPTS:
        raise InvalidPrompt(f"{len(listed)} prompts in one call; at most {MAX_PROMPTS} are allowed")
    encoded = [encoder.encode(prompt) for prompt in listed]
    return _generated(llm, encoded, how, sampling_params, options)


def chat(
    llm: Any,
    messages: Sequence[Any],
    sampling_params: Any = None,
    *,
    documents: Sequence[Any] | None = None,
    salt: str = "",
    position_strategy: str = "auto",
    chunk_context: ChunkContext | None = None,
    repair: Any = None,
    preamble: str | int = "auto",
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Any] | None = None,
    companions: Sequence[str] | None = None,
    **options: Any,
) -> list[Any]:
    """Answers one conversation, or several, over documents, rendered with the model's chat template.

    Args:
        llm: a `vllm.LLM`, created with `engine_arguments()`.
        messages: a conversation of {"role", "content"}, or a list of conversations.
        sampling_params: as for `generate`, which also explains the choices.
        documents: texts or {"id", "title", "text"}, the same for all conversations.
        salt: prompts with different salts share nothing in the cache.
        position_strategy: as for `generate`.
        chunk_context: as for `generate`.
        repair: as for `generate`.
        preamble: as for `generate`.
        chat_template: replaces the model's own.
        chat_template_kwargs: variables of the template, such as enable_thinking.
        tools: functions that the model may call.
        companions: as for `generate`.
        options: options of vLLM's `LLM.generate`.

    Raises:
        InvalidMessages, InvalidDocument: not a conversation, or not documents.
        InvalidPrompt, InvalidConfig: as for `generate`.
    """
    how, model = _how(position_strategy, context_with(companions, chunk_context), repair), _model_of(llm)
    encoder = model.encoder(ChunkCacheConfig(preamble=preamble)).beside(companions)
    _, rendering = model.rendering(chat_template, tools)
    variables = {**(chat_template_kwargs or {}), **rendering}
    conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
    encoded = [encoder.encode_chat(conversation, documents, salt=salt, **variables) for conversation in conversations]
    return _generated(llm, encoded, how, sampling_params, options)


def _generated(
    llm: Any, prompts: Sequence[Prompt], how: How, sampling_params: Any, options: Mapping[str, Any]
) -> list[Any]:
    given = llm.get_default_sampling_params() if sampling_params is None else sampling_params
    each = list(given) if isinstance(given, Sequence) else [given] * len(prompts)
    if len(each) != len(prompts):
        raise InvalidPrompt(f"{len(each)} sampling_params for {len(prompts)} prompts; give one each, or one for all")
    facts, words = ModelFacts.of(llm.llm_engine.model_config), WordFinder(llm.get_tokenizer())
    ready = [composed(prompt, how, facts, words) for prompt in prompts]
    inputs = [vllm_input(one, prompt.salt) for one, prompt in zip(ready, prompts, strict=True)]
    params = [with_boundaries(one, own) for one, own in zip(ready, each, strict=True)]
    answers: list[Any] = llm.generate(inputs, params, **options)
    return answers


def vllm_input(ready: EncodedRequest, salt: str) -> dict[str, Any]:
    """A prompt in vLLM's form."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(ready.token_ids)}
    return {**prompt, "cache_salt": salt} if salt else prompt


def with_boundaries(ready: EncodedRequest, params: Any) -> Any:
    """A copy of sampling parameters with the segment boundaries of a prompt."""
    if ready.composition is None:
        return params
    changed = params.clone()
    extra = dict(changed.extra_args or {})
    extra["kv_transfer_params"] = {**(extra.get("kv_transfer_params") or {}), **ready.composition.to_params()}
    changed.extra_args = extra
    return changed


def _how(position_strategy: str, chunk_context: str | None, repair: Any) -> How:
    return How().updated({"position_strategy": position_strategy, "chunk_context": chunk_context, "repair": repair})


def _model_of(llm: Any) -> ServedModel:
    config = llm.llm_engine.model_config
    tokenizer = llm.get_tokenizer()
    if not hasattr(tokenizer, "added_tokens_decoder"):
        raise InvalidConfig(
            f"the tokenizer of this model is a {type(tokenizer).__name__}, with which texts cannot be cut into "
            "documents; give token ids (Prompt.from_tokens)"
        )
    return ServedModel(tokenizer, config.get_vocab_size(), config.max_model_len, config=config)
