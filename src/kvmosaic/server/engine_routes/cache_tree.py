"""Route /v1/cache/tree: the prefix tree of cached conversations and documents."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from kvmosaic.cache import PrefixTree, TreeLimits
from kvmosaic.documents import shown_name
from kvmosaic.engine import AsyncEngine, Engine
from kvmosaic.errors import EngineError
from kvmosaic.sampling import decode_all
from kvmosaic.server.admission import Admission, RequestThreads
from kvmosaic.server.openai.replies import error_replies
from kvmosaic.server.tenants import Tenant, current_tenant

ROUTE = "/v1/cache/tree"


class TreeWish(BaseModel):
    """How much of the tree is shown; the query."""

    model_config = ConfigDict(extra="forbid")

    depth: int = Field(default=8, ge=1, le=32, description="Levels of runs below a system text.")
    children: int = Field(default=8, ge=1, le=100, description="Maximum of runs below one run, and of documents.")
    runs: int = Field(default=200, ge=1, le=2_000, description="Most runs in all.")
    tokens: int = Field(default=12, ge=0, le=64, description="First tokens of a run that are shown.")


def router(engine: AsyncEngine, admission: Admission, threads: RequestThreads, tokenizer: Any) -> APIRouter:
    """Returns the route; `tokenizer` is None if the model has none, and no texts are shown."""
    routes = APIRouter(tags=["cache"], responses=error_replies())

    @routes.get(ROUTE, response_model=PrefixTree)
    async def cache_tree(wish: Annotated[TreeWish, Query()], tenant: Annotated[Tenant, Depends(current_tenant)]) -> Any:
        """What is cached of your own conversations and documents, as a tree.

        An admin sees the tenants of others as well: how much there is, not what it says.
        """
        limits = TreeLimits(wish.depth, wish.children, wish.runs, wish.tokens)
        whose = None if tenant.is_admin else tenant.name
        try:
            tree = await engine.call(partial(_look, limits=limits, tenant=whose))
        except EngineError as error:
            raise admission.unavailable(str(error)) from error
        text = await threads.run(tenant.name, _written, tokenizer, tree, tenant.name)
        return Response(text, media_type="application/json")

    return routes


def _look(engine: Engine, *, limits: TreeLimits, tenant: str | None) -> PrefixTree:
    return engine.kv_cache.prefix_tree(limits, tenant)


def _written(tokenizer: Any, tree: PrefixTree, name: str) -> str:
    """Returns the tree as JSON; texts only where they belong to the requesting tenant."""

    def is_own(tenant: str) -> bool:
        return tenant == name

    shown = tree.without_tokens(is_own).renamed(shown_name)
    if tokenizer is not None:
        shown = shown.with_texts(lambda ids: decode_all(tokenizer, ids, skip_special_tokens=False), is_own)
    return json.dumps(shown.to_dict())
