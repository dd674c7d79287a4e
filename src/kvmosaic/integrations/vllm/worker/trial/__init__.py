"""What a worker tries on its own layers before it serves: each layer alone, so that rounding does not add up.

rounding.py     how far numbers may lie apart that were rounded a few times
text.py         the tokens of an ordinary text
rotation.py     numbers of a key beside those they turn with; a rotary embedding called directly
attention.py    what attention layers are given and give; the same by a dense softmax
layer_call.py   a layer of the model, called again with what it was given
plan.py         which tokens stand where, and in which blocks
layer_trial.py  one layer: its rotation, cache, attention, and the rest of it
model_trial.py  all of them in one forward; the whole model against its own noise
"""
