"""vLLM plain, with documents by copies, and in place: random weights of an 8 B shape, prompts of token ids.

Engines follow each other, each in a process of its own, as two of them would measure each other's memory. They are
forked from this one, which has imported vLLM, but not touched the device.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from benchmarks.gpu.engine import EIGHT, GIB, TINY
from benchmarks.gpu.stage import Stage

NUM_ROUNDS, NUM_PLAIN, NUM_READERS, NUM_DECODED = 6, 30, 32, 129
MAX_DECODED = 20_000
"""Tokens of documents of a request that decodes beside others: vLLM without us keeps them once per request."""
CAPTURED = [1, 2, 4, 8, 16, 32]
PIECEWISE = {"compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": CAPTURED}}
"""With full CUDA graphs, documents are copied although they were to be read in place."""
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def measure(stage: Stage) -> None:
    """Each engine does all works."""
    os.environ |= SETTINGS
    import vllm.v1.engine.llm_engine  # noqa: F401
    import vllm_plugin_works as works
    from vllm_plugin_engines import IN_PLACE, PLAIN, PLUGIN, Forked

    from kvmosaic.lab.bench.sizes import Sizes
    from kvmosaic.lab.bench.workloads import TokenSource

    documents = [(3, 24)] if stage.is_dry else [(8, 512), (8, 2_048)]
    if not stage.is_dry and _device_bytes() > 100 * GIB:
        documents.append((16, 4_096))
    config = TINY if stage.is_dry else EIGHT
    longest = max(count * length for count, length in documents) + 1_024
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": min(longest, config["max_position_embeddings"])}
    if not stage.is_dry:
        options |= {
            "enforce_eager": False,
            "block_size": 16,
            "gpu_memory_utilization": 0.85,
            "max_num_batched_tokens": 16_384,
            "compilation_config": {"cudagraph_capture_sizes": CAPTURED},
        }
    readers = 3 if stage.is_dry else NUM_READERS
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**config, architectures=["LlamaForCausalLM"], dtype="bfloat16", bos_token_id=None).save_pretrained(
            folder
        )
        dtype = "float32" if stage.is_dry else "bfloat16"
        answered: dict[tuple[str, str], list[list[int]]] = {}
        for name in (PLAIN, IN_PLACE, PLUGIN):
            with stage.part("start", engine=name) as row:
                engine = Forked(name, Path(folder), dtype, GIB, options | (PIECEWISE if name == IN_PLACE else {}))
            if "failed" in row:
                continue
            for count, length in documents:
                sizes = Sizes(documents=count, document_tokens=length, plain_tokens=length, rounds=NUM_ROUNDS)
                source = TokenSource(0, f"{count} {length}", config["vocab_size"], sizes)
                system = source.system()
                rounds, plain_rounds, decoded = (1, 1, 4) if stage.is_dry else (NUM_ROUNDS, NUM_PLAIN, NUM_DECODED)
                made = [works.Work("permuted", works.permuted(source, system, rounds, 1), 1)]
                if count * length <= MAX_DECODED:
                    readings = works.shared(source, system, 1, readers)
                    made += [
                        works.Work(f"decode x {readers}", readings, decoded),
                        works.Work("repeated", works.repeated(source, system, rounds, 1), 1),
                        works.Work("none", works.none(source, system, plain_rounds, 1), 1),
                    ]
                for work in made:
                    if not engine.is_alive:
                        break
                    with stage.part(work.name, engine=name, documents=f"{count} x {length}") as row:
                        works.measure(work, [engine])
                        row |= _figures(work.taken[name], decoded if "decode" in work.name else 1)
                        tokens = [answer for taken in work.taken[name] for answer in taken.tokens]
                        if name == IN_PLACE:
                            answered[work.name, row["documents"]] = tokens
                        elif name == PLUGIN and (others := answered.get((work.name, row["documents"]))):
                            row["tokens_as_in_place"] = _alike(tokens, others)
            engine.close()


def _figures(taken: list[Any], num_answer: int) -> dict[str, Any]:
    first = [statistics.fmean(each.first_seconds) for each in taken]
    found = {"first_seconds": statistics.median(first), "computed_tokens": sum(each.num_computed for each in taken)}
    if replayed := sum(each.num_replayed for each in taken):
        found["replayed_forwards"] = replayed
    if num_answer > 1:
        found["seconds_per_step"] = statistics.median(each.decode_seconds for each in taken) / (num_answer - 1)
    return found


def _alike(answers: list[list[int]], others: list[list[int]]) -> float:
    """The mean share of an answer's first tokens that come before the first difference."""
    pairs = [list(zip(*each, strict=True)) for each in zip(answers, others, strict=True)]
    return statistics.fmean(len([*takewhile(lambda pair: pair[0] == pair[1], each)]) / len(each) for each in pairs)


def _device_bytes() -> int:
    """Without a context of CUDA in this process, which engines fork from."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20
