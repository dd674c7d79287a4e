"""vLLM, imported once and quietly, with the settings of a small machine without a network."""

from __future__ import annotations

import importlib
import os
import warnings

from kvmosaic.container import allowed_instruction_sets

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}

# what a fork would otherwise import anew: engines, models, the server
MODULES = (
    "vllm",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)


# what vLLM asks to choose kernels and types by: the CPU itself, which no environment variable changes
ASKED_OF_THE_CPU = ("avx512_supported", "avx512_bf16_supported", "vnni_supported", "amx_tile_supported")


def _hold_to_less() -> None:
    """With KVMOSAIC_CPU_ISA below avx512, vLLM takes the kernels that it brings for AVX2, too."""
    import torch

    if "avx512" not in allowed_instruction_sets():
        for name in ASKED_OF_THE_CPU:
            setattr(torch.cpu, f"_is_{name}", lambda: False)


def load_vllm() -> None:
    """Imports vLLM (half a minute the first time); its warnings are not ours."""
    os.environ.update(ENVIRONMENT)
    _hold_to_less()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
