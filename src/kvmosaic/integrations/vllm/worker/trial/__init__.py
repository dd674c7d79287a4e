"""Trials of a worker's layers at startup: each layer alone, so that rounding does not accumulate.

rounding.py     limits for numbers that were rounded a few times
text.py         the tokens of an ordinary text
rotation.py     keys against the pair they rotate in; a rotary embedding called directly
attention.py    inputs and outputs of attention layers; the same by a dense softmax
layer_call.py   a layer of the model, called again with its recorded inputs
plan.py         the tokens' positions and blocks
layer_trial.py  one layer: its rotation, cache, attention, and the rest of it
model_trial.py  all of them in one forward; the whole model against its own noise
"""
