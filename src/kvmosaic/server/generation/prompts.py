"""Prompts of request bodies: conversations, texts and token ids with documents, encoded into segments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request

from kvmosaic.api.documents import DocumentFields, document_texts
from kvmosaic.api.errors import known_error
from kvmosaic.documents import DocumentStore, label_in
from kvmosaic.errors import DocumentStoreUnavailable, InvalidMessages, InvalidPrompt, InvalidTools
from kvmosaic.llm import LLM
from kvmosaic.prompt import Document, Prompt
from kvmosaic.prompt.chat_request import check_variables, known_roles, separated_prompt, take_marked, take_separated
from kvmosaic.prompt.document import MAX_ID_CHARACTERS, GivenDocuments
from kvmosaic.prompt.found_documents import DocumentFinder, PlacedDocuments
from kvmosaic.prompt.splits import told_splits
from kvmosaic.sampling.params import FOLLOWED
from kvmosaic.server.generation.sampling_fields import Defaults
from kvmosaic.server.settings import ServerSettings
from kvmosaic.server.tenants import Tenant
from kvmosaic.tools import shows_tools
from kvmosaic.web.errors import ApiError
from kvmosaic.web.json_body import warn


@dataclass(frozen=True, slots=True)
class PromptSources:
    """What prompts of request bodies are made from: the model's encoder, stored documents and the settings."""

    llm: LLM
    documents: DocumentStore
    settings: ServerSettings

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model; None if it has none."""
        return self.llm.model.tokenizer

    @property
    def chat_template(self) -> str:
        """The source of the model's chat template; empty if it has none."""
        return _template_of(self.llm)

    @property
    def adapters(self) -> Collection[str]:
        """Names of the adapters beside the model's weights."""
        return self.llm.model.adapters

    @property
    def max_positions(self) -> int | None:
        """Maximum number of tokens of a prompt and its answer; None: unlimited."""
        return self.llm.engine.max_positions

    def bare(self, text: str) -> Sequence[int]:
        """Returns the tokens of a text without the tokens that begin a prompt."""
        return self.llm.encoder.bare(text)

    def sampling_defaults(self) -> Defaults:
        """Returns the defaults for omitted fields: the model's generation configuration, if the settings enable it."""
        if self.settings.generation_config == "none":
            return {}
        advised = self.llm.get_default_sampling_params()
        return {name: getattr(advised, name) for name in FOLLOWED}


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt that is ready to run."""

    prompt: Prompt
    note: str = ""
    """Reason if it was not composed."""
    document_ids: frozenset[str] = frozenset()
    """Names of segments that are document ids."""
    continuation: Sequence[int] | None = None
    """Tokens to be scored after the prompt, instead of generating any."""
    warnings: tuple[str, ...] = ()
    """What differs from the body."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a conversation is rendered."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_options: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """Checked tools, as the template reads them."""
    is_endless: bool = False
    """Whether the question may exceed the model's context: the answer then uses a rolling window."""


@dataclass(frozen=True, slots=True)
class BlockDocuments:
    """Documents that a conversation has as blocks of its messages."""

    listed: Sequence[Document] = ()
    """These go before the messages."""
    placed: PlacedDocuments | None = None
    """These stay at their place."""

    @property
    def are_any(self) -> bool:
        """Whether there are any."""
        return bool(self.listed) or self.placed is not None


def answering_model(sources: PromptSources, request: Request, name: str | None) -> str:
    """Returns the name of the model that answers a request, and warns if the request names another one.

    Raises:
        ApiError: 404, the name of an adapter, or with --strict-model-names one under which nothing is served.
    """
    settings = sources.settings
    if name in (None, *settings.model_names) or settings.strict or settings.strict_model_names:
        return served_model(sources, name)
    if name in sources.adapters:
        message = f"{name!r:.80} is the name of an adapter; send it as 'adapter', and leave the model out"
        raise ApiError(404, message, code="model_not_found", param="model")
    model = settings.model_names[0]
    warn(request, f"the model {name!r:.80} is not served here; {model!r} answered")
    return model


def served_model(sources: PromptSources, name: str | None) -> str:
    """Returns the name under which a request addresses the model.

    Raises:
        ApiError: 404, a name under which nothing is served.
    """
    names = sources.settings.model_names
    if name is None:
        return names[0]
    if name not in names:
        known = ", ".join(map(repr, names))
        raise ApiError(
            404, f"the model {name!r:.80} is not served here; use {known}", code="model_not_found", param="model"
        )
    return name


def chat_prompt(
    sources: PromptSources,
    tenant: Tenant,
    body: DocumentFields,
    messages: Sequence[Mapping[str, Any]],
    rendering: Rendering,
    blocks: BlockDocuments | None = None,
) -> EncodedPrompt:
    """Renders a conversation over its documents: those of the body, marked parts, and parts between separators.

    Messages with `blocks` of documents have no separators.

    Raises:
        InvalidMessages, InvalidDocument, InvalidPrompt: see `PromptEncoder.encode_chat`.
        UnknownDocument: an id that this tenant has not stored.
    """
    kept, marked = take_marked(messages)
    blocks = blocks or BlockDocuments()
    kept, separated = take_separated(kept, None if blocks.are_any else sources.settings.chunk_separator)
    given = read_documents(sources, tenant, body)
    documents = given.documents
    with told_by_place(given.places):
        rendering = replace(rendering, is_endless=_is_endless(body))
        finder = replace(_finder(sources, tenant, body), placed=blocks.placed)
        how = body, rendering, finder, _companions(sources, tenant, body)
        prompt = _encode_chat(sources.llm, kept, (*documents, *blocks.listed, *separated, *marked), *how)
    composed = _told(sources.llm, remarked(sources.documents, tenant, documents, _adapted(prompt, body)), given)
    if rendering.tools and not shows_tools(sources.chat_template):
        told = "the model's chat template shows no tools, so the system text tells of them"
        composed = replace(composed, warnings=(*composed.warnings, told))
    return composed


def text_prompt(
    sources: PromptSources, tenant: Tenant, body: DocumentFields, text: str | Sequence[int]
) -> EncodedPrompt:
    """Reads a text (split at separators where the server does so) or a list of token ids, with documents before it.

    Raises:
        InvalidPrompt: and its kinds.
        UnknownDocument: an id that this tenant has not stored.
    """
    llm, salt = sources.llm, body.cache_salt or ""
    encoder = llm.encoder.beside(_companions(sources, tenant, body))
    if _is_endless(body):
        encoder = encoder.endless()
    given = read_documents(sources, tenant, body)
    documents = given.documents
    if not documents:
        finder = _finder(sources, tenant, body)
        prompt = encoder.encode(text, salt=salt, preamble=body.preamble, finder=finder)
        return _told(llm, _adapted(prompt, body), given)
    if not isinstance(text, str):
        raise InvalidPrompt("documents go with a prompt of text; this one is a list of token ids")
    prompt = separated_prompt(text, sources.settings.chunk_separator, documents, salt)
    with told_by_place(given.places):
        prompt = encoder.encode(prompt, preamble=body.preamble)
    return _told(llm, remarked(sources.documents, tenant, documents, _adapted(prompt, body)), given)


def _finder(sources: PromptSources, tenant: Tenant, body: DocumentFields) -> DocumentFinder:
    """What finds documents in the text of a request."""
    return body.finder(sources.llm.chunk_cache_config, sources.documents, tenant.name)


def _companions(sources: PromptSources, tenant: Tenant, body: DocumentFields) -> Sequence[str] | None:
    config = sources.llm.chunk_cache_config
    return sources.documents.companions(tenant.name, config.companions, getattr(body, "companions", None))


def _told(llm: LLM, prompt: Prompt, given: GivenDocuments) -> EncodedPrompt:
    """Adds the report to a prompt; without a chunk cache, the encoder has joined its segments."""
    found = (label_in(chunk.name)[1] for chunk in prompt.chunks if chunk.origin and chunk.name)
    ids = frozenset(filter(None, (*(document.id for document in given.documents), *found)))
    note = f"not composed: {llm.chunk_cache_off_reason}" if prompt.is_joined else ""
    told = [f"documents.{each.document}: {each.remark}" for each in prompt.segments if each.remark]
    warnings = (*given.warnings, *told, *filter(None, [told_splits([prompt]), prompt.remark]))
    return EncodedPrompt(prompt, note, ids, warnings=warnings)


def _encode_chat(
    llm: LLM,
    messages: Sequence[Mapping[str, Any]],
    documents: Sequence[Document],
    body: DocumentFields,
    rendering: Rendering,
    finder: DocumentFinder,
    companions: Sequence[str] | None,
) -> Prompt:
    salt, preamble = body.cache_salt or "", body.preamble
    options = dict(rendering.template_options or {})
    if not _template_of(llm):
        if rendering.tools:
            raise InvalidTools("this model has no chat template, so it cannot be shown tools; leave tools out")
        if options or rendering.continue_final_message:
            raise InvalidMessages(
                "this model has no chat template, so there is nothing to be set; leave its options out"
            )
        how: dict[str, Any] = {"is_endless": rendering.is_endless, "preamble": preamble, "finder": finder}
        return llm.compose(
            known_roles(None, messages), documents=documents or None, salt=salt, companions=companions, **how
        )
    check_variables(llm.model.tokenizer, options)
    if rendering.tools:
        options["tools"] = list(rendering.tools)
    if rendering.add_generation_prompt is not None:
        options["add_generation_prompt"] = rendering.add_generation_prompt
    if rendering.continue_final_message:
        if rendering.add_generation_prompt:
            raise InvalidMessages(
                "add_generation_prompt and continue_final_message exclude each other; set one of them"
            )
        options["continue_final_message"] = True
    encoder = (llm.encoder.endless() if rendering.is_endless else llm.encoder).beside(companions)
    return encoder.encode_chat(messages, documents or None, salt=salt, preamble=preamble, finder=finder, **options)


def _adapted(prompt: Prompt, body: DocumentFields) -> Prompt:
    order = getattr(body, "documents_order", None)
    return replace(prompt, adapter=getattr(body, "adapter", None), documents_order=order)


def _is_endless(body: DocumentFields) -> bool:
    return getattr(body, "window_tokens", None) is not None


def _template_of(llm: LLM) -> str:
    return str(getattr(llm.model.tokenizer, "chat_template", None) or "")


def read_documents(sources: PromptSources, tenant: Tenant, body: DocumentFields) -> GivenDocuments:
    """Returns the documents of a body, with the texts of stored ones.

    Raises:
        UnknownDocument: an id that this tenant has not stored.
        ApiError: 400, no text and no id, or with --strict a text that is empty.
    """
    parts, strict = body.documents or (), sources.settings.strict
    with told_by_place(range(len(parts))):
        return document_texts(parts, partial(sources.documents.resolve, tenant.name), strict=strict)


@contextmanager
def told_by_place(places: Sequence[int]) -> Iterator[None]:
    """Makes an error about one of the first documents name its place in the body.

    Raises:
        ApiError: instead of such an error, with the position as `param`.
    """
    try:
        yield
    except InvalidPrompt as error:
        told = known_error(error, places)
        if told is None or told.param is None:
            raise
        raise told from error


def remarked(store: DocumentStore, tenant: Tenant, documents: Sequence[Document], prompt: Prompt) -> Prompt:
    """Returns a prompt with remarks on texts that were probably meant as ids."""
    short = {
        index: document.text
        for index, document in enumerate(documents)
        if document.name is None and len(document.text) <= MAX_ID_CHARACTERS
    }
    stored = _stored(store, tenant, list(short.values()))
    meant = {
        index: f'this is a text; to use the stored document write {{"id": "{text}"}}'
        for index, text in short.items()
        if text in stored
    }
    if not meant:
        return prompt
    numbered = ((segment, segment.document) for segment in prompt.segments)
    segments = (each if number is None else replace(each, remark=meant.get(number, "")) for each, number in numbered)
    return replace(prompt, segments=tuple(segments))


def _stored(store: DocumentStore, tenant: Tenant, texts: Sequence[str]) -> set[str]:
    """Those of the texts that are ids of stored documents; none where the database does not answer."""
    try:
        return store.stored_ids(tenant.name, texts) if texts else set()
    except DocumentStoreUnavailable:  # the texts are there, so the request needs no stored document
        return set()
