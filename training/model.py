"""The reader as a small torch module that trains all layouts in one forward.

The weights have the names and shapes of transformers' LlamaForCausalLM, and causal input gives the same logits. What
transformers cannot do in training is here: context rows attend with keys at their local positions, question rows see
the same keys turned to their moved positions. A row of a batch is

    [ system | document 1 | document 2 | ... | pad ][ question + answer | question + answer | ... | pad ]
      context tokens, `context` of them                blocks that do not see each other
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.hybrid import DeltaNet, Paths, paths_of
from training.pointers import HEADS, HOP_LAYER, LAYER, Pointers, pointer_loss

PAD_SEGMENT = -1


@dataclass(frozen=True)
class ReaderConfig:
    """The shape of the reader, in the words of LlamaConfig."""

    vocabulary: int = 3072
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 512
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-5
    max_positions: int = 4096
    delta_layers: tuple[int, ...] = ()
    """Layers with a state. With these it is a Qwen3.5, else a Llama."""

    @property
    def head_size(self) -> int:
        """Numbers per head."""
        return self.hidden // self.heads

    @property
    def pointing(self) -> tuple[int, int]:
        """The layer whose heads look at the place of the answer, and the one that looks for the name leading to it."""
        attending = [layer for layer in range(self.layers) if layer not in self.delta_layers]
        return (attending[-1], attending[0]) if self.delta_layers else (LAYER, HOP_LAYER)


SHAPES = {"llama": ReaderConfig(), "hybrid": ReaderConfig(delta_layers=(0, 1, 2, 5))}
FIELDS = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "rope_theta": "rope_theta",
}
"""What they are called in config.json."""


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens, the first `context` of each are context. All tensors are [B, T] unless noted."""

    tokens: Tensor
    local: Tensor
    moved: Tensor
    segments: Tensor  # 0 system, 1.. documents; questions count from 1 on their own; PAD_SEGMENT for padding
    causal: Tensor  # [B] bool: documents see the documents before them
    sees_system: Tensor  # [B] bool: documents see the system text
    chosen: Tensor  # [K] flat indexes of the tokens whose next token is predicted
    targets: Tensor  # [K]
    weights: Tensor  # [K]
    context: int
    pointers: Pointers
    bridges: Pointers


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales each row to mean square one, in float32, as transformers does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [B, T, heads, head_size] by angles [B, T, 1, head_size / 2], half layout."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention [B, heads, T, head_size] over [B, kv_heads, S, head_size] with a bias [B, 1, T, S]."""
    rows, heads, length, size = query.shape
    groups = key.shape[1]
    flat = query.reshape(rows * groups, heads // groups * length, size)
    scores = torch.bmm(flat, key.reshape(rows * groups, -1, size).transpose(1, 2))
    scores = scores.view(rows, heads, length, -1).float() * size**-0.5 + bias
    weights = torch.softmax(scores, -1).to(query.dtype).view(rows * groups, heads // groups * length, -1)
    return torch.bmm(weights, value.reshape(rows * groups, -1, size)).view(rows, heads, length, size)


def visibility(batch: Batch) -> tuple[Tensor, Tensor]:
    """What context rows [B, C, C] and question rows [B, Q, C + Q] see."""
    context = batch.context
    inside, outside = batch.segments[:, :context], batch.segments[:, context:]
    order = torch.arange(batch.tokens.shape[1])
    own, other = inside[:, :, None], inside[:, None, :]
    system = (other == 0) & batch.sees_system[:, None, None]
    allowed = (own == other) | system | batch.causal[:, None, None]
    allowed &= (order[:context, None] >= order[None, :context]) & (other != PAD_SEGMENT)
    known = (other != PAD_SEGMENT).expand(-1, outside.shape[1], -1)
    same = (outside[:, :, None] == outside[:, None, :]) & (order[context:, None] >= order[None, context:])
    seen = torch.cat((known, same), 2)
    return allowed & (own != PAD_SEGMENT), seen


class Attention(nn.Module):
    """Grouped-query attention with two positions for each key."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.size = config.head_size
        self.is_gated = bool(config.delta_layers)
        self.q_proj = nn.Linear(config.hidden, config.heads * self.size * (1 + self.is_gated), bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(config.heads * self.size, config.hidden, bias=False)
        if self.is_gated:
            self.q_norm, self.k_norm = (Norm(config, self.size) for _ in range(2))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys [B, T, heads, head_size], and what gates the outputs."""
        query = linear(x, self.q_proj).view(*x.shape[:2], -1, self.size * (1 + self.is_gated))
        key = linear(x, self.k_proj).view(*x.shape[:2], -1, self.size)
        if not self.is_gated:
            return query, key, None
        query, gate = query.chunk(2, -1)
        return self.q_norm(query), self.k_norm(key), gate.flatten(2).sigmoid()

    def looks(self, x: Tensor, angles: tuple[Tensor, ...], mask: Tensor, context: int, heads: int) -> Tensor:
        """Log attention weights [B, heads, questions, T] of the first query heads, which share the first key head."""
        query, key, _ = self.heads(x)
        query = turn(query, angles[0], angles[1])[:, context:, :heads]
        key = turn(key, angles[2], angles[3])[:, :, 0]
        scores = torch.einsum("bqhd,bkd->bhqk", query, key).float() * self.size**-0.5 + mask
        return torch.log_softmax(scores, -1)

    def forward(self, x: Tensor, angles: tuple[Tensor, ...], masks: tuple[Tensor, Tensor], context: int) -> Tensor:
        """Maps [B, T, hidden] to [B, T, hidden]."""
        query, key, gate = self.heads(x)
        value = linear(x, self.v_proj).view(*x.shape[:2], -1, self.size)
        cos, sin, moved_cos, moved_sin = angles
        query = turn(query, cos, sin).transpose(1, 2)
        moved = turn(key, moved_cos, moved_sin).transpose(1, 2)
        key = turn(key[:, :context], cos[:, :context], sin[:, :context]).transpose(1, 2)
        value = value.transpose(1, 2)
        read = attention(query[:, :, :context], key, value[:, :, :context], masks[0])
        asked = attention(query[:, :, context:], moved, value, masks[1])
        out = torch.cat((read, asked), 2).transpose(1, 2).flatten(2)
        return linear(out if gate is None else out * gate, self.o_proj)


class FeedForward(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, hidden] to [B, T, hidden]."""
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


class Norm(nn.Module):
    """A learned scale per number; a Qwen3.5 stores it less one."""

    def __init__(self, config: ReaderConfig, size: int | None = None) -> None:
        super().__init__()
        self.above = 1.0 if config.delta_layers else 0.0
        self.weight = nn.Parameter(torch.ones(size or config.hidden) - self.above)
        self.eps = config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., size] to the same shape."""
        return rms_norm(x, self.weight + self.above, self.eps)


class Layer(nn.Module):
    """Attention or a layer with a state, then feed-forward, each added to its normalised input."""

    def __init__(self, config: ReaderConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(config)
        self.has_state = index in config.delta_layers
        if self.has_state:
            self.linear_attn = DeltaNet(config.hidden, config.heads, config.head_size, config.norm_eps)
        else:
            self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config)
        self.mlp = FeedForward(config)

    def mix(self, states: Tensor, views: "Views", context: int) -> Tensor:
        """What attention, or the layer with a state, writes [B, T, hidden]."""
        written: Tensor
        if self.has_state:
            written = self.linear_attn(states, views.paths, context, views.is_causal)
        else:
            written = self.self_attn(states, views.angles, views.masks, context)
        return written

    def forward(self, x: Tensor, views: "Views", context: int) -> Tensor:
        """Maps [B, T, hidden] to [B, T, hidden]."""
        x = x + self.mix(self.input_layernorm(x), views, context)
        read: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return read


class Body(nn.Module):
    """Everything below the output, named as in transformers."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList([Layer(config, index) for index in range(config.layers)])
        self.norm = Norm(config)


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Applies a layer in the type of the activations."""
    return F.linear(x, layer.weight.to(x.dtype))


@dataclass(frozen=True)
class Views:
    """Where the tokens of a batch are, and what they see."""

    angles: tuple[Tensor, ...]
    masks: tuple[Tensor, Tensor]  # additive, of context rows [B, 1, C, C] and question rows [B, 1, Q, C + Q]
    paths: Paths | None  # for layers with a state
    is_causal: bool  # whether every context token sees all before it


class Reader(nn.Module):
    """A Llama or a Qwen3.5 with tied embeddings.

    `dtype` is that of the activations, the weights stay as they are. `is_causal`: all prompts are read in causal order.
    """

    is_causal = False

    def __init__(self, config: ReaderConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.model = Body(config)
        self.inv_freq = config.rope_theta ** -(torch.arange(0, config.head_size, 2).float() / config.head_size)

    def views(self, batch: Batch) -> Views:
        """Angles, masks and paths."""
        angles: list[Tensor] = []
        for positions in (batch.local, batch.moved):
            angle = (positions[..., None].float() * self.inv_freq)[:, :, None, :]
            angles += [angle.cos().to(self.dtype), angle.sin().to(self.dtype)]
        seen = visibility(batch)
        masks = tuple(torch.where(mask, 0.0, -1e9)[:, None] for mask in seen)
        paths = paths_of(*seen, DeltaNet.taps) if self.config.delta_layers else None
        return Views(tuple(angles), masks, paths, self.is_causal)  # type: ignore[arg-type]

    def embed(self, batch: Batch) -> Tensor:
        """What the first layer gets [B, T, hidden]."""
        return F.embedding(batch.tokens, self.model.embed_tokens.weight.to(self.dtype))

    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [K, vocabulary] at the chosen tokens and, in training, the loss of the pointers."""
        x, views = self.embed(batch), self.views(batch)
        pointing = torch.zeros(())
        answer_layer, hop_layer = self.config.pointing
        for index, layer in enumerate(self.model.layers):
            pointers = {answer_layer: batch.pointers, hop_layer: batch.bridges}.get(index)
            assert isinstance(layer, Layer)
            if pointers is not None and self.training:
                states = layer.input_layernorm(x)
                looks = layer.self_attn.looks(states, views.angles, views.masks[1], batch.context, HEADS)
                pointing = pointing + pointer_loss(looks, pointers, x.shape[1])
            x = layer(x, views, batch.context)
        x = self.model.norm(x.flatten(0, 1)[batch.chosen])
        return F.linear(x, self.model.embed_tokens.weight.to(self.dtype)).float(), pointing

    def logits(self, batch: Batch) -> Tensor:
        """Logits [K, vocabulary] at the chosen tokens."""
        return self.read(batch)[0]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss of the chosen tokens, by weight, and the loss of the pointers."""
        logits, pointing = self.read(batch)
        losses = F.cross_entropy(logits, batch.targets, reduction="none")
        return (losses * batch.weights).sum() / batch.weights.sum(), pointing

    def answers(self, batch: Batch) -> Tensor:
        """The most likely next token [K] at the chosen tokens."""
        return self.logits(batch).argmax(-1)
