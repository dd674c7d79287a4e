"""Detection of a model's attention layers: rotation, mask, bias and key sources, from one observed forward."""
