"""The layers of a reader of the Qwen3.5 family: gated delta nets.

One keeps a state of keys by values. In the words of its kernel, with decay g and writing strength b,

    S <- e^g S;   u = b (v - k S);   S <- S + k' u;   o = q S

so what a token writes depends on what all tokens before it wrote. Over a tree of tokens, in which questions and
documents do not see each other, `u` is the solution of one triangular system, and its outputs are attention without a
softmax. Context rows see what they were computed with; question rows see the composed state: the writes of all
documents one after the other, with the keys, values, decays and strengths that each document has by itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Paths:
    """What tokens see, for layers with a state. C context tokens, T tokens in all."""

    own: Tensor  # [B, C, C] bool: what a context token was computed with, itself included
    composed: Tensor  # [B, T, T] bool: the context as one text, and below it each question
    before: Tensor  # [B, T, taps] index of the tokens just before in a token's own text; T where there is none


def paths_of(own: Tensor, seen: Tensor, taps: int) -> Paths:
    """Paths from the visibility of context rows [B, C, C] and question rows [B, Q, T]."""
    context, length = own.shape[1], seen.shape[2]
    order = torch.arange(length)
    real = own.diagonal(dim1=1, dim2=2)  # a token of padding does not see itself
    ordered = (real[:, :, None] & real[:, None, :]) & (order[:context, None] >= order[None, :context])
    composed = torch.cat((F.pad(ordered, (0, length - context)), seen), 1)
    mine = torch.cat((F.pad(own, (0, length - context)), seen), 1) & (order[:, None] > order[None, :])
    last = torch.where(mine, order + 1, 0).amax(-1) - 1
    step = F.pad(torch.where(last < 0, length, last), (0, 1), value=length)
    found = [step]
    for _ in range(taps - 1):
        found.append(step.gather(1, found[-1]))
    return Paths(own, composed, torch.stack(found, -1)[:, :length])


def normalised(x: Tensor) -> Tensor:
    """Each row at length one, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, mask: Tensor) -> Tensor:
    """Outputs [B, heads, T, size] in float32 of rows of one tree.

    Args:
        query: with `key` [B, heads, T, keys], at length one.
        key: see `query`.
        value: [B, heads, T, size].
        decay: logarithms [B, heads, T].
        strength: [B, heads, T].
        mask: [B, T, T] bool, what a token sees, itself included.
    """
    seen = mask[:, None]
    along = torch.einsum("bij,bhj->bhi", mask.float(), decay)
    fading = torch.where(seen, along[..., :, None] - along[..., None, :], -1e9).exp()
    read = fading * (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    met = strength[..., None] * fading * (key @ key.transpose(-1, -2))
    written = torch.linalg.solve_triangular(met, strength[..., None] * value, upper=False, unitriangular=True)
    out: Tensor = read @ written
    return out


class DeltaNet(nn.Module):
    """A gated delta net, named as in transformers' Qwen3_5GatedDeltaNet."""

    taps = 3

    def __init__(self, hidden: int, heads: int, size: int, eps: float) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        wide = heads * size
        self.in_proj_qkv = nn.Linear(hidden, 3 * wide, bias=False)
        self.in_proj_z = nn.Linear(hidden, wide, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        self.conv1d = nn.Conv1d(3 * wide, 3 * wide, self.taps + 1, groups=3 * wide, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = nn.RMSNorm(size, eps)
        self.out_proj = nn.Linear(wide, hidden, bias=False)

    def start(self) -> None:
        """Starting values: memories of some tokens to all, and keys that are queries of the token before."""
        wide = self.heads * self.size
        keys = slice(wide, 2 * wide)
        with torch.no_grad():
            self.A_log.copy_(torch.linspace(-6.0, 0.0, self.heads))
            self.dt_bias.fill_(-2.0)
            self.in_proj_qkv.weight[keys] = self.in_proj_qkv.weight[:wide]
            nn.init.normal_(self.conv1d.weight, std=0.1)
            self.conv1d.weight[:wide, 0, -1] += 1
            self.conv1d.weight[keys, 0, -2] += 1
            self.conv1d.weight[2 * wide :, 0, -1] += 1

    def forward(self, x: Tensor, paths: Paths, context: int, is_causal: bool) -> Tensor:
        """Maps [B, T, hidden] to [B, T, hidden]."""
        rows, length, _ = x.shape
        mixed = F.linear(x, self.in_proj_qkv.weight.to(x.dtype))
        room = F.pad(mixed, (0, 0, 0, 1))
        weights = self.conv1d.weight[:, 0].to(x.dtype)
        turned = mixed * weights[:, -1]
        for tap in range(self.taps):
            index = paths.before[:, :, tap, None].expand(-1, -1, mixed.shape[2])
            turned = turned + room.gather(1, index) * weights[:, -2 - tap]
        parts = F.silu(turned).view(rows, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        query, key, value = normalised(parts[0]), normalised(parts[1]), parts[2].float()
        strength = F.linear(x, self.in_proj_b.weight.to(x.dtype)).float().sigmoid().transpose(1, 2)
        raw = F.linear(x, self.in_proj_a.weight.to(x.dtype)).float() + self.dt_bias
        decay = (-self.A_log.exp() * F.softplus(raw)).transpose(1, 2)
        out = delta_rule(query, key, value, decay, strength, paths.composed)
        if not is_causal:
            query, key, value, decay, strength = (each[:, :, :context] for each in (query, key, value, decay, strength))
            inside = delta_rule(query, key, value, decay, strength, paths.own)
            out = torch.cat((inside, out[:, :, context:]), 2)
        gate = F.linear(x, self.in_proj_z.weight.to(x.dtype)).view(rows, length, self.heads, self.size)
        wide = (self.norm(out.transpose(1, 2)) * F.silu(gate.float())).to(x.dtype)
        return F.linear(wide.flatten(2), self.out_proj.weight.to(x.dtype))
