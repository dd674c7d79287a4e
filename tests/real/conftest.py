"""The real model of `make test-real`, loaded once; without it every test here is skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODELS = Path(os.environ.get("KVMOSAIC_REAL_MODELS", HERE.parents[1] / ".models"))
FILE = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = MODELS / "SmolLM2-135M-Instruct"


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("real")


@pytest.fixture(scope="session")
def model_file() -> Path:
    """SmolLM2-135M-Instruct as GGUF."""
    if not FILE.is_file():
        pytest.skip(f"{FILE} is not there; make test-real fetches it")
    return FILE


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The same weights, dequantized, as a folder that vLLM reads."""
    if not FOLDER.is_dir():
        pytest.skip(f"{FOLDER} is not there; make test-real writes it")
    return FOLDER


@pytest.fixture(scope="session")
def loaded(model_file: Path) -> Iterator[object]:
    """The model in float32, through the file."""
    from kvmosaic.model import load_model, quiet_libraries

    quiet_libraries()
    yield load_model(model_file, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def twin(loaded):
    """`twin(dtype, attention)`: transformers' own model with the same weights, with none of our code in it."""
    import torch
    from transformers import AutoModelForCausalLM

    made = {}

    def make(dtype: torch.dtype = torch.float32, attention: str = "eager"):
        if (dtype, attention) not in made:
            config = deepcopy(loaded.config)  # a model keeps the one it is given, and its attention is set there
            module = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
            module.load_state_dict(loaded.module.state_dict())
            module.generation_config = loaded.module.generation_config
            made[dtype, attention] = module.eval()
        return made[dtype, attention]

    return make
