"""Starting weights: small random numbers, plus three heads that already copy.

Copying needs two heads that only help each other: one that writes the token before into each token, and one that looks
for places whose token before is the present token. From pure noise a small model spends most of a short training
finding the pair. So the first layer starts with heads that attend one and two tokens back (with rotary positions this
takes a constant component in every embedding and a query turned by one or two positions), and the second layer with a
head whose query matches what the first of them wrote. Everything is trained from there; nothing is frozen.

A layer with a state does both at once: its keys start as the queries of the token before (`DeltaNet.start`).
"""

import torch
from torch import Tensor, nn

from training.hybrid import DeltaNet
from training.model import Attention, Layer, Reader

CONSTANT = 0.15  # the first number of every embedding
FAST = 6  # how many of the fastest rotations find the token before
SLOW = 0.005  # rotations slower than this hardly notice distances in a short prompt


def initialise(model: Reader, copying_heads: bool = True) -> None:
    """Fills the weights in place, from torch's random state."""
    config = model.config
    for name, parameter in model.named_parameters():
        if "embed" in name:
            nn.init.normal_(parameter, std=0.03)
        elif any(part in name for part in ("o_proj", "down_proj", "out_proj")):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=config.hidden**-0.5)
    for module in model.modules():
        if isinstance(module, DeltaNet):
            module.start()
    if copying_heads and not config.delta_layers:
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = CONSTANT
            first, second = (layer.self_attn for layer in model.model.layers[:2] if isinstance(layer, Layer))
            written = _look_back(first, model.inv_freq, config.kv_heads)
            _look_for(second, model.inv_freq, written)


def _look_back(attention: Attention, inv_freq: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Makes the first two query heads, which share a key head, attend one and two tokens back.

    Returns what the first of them reads (rows of the value projection) and where it writes (columns of the output).
    """
    size, half = attention.size, attention.size // 2
    attention.k_proj.weight[:size] = 0
    attention.k_proj.weight[:FAST, 0] = 1.4
    for head in (0, 1):
        angle = inv_freq[:FAST] * (head + 1)
        rows = attention.q_proj.weight[head * size : (head + 1) * size]
        rows[:] = 0
        rows[:FAST, 0] = 1.4 * angle.cos()
        rows[half : half + FAST, 0] = -1.4 * angle.sin()
        nn.init.orthogonal_(attention.o_proj.weight[:, head * size : (head + 1) * size])
        attention.o_proj.weight[:, head * size : (head + 1) * size] *= 0.04
    nn.init.orthogonal_(attention.v_proj.weight[:size])
    attention.v_proj.weight[:size, 0] = 0
    return attention.v_proj.weight[:size].clone(), attention.o_proj.weight[:, :size].clone()


def _look_for(attention: Attention, inv_freq: Tensor, written: tuple[Tensor, Tensor]) -> None:
    """Makes the first query head of the second layer copy tokens that follow a token like the present one."""
    size = attention.size
    slow = (inv_freq < SLOW).repeat(2)
    reads, writes = written
    attention.q_proj.weight[:size] = reads * slow[:, None]
    attention.k_proj.weight[:size] = (writes / 0.04).T * slow[:, None]
    attention.q_proj.weight[:size] *= 1.5
    attention.k_proj.weight[:size] *= 1.5
    nn.init.orthogonal_(attention.v_proj.weight[:size])
    attention.v_proj.weight[:size, 0] = 0
    attention.o_proj.weight[:, :size] = 0.06 * attention.v_proj.weight[:size].T
