"""An answer without end: any number of tokens in 42 blocks of memory, far beyond the positions of the model.

python examples/endless.py --tokens 50000
"""

import argparse
import time
from pathlib import Path

from kvmosaic import LLM, EngineConfig, SamplingParams


def memory_mib() -> int:
    """Memory of this process in MiB; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS")), 0)


parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--tokens", type=int, default=400, help="how many tokens to generate")
options, _ = parser.parse_known_args()

# the type is named because it says how many bytes a block has: 96 KiB in float32, half of that in bfloat16
llm = LLM("reader", dtype="float32", engine_config=EngineConfig(request_cache_size="4032KiB"))
params = SamplingParams(
    temperature=1.0, seed=1, ignore_eos=True, max_tokens=options.tokens, sink_tokens=4, window_tokens=252
)
pool = llm.engine.kv_cache.request_pool
print(f"{llm.engine.max_positions:,} positions, {pool.num_blocks} blocks of {pool.block_size} tokens")

request = llm.engine.add_request(llm.encoder.encode("The ferry goes from the old harbour to Oak Island."), params)
every, told, began, blocks = max(options.tokens // 10, 1), 0, time.perf_counter(), 0
while not request.is_finished:
    llm.engine.step()
    blocks = max(blocks, pool.num_used)
    num_tokens = request.answers[0].num_tokens if request.answers else 0
    if num_tokens - told >= every:
        speed, began, told = (num_tokens - told) / (time.perf_counter() - began), time.perf_counter(), num_tokens
        print(f"{told:7,} tokens  {blocks:3} blocks  {memory_mib():5} MiB  {speed:5.0f} tokens/s", flush=True)
        blocks = 0
print("…" + request.answers[0].output().text[-160:])
