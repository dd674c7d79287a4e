"""Rendering of request bodies into segmented prompts as vLLM renders them: its templates, variables and fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from kvmosaic.api.documents import CompanionsField, DocumentFields, document_texts
from kvmosaic.api.errors import read_body
from kvmosaic.api.warming import WarmOptions
from kvmosaic.cache import DEFAULT_TENANT
from kvmosaic.documents import DocumentStore
from kvmosaic.errors import InvalidMessages, InvalidPrompt, KVMosaicError
from kvmosaic.prompt import Document, Prompt, PromptEncoder, PromptSettings, read_messages
from kvmosaic.prompt.chat_request import check_variables, separated_prompt, take_marked, take_separated
from kvmosaic.prompt.document import GivenDocuments
from kvmosaic.prompt.found_documents import DocumentFinder
from kvmosaic.prompt.separator import named_parts
from kvmosaic.repair import WordFinder
from kvmosaic.vllm.contract import FIELD, Composition
from kvmosaic.vllm.front.pool_updates import with_stored_documents
from kvmosaic.vllm.front.served_model import ServedModel

Body = Mapping[str, Any]


class _Fields(DocumentFields):
    companions: CompanionsField = None


class Renderer:
    """Renders the prompts of one served model; None is a prompt without documents, which vLLM renders itself."""

    def __init__(self, model: ServedModel, settings: PromptSettings, store: DocumentStore) -> None:
        self.model = model
        self.encoder = model.encoder(settings)
        self.words = WordFinder(model.tokenizer)
        self._settings = settings
        self._store = store
        self.given = GivenDocuments()
        """Of the one body that a copy of this renderer reads."""

    def chat(self, body: Body) -> Prompt | None:
        """The prompt of /v1/chat/completions.

        Raises:
            InvalidMessages, InvalidDocument, InvalidPrompt: see `PromptEncoder.encode_chat`.
            UnknownDocument: an id that is not stored.
        """
        return self._conversation(body, body.get("messages"), body.get("reasoning_effort"))

    def response(self, body: Body) -> Prompt | None:
        """The prompt of /v1/responses: a text, or messages of texts.

        Raises:
            InvalidMessages: an input of another type, or the reply to an earlier response; and as for `chat`.
        """
        asked, instructions = body.get("input"), body.get("instructions")
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        if not isinstance(messages, list) or body.get("previous_response_id") is not None:
            messages = None
        elif instructions:
            messages = [{"role": "system", "content": instructions}, *messages]
        reasoning = body.get("reasoning")
        effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
        return self._conversation(body, _plain_input(messages), effort)

    def completion(self, body: Body) -> Prompt | None:
        """The prompt of /v1/completions.

        Raises:
            InvalidPrompt: documents together with several prompts or token ids; see also its subclasses.
            UnknownDocument: an id that is not stored.
        """
        fields, documents, finder = self._fields(body)
        encoder = self._beside(fields.companions)
        given, separator = body.get("prompt"), self._settings.chunk_separator
        texts = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        if not documents and not any(_is_split(text, separator) for text in texts):
            if finder.is_empty or [*map(type, texts)] != [str]:
                return None
            with suppress(KVMosaicError):  # which vLLM reports best
                return _with_chunks(encoder.encode(texts[0], preamble=fields.preamble, finder=finder))
            return None
        if len(texts) != 1 or not isinstance(texts[0], str):
            raise InvalidPrompt("documents go with one prompt of text; send a request for each prompt")
        prompt = separated_prompt(texts[0], separator, documents) if documents else texts[0]
        return encoder.encode(prompt, preamble=fields.preamble)

    def warming(self, documents: Sequence[Document], options: WarmOptions) -> Prompt:
        """A prompt whose segments before the question equal those of later prompts with these documents.

        Raises:
            InvalidMessages, InvalidDocument, InvalidPrompt: as for these prompts.
        """
        how: dict[str, Any] = {"preamble": options.preamble, "find_documents": options.find_documents}
        encoder = self._beside(options.companions)
        if options.chat is False:
            return encoder.encode_documents(documents, options.system, chat=False, **how)
        variables = {**self.model.template_variables, **self.model.rendering()[1]}
        return encoder.encode_documents(documents, options.system, **how, **variables)

    def _beside(self, companions: Sequence[str] | None) -> PromptEncoder:
        """The encoder with the companions of a request, or stored ones where the settings say so."""
        return self.encoder.beside(self._store.companions(DEFAULT_TENANT, self._settings.companions, companions))

    def with_stored_documents(self, composition: Composition) -> Composition:
        """See `pool_updates`; stored documents are recognized by their names."""
        return with_stored_documents(composition, self._store)

    def _conversation(self, body: Body, messages: Any, effort: Any) -> Prompt | None:
        fields, documents, finder = self._fields(body)
        if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
            if not documents:
                return None  # vLLM reports the error best
            raise InvalidMessages('documents go with a list of messages {"role": ..., "content": ...} of text')
        try:
            kept, marked = take_marked(messages)
            kept = _with_read_arguments(kept)
            read_messages(kept)
            kept, separated = take_separated(kept, self._settings.chunk_separator)
        except InvalidMessages:
            if not documents:
                return None  # images, audio and the like, which vLLM may support
            raise
        own = (*documents, *separated, *marked)
        if not own and finder.is_empty:
            return None
        try:
            options = self._options(body, effort) | {"preamble": fields.preamble, "finder": finder}
            return self._encoded(body, kept, own, options, self._beside(fields.companions))
        except KVMosaicError:
            if own:
                raise
            return None

    def _fields(self, body: Body) -> tuple[_Fields, tuple[Document, ...], DocumentFinder]:
        names = ("documents", "preamble", "find_documents", "companions")
        if FIELD in (params if isinstance(params := body.get("kv_transfer_params"), Mapping) else ()):
            body = {**body, "find_documents": "none"}  # the client says where its documents are
        fields = read_body(_Fields, {name: body.get(name) for name in names})
        parts = fields.documents or ()
        self.given = GivenDocuments(places=tuple(range(len(parts))))
        self.given = document_texts(parts, partial(self._store.resolve, DEFAULT_TENANT))
        return fields, self.given.documents, fields.finder(self._settings, self._store, DEFAULT_TENANT)

    def _encoded(
        self,
        body: Body,
        messages: Sequence[Mapping[str, Any]],
        documents: Sequence[Document],
        options: dict[str, Any],
        encoder: PromptEncoder,
    ) -> Prompt | None:
        wanted = body.get("chat_template")
        if wanted is not None and not (self.model.takes_other_templates and isinstance(wanted, str)):
            raise InvalidMessages(
                "this server takes no chat_template from requests; leave it out, or start vLLM with "
                "--trust-request-chat-template"
            )
        template, rendering = self.model.rendering(wanted, body.get("tools"))
        if not template and not documents:
            return None
        if not template:
            prompt = self._without_template(read_messages(messages), documents)
            return encoder.encode(prompt, control_tokens=False, preamble=options["preamble"])
        prompt = encoder.encode_chat(messages, documents, **options, **rendering)
        if prompt.remark:
            self.given = replace(self.given, warnings=(*self.given.warnings, prompt.remark))
        return _with_chunks(prompt)

    def _without_template(self, messages: Sequence[Mapping[str, Any]], documents: Sequence[Document]) -> Prompt:
        """Plain-text prompt for a model without a template: one question with an optional system text."""
        if [message["role"] for message in messages] not in (["user"], ["system", "user"]):
            raise InvalidMessages(
                "this model has no chat template, so it takes one question of the user and at most one system text; "
                "send those, or start vLLM with --chat-template"
            )
        *system, question = (message["content"] for message in messages)
        return Prompt.from_documents(documents, question, system=system[0] if system else None)

    def _options(self, body: Body, effort: Any) -> dict[str, Any]:
        """Template variables as vLLM sets them: its defaults, the request's, the reasoning effort, and how it ends."""
        given = body.get("chat_template_kwargs") or {}
        if not isinstance(given, Mapping):
            raise InvalidMessages(f"chat_template_kwargs is {given!r:.80}; send an object")
        check_variables(self.model.tokenizer, given)
        variables = {**self.model.template_variables, **given}
        if effort is not None:
            effort = self.model.efforts.get(effort, effort) if isinstance(effort, str) else effort
            variables["reasoning_effort"] = effort
            if "enable_thinking" not in given:  # that of the server's defaults yields, as in vLLM
                variables["enable_thinking"] = effort != "none"
        if body.get("add_generation_prompt") is not None:
            variables["add_generation_prompt"] = bool(body["add_generation_prompt"])
        if body.get("continue_final_message"):
            variables["continue_final_message"] = True
            variables.setdefault("add_generation_prompt", False)
        return variables


def _with_chunks(prompt: Prompt) -> Prompt | None:
    return prompt if prompt.chunks else None


def _is_split(text: Any, separator: str | None) -> bool:
    return isinstance(text, str) and separator is not None and not isinstance(named_parts(text, separator), str)


def _plain_input(messages: Any) -> Any:
    """Messages of /v1/responses in chat format; None if there are others than text messages."""
    if not isinstance(messages, list):
        return None
    plain = []
    for message in messages:
        if not isinstance(message, Mapping) or message.get("type", "message") != "message" or "role" not in message:
            return None
        content = message.get("content")
        if isinstance(content, list):
            content = [
                {**part, "type": "text"} if isinstance(part, Mapping) and part.get("type") == "output_text" else part
                for part in content
            ]
        plain.append({**message, "content": content})
    return plain


def _with_read_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with tool call arguments as objects instead of JSON, as templates and vLLM expect."""
    return [
        {**message, "tool_calls": [_with_read_call(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}
