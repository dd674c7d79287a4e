"""Attention over pieces without a model: keys cached at one position, read at another, merged exactly."""

import torch

from kvmosaic import Piece, composed_attention
from kvmosaic.rope import Rotation, rotate

HEAD_DIM = 16
frequencies = tuple(10_000.0 ** (-index / HEAD_DIM) for index in range(0, HEAD_DIM, 2))
rotation = Rotation("half", offset=0, rotary_dim=HEAD_DIM, sign=1, inv_freq=frequencies, head_dim=HEAD_DIM)


def rotated(x: torch.Tensor, first: int) -> torch.Tensor:
    """Queries or keys [T, heads, head_dim] as the model would make them at consecutive positions."""
    return rotate(x, rotation.tables(torch.arange(first, first + len(x)), dtype=x.dtype, device=x.device))


torch.manual_seed(0)
a, b = torch.randn(2, 100, 2, HEAD_DIM, dtype=torch.float64)  # keys of two documents, not yet rotated
values = torch.randn(2, 100, 2, HEAD_DIM, dtype=torch.float64)
query = rotated(torch.randn(1, 4, HEAD_DIM, dtype=torch.float64), 200)

# both documents were cached at position 0; b is read at the positions after a
pieces = [Piece(rotated(a, 0), values[0]), Piece(rotated(b, 0), values[1], distance=100)]
composed = composed_attention(query, pieces, rotation=rotation)

# the same with the keys computed where they are read
dense = composed_attention(query, [Piece(rotated(torch.cat([a, b]), 0), values.flatten(0, 1))])
print(f"largest difference: {(composed - dense).abs().max():.1e}")
