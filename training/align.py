"""The first steps of a hybrid that starts from a Llama: its layers with a state learn what attention wrote there.

Each is given what the teacher's attention was given, and is to write the same: all learn at once, each for itself,
before the whole is trained (hidden states are aligned so by Bick et al., arXiv 2408.10189).
"""

import torch
from torch import Tensor, nn

from training.model import Batch, Layer, Reader


class Aligned(nn.Module):
    """The mean of the squared errors of all layers with a state, each as a share of what is to be written."""

    def __init__(self, student: Reader, teacher: Reader) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch; padding does not count."""
        views, counted = self.student.views(batch), (batch.segments >= 0)[..., None]
        losses = []
        with torch.no_grad():
            x = self.teacher.embed(batch)
        for own, other in zip(self.student.model.layers, self.teacher.model.layers, strict=True):
            assert isinstance(own, Layer) and isinstance(other, Layer)
            with torch.no_grad():
                states = other.input_layernorm(x)
                wanted = other.mix(states, views, batch.context)
                x = x + wanted
                x = x + other.mlp(other.post_attention_layernorm(x))
            if own.has_state:
                error = (own.mix(states, views, batch.context) - wanted).float() * counted
                losses.append(error.pow(2).sum() / (wanted.float() * counted).pow(2).sum())
        return torch.stack(losses).mean()
