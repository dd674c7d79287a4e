"""Composed attention: one set of queries over pieces of cached keys, without an engine; partial results are merged.

    L = logsumexp_i(l_i);   o = sum_i exp(l_i - L) o_i

The identity of flash attention and ring attention (Milakov and Gimelshein 2018, Dao et al. 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvmosaic.attention.torch_backend import AttentionBackend, TorchBackend
from kvmosaic.errors import InvalidConfig
from kvmosaic.rope import Rotation, rotate

_MAX_DISTANCE = 2**40


@dataclass(frozen=True, slots=True)
class KVPiece:
    """One run of keys, used as if it were `distance` positions further on than where it was computed.

    key: [S, G, D] as cached (rotated at the positions it was computed at); any strides, never copied or written
    value: [S, G, Dv]
    distance: how far the keys are moved
    causal: the last T of the S keys belong to the T queries: query i sees the first S - T + i + 1 keys
    """

    key: Float[Tensor, "S G D"]
    value: Float[Tensor, "S G Dv"]
    distance: int = 0
    causal: bool = False


def composed_attention(
    query: Float[Tensor, "T H D"],
    pieces: Sequence[KVPiece],
    *,
    rotation: Rotation | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    backend: AttentionBackend | None = None,
) -> Float[Tensor, "T H Dv"]:
    """Attention over a list of pieces, each at its own distance, merged exactly.

    A key rotated at position j and used at j + d scores q . R(d) k = (R(-d) q) . k, so the query is rotated once per
    distance and no key is rotated.

    Args:
        query: [T, H, D], rotated at its own positions.
        pieces: the keys and values that the queries see; G divides H.
        rotation: the model's rotation; required if any piece is moved.
        scaling: factor on the scores; default D ** -0.5.
        softcap: soft cap on the scores.
        sinks: [H] learned sink scores.
        backend: computes attention over one piece; default `TorchBackend()`.

    Returns:
        [T, H, Dv] in the dtype of the query.

    Raises:
        InvalidConfig: no pieces, shapes or dtypes that do not fit, or a moved piece without a rotation.
    """
    _check(query, pieces, rotation, sinks)
    backend = backend or TorchBackend()
    num_rows = query.shape[0]
    outputs, sums = [], []
    for piece in pieces:
        turned = query
        if piece.distance and rotation is not None:
            precision = torch.promote_types(query.dtype, torch.float32)
            distances = torch.full((num_rows,), -piece.distance, device=query.device)
            turned = rotate(query, rotation.tables(distances, dtype=precision, device=query.device)).to(query.dtype)
        mask = None
        if piece.causal:
            num_keys = piece.key.shape[0]
            ones = torch.ones(num_rows, num_keys, dtype=torch.bool, device=query.device)
            mask = ones.tril_(num_keys - num_rows)
        output, lse = backend.attend(
            turned,
            piece.key,
            piece.value,
            scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
            mask=mask,
            softcap=softcap,
        )
        outputs.append(output)
        sums.append(lse)
    rows = torch.arange(num_rows, device=query.device).repeat(len(pieces))
    merged, lse = merge_partials(torch.cat(outputs), torch.cat(sums), rows, num_rows)
    return merged if sinks is None else apply_sinks(merged, lse, sinks)


def _check(query: Tensor, pieces: Sequence[KVPiece], rotation: Rotation | None, sinks: Tensor | None) -> None:
    if not pieces:
        raise InvalidConfig("composed_attention got no pieces; a query needs at least one key to see")
    if query.dim() != 3 or 0 in query.shape or not query.is_floating_point():
        raise InvalidConfig(
            f"query must be floating point numbers [T, H, D], none of them 0, got {query.dtype} {list(query.shape)}"
        )
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise InvalidConfig(f"sinks must be one number for each of the {query.shape[1]} heads, got {list(sinks.shape)}")
    for number, piece in enumerate(pieces):
        _check_piece(number, piece, query, pieces[0].value.shape[-1:])
        if piece.distance and rotation is None:
            raise InvalidConfig(
                f"piece {number} is moved by {piece.distance}, but no rotation was given; pass rotation=…"
            )


def _check_piece(number: int, piece: KVPiece, query: Tensor, value_dim: Sequence[int]) -> None:
    key, value = list(piece.key.shape), list(piece.value.shape)
    fits = len(key) == len(value) == 3 and key[:2] == value[:2] and key[2] == query.shape[2] and 0 not in key + value
    if not fits or query.shape[1] % key[1] or value[2] != value_dim[0]:
        raise InvalidConfig(
            f"piece {number} has keys {key} and values {value}, which do not fit the query {list(query.shape)}; "
            "keys are [S, G, D] and values [S, G, Dv] with S > 0, the D of the query, G dividing its heads, and one Dv "
            "for all pieces"
        )
    if piece.key.dtype != query.dtype or piece.value.dtype != query.dtype:
        raise InvalidConfig(
            f"piece {number} has keys in {piece.key.dtype} and values in {piece.value.dtype}, the query is in "
            f"{query.dtype}; convert them to one dtype"
        )
    if piece.causal and key[0] < query.shape[0]:
        raise InvalidConfig(
            f"piece {number} is causal with {key[0]} keys for {query.shape[0]} queries; "
            "a causal piece ends with one key per query"
        )
    if isinstance(piece.distance, bool) or not isinstance(piece.distance, int) or abs(piece.distance) > _MAX_DISTANCE:
        raise InvalidConfig(
            f"piece {number} has distance {piece.distance!r}; use a whole number of at most {_MAX_DISTANCE} either way"
        )


def merge_partials(
    outputs: Float[Tensor, "R H Dv"], lse: Float[Tensor, "R H"], rows: Int[Tensor, " R"], num_rows: int
) -> tuple[Float[Tensor, "T H Dv"], Float[Tensor, "T H"]]:
    """Merges partial results that belong to the same row.

    Args:
        outputs: [R, H, Dv] partial outputs.
        lse: [R, H] log-sum-exp of their scores; -inf where a partial saw nothing.
        rows: [R] the row each partial belongs to.
        num_rows: T, the number of rows.

    Returns:
        outputs [T, H, Dv] and their log-sum-exp [T, H].
    """
    index = rows[:, None].expand_as(lse)
    highest = lse.new_full((num_rows, lse.shape[1]), -torch.inf).scatter_reduce_(0, index, lse, "amax")
    highest = highest.nan_to_num_(neginf=0.0)
    weights = torch.exp(lse - highest[rows])
    total = torch.zeros_like(highest).index_add_(0, rows, weights)
    merged = torch.zeros(num_rows, *outputs.shape[1:], dtype=weights.dtype, device=outputs.device)
    merged.index_add_(0, rows, outputs.to(weights.dtype) * weights[..., None])
    merged /= total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return merged.to(outputs.dtype), highest + torch.log(total)


def apply_sinks(
    outputs: Float[Tensor, "T H Dv"], lse: Float[Tensor, "T H"], sinks: Float[Tensor, " H"]
) -> Float[Tensor, "T H Dv"]:
    """Adds a learned score per head to the softmax, with a zero value (attention sinks, GPT-OSS).

    Args:
        outputs: [T, H, Dv].
        lse: [T, H].
        sinks: [H].
    """
    return (outputs * torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]).to(outputs.dtype)
