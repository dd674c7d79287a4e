"""A small engine of the library's parts: block manager, block storage and paged attention, without `LLM`.

The model is one attention layer with random weights. Two prompts share a prefix, one of them is forked into two
answers, and every token is compared with a forward over the whole text.
"""

import torch

from kvmosaic import ChunkCacheConfig, Prompt
from kvmosaic.attention import paged_attention
from kvmosaic.cache import Allocation, KVCache
from kvmosaic.layers import LayerGeometry
from kvmosaic.layout import arrange
from kvmosaic.memory import BlockStorage

HEADS, KV_HEADS, WIDTH, VOCABULARY, BLOCKS, BLOCK_SIZE = 4, 2, 16, 100, 32, 4

torch.manual_seed(0)
embedding = torch.randn(VOCABULARY, HEADS * WIDTH, dtype=torch.float64)
to_query = torch.randn(HEADS * WIDTH, HEADS * WIDTH, dtype=torch.float64) / 8
to_key, to_value = torch.randn(2, HEADS * WIDTH, KV_HEADS * WIDTH, dtype=torch.float64) / 8

manager = KVCache("toy", ChunkCacheConfig(block_size=BLOCK_SIZE), request_blocks=BLOCKS, chunk_blocks=1)
layers = [LayerGeometry(source_layer=0, num_kv_heads=KV_HEADS, key_dim=WIDTH, value_dim=WIDTH)]
storage = BlockStorage(layers, BLOCKS, BLOCK_SIZE, torch.float64, torch.device("cpu"))
cache = [tensor.view(BLOCKS, BLOCK_SIZE, KV_HEADS, WIDTH) for tensor in storage.run(0, 0, storage.num_slots)]


def admit(token_ids: list[int]) -> Allocation:
    """Allocates a prompt; what another one has computed is reused."""
    plan = manager.plan(arrange(Prompt.plain(token_ids)))
    print(f"{plan.num_tokens} tokens: {plan.reused_tokens} reused, {plan.computed_tokens} to compute")
    allocation = manager.allocate(plan)
    for source, target in allocation.copies:
        storage.copy_block(source, target)
    return allocation


def step(running: list[Allocation], texts: list[list[int]]) -> list[int]:
    """Computes the missing tokens of all sequences in one forward; returns the next token of each."""
    manager.begin_step()
    tables = [allocation.last.table for allocation in running]
    firsts = [allocation.last.num_computed for allocation in running]
    counts = [table.num_tokens - first for table, first in zip(tables, firsts, strict=True)]
    rows = embedding[[token for text, first in zip(texts, firsts, strict=True) for token in text[first:]]]
    slots = [
        slot for table, first, count in zip(tables, firsts, counts, strict=True) for slot in table.slots(first, count)
    ]
    keys, values = ((rows @ weights).view(-1, KV_HEADS, WIDTH) for weights in (to_key, to_value))
    storage.write(0, torch.tensor(slots), keys, values)
    query = (rows @ to_query).view(-1, HEADS, WIDTH)
    block_tables, context_lens = [table.block_ids for table in tables], [table.num_tokens for table in tables]
    output = paged_attention(query, *cache, block_tables, context_lens, query_lens=counts)
    for allocation, count in zip(running, counts, strict=True):
        manager.advance(allocation, 0, count)
    manager.end_step()
    last = torch.tensor(counts).cumsum(0) - 1
    return ((rows + output.flatten(1))[last] @ embedding.T).argmax(-1).tolist()


def append(allocation: Allocation, text: list[int], token: int) -> None:
    """Adds a token; a block that another sequence reads is copied before it is written."""
    for source, target in manager.append_slots(allocation, [token]):
        print(f"block {source} is shared: copied to block {target}")
        storage.copy_block(source, target)
    text.append(token)


def expected(text: list[int]) -> int:
    """The next token by one dense forward."""
    rows = embedding[text]
    query = (rows @ to_query).view(1, -1, HEADS, WIDTH).transpose(1, 2)
    key, value = ((rows @ weights).view(1, -1, KV_HEADS, WIDTH).transpose(1, 2) for weights in (to_key, to_value))
    attend = torch.nn.functional.scaled_dot_product_attention
    output = attend(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    return int(((rows + output[0])[-1] @ embedding.T).argmax())


texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
running = [admit(texts[0])]
(token,) = step(running, texts)

running.append(manager.fork(running[0]))  # another answer to the same prompt
texts.append(texts[0].copy())
append(running[0], texts[0], token)
append(running[1], texts[1], 42)

texts.append([1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22])
running.append(admit(texts[2]))  # begins like the first one

matches = []
for _ in range(8):
    tokens = step(running, texts)
    for allocation, text, token in zip(running, texts, tokens, strict=True):
        matches.append(token == expected(text))
        append(allocation, text, token)

print(f"{sum(matches)} of {len(matches)} tokens equal those of a dense forward")
for allocation in running:
    manager.release(allocation)
manager.check_invariants()
