"""Routes /tokenize and /detokenize: the tokens of a prompt, segment by segment, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Discriminator, Field, Tag

from kvmosaic.api.documents import DocumentFields
from kvmosaic.api.fields import Body, Reply, Text, TokenIds, example
from kvmosaic.documents import shown_name
from kvmosaic.errors import InvalidPrompt
from kvmosaic.prompt import check_token_ids
from kvmosaic.sampling import decode_all
from kvmosaic.server.admission import RequestThreads
from kvmosaic.server.generation.prompts import EncodedPrompt, PromptSources, answering_model, chat_prompt, text_prompt
from kvmosaic.server.openai.chat_request import ChatFields
from kvmosaic.server.tenants import Tenant, current_tenant
from kvmosaic.web.errors import error_replies
from kvmosaic.web.json_body import Warnings, route_class, warn


class _TokenizeFields(DocumentFields):
    model: Annotated[str | None, Field(max_length=4_096)] = None
    return_token_strs: bool | None = False


class TokenizeText(_TokenizeFields):
    """A text, as /v1/completions reads it."""

    model_config = example(prompt="The ferry goes to Oak Island.")

    prompt: Text
    add_special_tokens: Annotated[
        bool | None, Field(description="False: without the tokens that begin a prompt, and without documents.")
    ] = True


class TokenizeChat(_TokenizeFields, ChatFields):
    """A conversation, as /v1/chat/completions reads it."""

    model_config = example(messages=[{"role": "user", "content": "Where does the ferry go?"}])

    add_special_tokens: Annotated[bool | None, Field(description="The template writes them; true is refused.")] = False


class SegmentTokens(Reply):
    """The tokens of one segment."""

    kind: str
    name: str | None
    count: int
    tokens: list[int]


class Tokenized(Reply):
    """The tokens of a prompt, in vLLM's shape, and its segments."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None
    segments: list[SegmentTokens]


def _kind(body: object) -> str:
    has_messages = isinstance(body, dict) and "messages" in body
    return "chat" if has_messages or isinstance(body, TokenizeChat) else "text"


class DetokenizeRequest(Body):
    """Token ids."""

    model_config = example(tokens=[4, 5, 6])

    model: Annotated[str | None, Field(max_length=4_096)] = None
    tokens: TokenIds


class Detokenized(Reply):
    """Their text."""

    prompt: str


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("text")] | Annotated[TokenizeChat, Tag("chat")],
    Discriminator(_kind),
]


def router(sources: PromptSources, threads: RequestThreads) -> APIRouter:
    """Returns the routes."""
    routes = APIRouter(route_class=route_class(strict=sources.settings.strict), tags=["tokens"])

    @routes.post("/tokenize", response_model=Tokenized, responses=error_replies())
    async def tokenize(
        request: Request, body: TokenizeRequest, tenant: Annotated[Tenant, Depends(current_tenant)]
    ) -> Response:
        """Tells the tokens of a prompt and its segments, without answering it."""
        answering_model(sources, request, body.model)
        reply, warnings = await threads.run(tenant.name, _tokenized, sources, tenant, body)
        warn(request, *warnings)
        return _json(reply)

    @routes.post("/detokenize", response_model=Detokenized, responses=error_replies())
    async def detokenize(
        request: Request, body: DetokenizeRequest, tenant: Annotated[Tenant, Depends(current_tenant)]
    ) -> Response:
        """Tells the text of token ids."""
        answering_model(sources, request, body.model)
        return _json(await threads.run(tenant.name, _detokenized, sources, body.tokens))

    return routes


def _json(reply: bytes) -> Response:
    return Response(reply, media_type="application/json")


def _read(sources: PromptSources, tenant: Tenant, body: TokenizeText | TokenizeChat) -> EncodedPrompt:
    if isinstance(body, TokenizeChat):
        if body.add_special_tokens:
            raise InvalidPrompt("add_special_tokens=true would write them twice: the chat template does so already")
        return chat_prompt(sources, tenant, body, body.plain_messages(), body.rendering())
    if body.add_special_tokens is False:
        if body.documents:
            raise InvalidPrompt("documents go with add_special_tokens=true only")
        return text_prompt(sources, tenant, body, sources.bare(body.prompt))
    return text_prompt(sources, tenant, body, body.prompt)


def _tokenized(sources: PromptSources, tenant: Tenant, body: TokenizeText | TokenizeChat) -> tuple[bytes, Warnings]:
    composed = _read(sources, tenant, body)
    prompt = composed.prompt
    tokens = [token for segment in prompt.segments for token in segment.token_ids or ()]
    tokenizer: Any = sources.tokenizer
    reply = Tokenized(
        count=len(tokens),
        max_model_len=sources.max_positions,
        tokens=tokens,
        token_strs=[str(text) for text in tokenizer.convert_ids_to_tokens(tokens)] if body.return_token_strs else None,
        segments=[
            SegmentTokens(
                kind=segment.kind,
                name=shown_name(segment.name) if segment.name else None,
                count=segment.num_tokens,
                tokens=list(segment.token_ids or ()),
            )
            for segment in prompt.segments
        ],
    )
    return reply.model_dump_json().encode(), composed.warnings


def _detokenized(sources: PromptSources, token_ids: Sequence[int]) -> bytes:
    model = sources.llm.model
    check_token_ids(token_ids, model.vocab_size, "list of tokens")
    text = decode_all(model.tokenizer, token_ids, skip_special_tokens=False)
    return Detokenized(prompt=text).model_dump_json().encode()
