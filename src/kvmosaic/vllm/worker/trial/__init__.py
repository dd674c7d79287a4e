"""Trials of a worker's layers, which are modules of vLLM: each alone, so that rounding does not accumulate.

rotation.py     limits of rounding; keys against the pair they rotate in; a rotary embedding called directly
attention.py    inputs and outputs of attention layers; the same by a dense softmax
plan.py         the tokens, their positions and blocks
layer_trial.py  one layer, called again with its inputs: its rotation, cache, attention, and the rest of it
caches.py       moves in the caches, where no module can be called
"""
