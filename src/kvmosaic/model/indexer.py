"""Indexers: attention that reads the best keys only, chosen by a small second attention (DSA: DeepSeek V3.2, GLM-5).

An indexer keeps one key k of its own per token, rotated like any other. A token has a few index queries q_h and a
weight w_h for each of them, and its layer's attention reads the `index_topk` keys with the best scores

    sum_h w_h relu(q_h . k)

among all that it sees. Nothing in it needs two documents to be computed together: here an indexer is one more layer,
numbered after those with attention. Its keys are cached with theirs, its queries turn to meet them at their places,
and the answer of the receiver is which keys were chosen.

Queries, keys and weights are taken from the indexer's own code, which is run against a cache without tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvmosaic.errors import WAY_OUT, UnsupportedModel
from kvmosaic.layers import AttentionCall
from kvmosaic.model.hook import LAYER_ATTRIBUTE, current_receiver

_FIRST_NUMBER = 1 << 20
"""Of indexers, until `number_layers` numbers them."""
_MASK_ATTRIBUTE = "kvmosaic_mask_hook"
_CHOICES = "index_topk"
"""Attribute of an indexer with the number of keys that it chooses."""


def indexers(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The indexers of a model that keep one key per token in a cache of transformers, and the modules around them."""
    for part in module.modules():
        for child in part.children():
            if isinstance(getattr(child, _CHOICES, None), int) and _updates_a_cache(child):
                yield child, part


def _updates_a_cache(module: nn.Module) -> bool:
    code = inspect.unwrap(type(module).forward)
    return (
        "past_key_values" in _signature(type(module).forward).parameters and "update_indexer" in code.__code__.co_names
    )


@cache
def _signature(code: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(code)


def hook_indexers(module: nn.Module) -> None:
    """Makes every indexer ask the receiver in scope; outside a scope it runs its own code. May be called again."""
    for indexer, around in indexers(module):
        indexer.__dict__.pop(LAYER_ATTRIBUTE, None)
        indexer.__dict__["forward"] = _asking_forward(indexer)
        if (hook := around.__dict__.pop(_MASK_ATTRIBUTE, None)) is not None:
            hook.remove()
        around.__dict__[_MASK_ATTRIBUTE] = around.register_forward_pre_hook(_with_mask, with_kwargs=True)


class _Mask:
    """Takes the place of a mask that was not built: the predicate of a probe, which modules with an indexer slice."""

    def __init__(self, predicate: Any, device: torch.device) -> None:
        self._predicate = predicate
        self._device = device

    def __call__(self, *places: Any) -> Any:
        return self._predicate(*places)

    def __getitem__(self, _: object) -> Tensor:
        """Of no key."""
        return torch.zeros(1, 1, 0, dtype=torch.bool, device=self._device)


def _with_mask(module: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    mask = named.get("attention_mask")
    if current_receiver() is None or isinstance(mask, Tensor | _Mask):
        return arguments, named
    device = (arguments[0] if arguments else named["hidden_states"]).device
    return arguments, named | {"attention_mask": _Mask(mask, device)}


class _NoTokens(TorchFunctionMode):
    """A cache without tokens: keeps the new keys of an indexer, and the left sides of its two products with them."""

    def __init__(self) -> None:
        super().__init__()
        self.key: Tensor | None = None
        self.factors: list[Tensor] = []

    def update_indexer(self, key: Tensor, _: int) -> Tensor:
        """Takes the new keys [1, T, D]; there are none to score."""
        self.key = key
        return key[:, :0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.key is not None and func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            self.factors.append(args[0])
        return func(*args, **(kwargs or {}))


def _asking_forward(indexer: nn.Module) -> Callable[..., Any]:
    def forward(*arguments: Any, **named: Any) -> Any:
        receiver = current_receiver()
        if receiver is None:
            return type(indexer).forward(indexer, *arguments, **named)
        return receiver(_call_of(indexer, arguments, named))

    return forward


@contextmanager
def few_keys(module: nn.Module, count: int) -> Iterator[None]:
    """Lets every indexer choose at most `count` keys, so that a short prompt shows which ones."""
    with ExitStack() as stack:
        for indexer, _ in indexers(module):
            own = getattr(indexer, _CHOICES)
            setattr(indexer, _CHOICES, min(own, count))
            stack.callback(setattr, indexer, _CHOICES, own)
        yield


@contextmanager
def own_choices(module: nn.Module, observe: Callable[[AttentionCall, Tensor], None]) -> Iterator[None]:
    """Every indexer chooses by its own code; `observe` gets its call, and the numbers [T, K] of the keys."""

    def choosing(indexer: nn.Module) -> Callable[..., Any]:
        def forward(*arguments: Any, **named: Any) -> Any:
            numbers = type(indexer).forward(indexer, *arguments, **named)
            observe(_call_of(indexer, arguments, named), numbers[0])
            return numbers

        return forward

    with ExitStack() as stack:
        for indexer, _ in indexers(module):
            stack.callback(indexer.__dict__.__setitem__, "forward", indexer.__dict__["forward"])
            indexer.__dict__["forward"] = choosing(indexer)
        yield


def _call_of(indexer: nn.Module, arguments: Any, named: dict[str, Any]) -> AttentionCall:
    given = _signature(type(indexer).forward).bind(indexer, *arguments, **named)
    taken = given.arguments["past_key_values"] = _NoTokens()
    if isinstance(mask := given.arguments.get("attention_mask"), Tensor):
        given.arguments["attention_mask"] = mask[..., :0]
    with taken:
        type(indexer).forward(*given.args, **given.kwargs)
    return _call(indexer, taken, given.arguments["hidden_states"].dtype)


def _call(indexer: nn.Module, taken: _NoTokens, dtype: torch.dtype) -> AttentionCall:
    """An indexer's call, with its weights [T, 1, H] in place of values.

    Keys are cached in the model's dtype; an indexer that norms them in float32 has them rounded to it.
    """
    key = taken.key
    sizes = [tuple(factor.shape) for factor in taken.factors]
    if key is None or key.dim() != 3 or not _are_queries_and_weights(sizes, key.shape[1], key.shape[2]):
        raise UnsupportedModel(
            f"{type(indexer).__name__} does not score its keys by queries of several heads and a weight for each, as "
            f"is known here (its products have the left sides {sizes}), so the keys that it chooses from several parts "
            f"are not known; {WAY_OUT}"
        )
    query, weights = taken.factors
    return AttentionCall(
        indexer.__dict__.get(LAYER_ATTRIBUTE, _FIRST_NUMBER + int(indexer.layer_idx)),  # type: ignore[arg-type]
        query[0].to(dtype),
        key[0][:, None].to(dtype),
        weights[0],
        1.0,
        None,
        None,
        indexer,
        num_chosen=int(getattr(indexer, _CHOICES)),
    )


def _are_queries_and_weights(sizes: list[tuple[int, ...]], num_tokens: int, width: int) -> bool:
    if len(sizes) != 2 or [len(size) for size in sizes] != [4, 4]:
        return False
    heads = sizes[0][2]
    return sizes == [(1, num_tokens, heads, width), (1, num_tokens, 1, heads)]
