"""A fake `llama_cpp`, as far as the worker uses it.

It stores tokens in slots and refuses what llama.cpp refuses: too many tokens in a call or a slot, and positions that do
not follow on those that are stored. The next token is the sum of a slot's tokens with their positions: it differs as
soon as one of them is wrong.
"""

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace

__version__ = "9.9.9"
GGML_TYPE_F32 = 0


class llama_batch(ctypes.Structure):  # noqa: N801
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def llama_backend_init():
    pass


def llama_print_system_info():
    return b"CPU : FAST = 1 | SLOW = 0 | BIG = 1 | "


def llama_model_default_params():
    return SimpleNamespace()


def llama_context_default_params():
    return SimpleNamespace(type_k=1)


def llama_model_load_from_file(path, params):
    return json.loads(Path(path.decode()).read_text())


def llama_init_from_model(model, params):
    slots = [[] for _ in range(params.n_seq_max)]
    return SimpleNamespace(vocab_size=model["vocab_size"], params=params, slots=slots, rows={})


def llama_model_get_vocab(model):
    return model


def llama_vocab_n_tokens(vocab):
    return vocab["vocab_size"]


def llama_model_n_embd(model):
    return model["embedding_length"]


def llama_model_n_head(model):
    return model["head_count"]


def llama_model_n_head_kv(model):
    return model["head_count_kv"]


def llama_model_n_layer(model):
    return model["block_count"]


def llama_get_memory(context):
    return context


def llama_memory_clear(context, data):
    for slot in context.slots:
        slot.clear()


def llama_memory_seq_rm(context, slot, first, last):
    assert last == -1
    del context.slots[slot][first:]


def llama_decode(context, batch):
    if not 0 < batch.n_tokens <= context.params.n_batch:
        return -1
    context.rows = {}
    for row in range(batch.n_tokens):
        assert batch.n_seq_id[row] == 1
        slot = context.slots[batch.seq_id[row][0]]
        if batch.pos[row] != len(slot) or len(slot) == context.params.n_ctx // context.params.n_seq_max:
            return 1
        slot.append(batch.token[row])
        if batch.logits[row]:
            token = sum((place + 1) * token for place, token in enumerate(slot)) % context.vocab_size
            context.rows[row] = (ctypes.c_float * context.vocab_size)()
            context.rows[row][token] = 1.0
    return 0


def llama_get_logits_ith(context, row):
    return ctypes.cast(context.rows[row], ctypes.POINTER(ctypes.c_float))
