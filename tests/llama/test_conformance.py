"""llama.cpp does what every engine must do: compared with a dense forward of the same weights in float32."""

from __future__ import annotations

from functools import cache

import pytest
from support.engine_conformance import Reference, each_case, run_case
from support.llama_engine import llama_engine, llama_reader

from kvmosaic.assembly import bundled_reader
from kvmosaic.model import LoadedModel, load_model


@cache
def reader() -> LoadedModel:
    return load_model(bundled_reader(), dtype="float32")


@pytest.mark.parametrize(("case", "num_sequences"), each_case([64, 12, 5]))
def test_llama_cpp(case: str, num_sequences: int) -> None:
    run_case(case, llama_engine(llama_reader(), num_sequences=num_sequences), Reference(reader(), 0.05))
