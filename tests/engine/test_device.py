"""The engine on a device that is not the CPU, simulated: nothing is left on the CPU, and no step waits needlessly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.engines import build_engine, token_ids
from support.families import build
from support.simulated_device import SimulatedDevice

from kvmosaic import KVPiece, Prompt, SamplingParams, composed_attention
from kvmosaic.attention import TorchBackend
from kvmosaic.engine import Engine
from kvmosaic.engine.self_check.whole import run_self_check
from kvmosaic.model import LoadedModel
from kvmosaic.rope import Rotation

DOCUMENTS = [range(20, 30), range(50, 62), range(30, 37)]
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=3, top_p=0.9, top_k=5, repetition_penalty=1.2, logprobs=2, n=2)


def engine_of(model: LoadedModel, repair: str) -> Engine:
    return build_engine(model, position_strategy="sequential", repair=repair, backend=TorchBackend())


def answers(engine: Engine, *params: SamplingParams) -> tuple[list[list[int]], int]:
    """Tokens of two orders of documents, all settings at once, and how many steps they took."""
    tokens, num_steps = [], 0
    for order in ((0, 1, 2), (2, 0, 1)):
        prompt = Prompt.from_tokens(range(5, 12), [DOCUMENTS[index] for index in order], range(60, 64))
        requests = [engine.add_request(prompt, each) for each in params]
        while engine.has_unfinished_requests:
            engine.step()
            num_steps += 1
        assert [request.error for request in requests if request.error] == []
        tokens += [list(map(token_ids, requests))]
    return tokens, num_steps


@pytest.mark.parametrize(
    ("family", "repair"),
    [
        pytest.param("llama", "query(0.3)", marks=pytest.mark.representative),
        *(
            pytest.param(family, repair, marks=pytest.mark.slow)
            for family, repair in (
                ("llama", "first(2)"),
                ("llama", "deviation(0.3)"),
                ("gemma3", "first(2)"),
                ("deepseek_v3", "first(2)"),
                ("gpt_oss", "none"),
                ("bloom", "none"),
            )
        ),
    ],
)
def test_answers_are_those_of_the_cpu_and_a_step_reads_one_number_back(family: str, repair: str) -> None:
    module = build(family, torch.float32)
    model = LoadedModel.from_module(module)
    expected, _ = answers(engine_of(model, repair), GREEDY)
    with SimulatedDevice() as device:
        device.moved(module)
        engine = engine_of(replace(model, device=torch.device(device.name)), repair)
        device.reads.clear()
        found, num_steps = answers(engine, GREEDY)
    assert found == expected
    # a repair that measures reads its measurements once; experts of transformers read how many tokens they have
    aside = ("deviations.py", "request_repair.py", "loaded.py:forward")
    ours = [
        read for read in device.reads if not any(part in read for part in aside[:2]) and not read.endswith(aside[2])
    ]
    assert len(ours) <= num_steps and all(read.endswith("sampler.py:sample") for read in ours), Counter(ours)


@pytest.mark.representative
def test_drawing_and_log_probabilities_read_as_often_for_many_answers_as_for_one() -> None:
    module = build("llama", torch.float32)
    model = LoadedModel.from_module(module)
    expected, _ = answers(engine_of(model, "none"), *[DRAWN] * 3)
    with SimulatedDevice() as device:
        device.moved(module)
        engine = engine_of(replace(model, device=torch.device(device.name)), "none")
        device.reads.clear()
        found, num_steps = answers(engine, *[DRAWN] * 3)
    assert found == expected
    assert len(device.reads) <= 5 * num_steps, Counter(device.reads)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_model_is_probed_and_checked_where_it_is(family: str) -> None:
    with SimulatedDevice() as device:
        model = LoadedModel.from_module(device.moved(build(family, torch.float32)))
        assert model.device.type == device.name
        assert run_self_check(model).passed


def test_a_rotation_has_its_tables_where_its_distances_are() -> None:
    rotation = Rotation("half", 0, 8, 1, (1.0, 0.1, 0.01, 0.001), 8)
    query, key, value = torch.randn(3, 5, 2, 8)
    expected = composed_attention(query, [KVPiece(key, value, 7)], rotation=rotation)
    with SimulatedDevice() as device:
        tables = rotation.tables(torch.arange(3, device=device.name))
        assert {table.device.type for table in (tables.cos, tables.sin, tables.permutation)} == {device.name}
        moved = [part.to(device.name) for part in (query, key, value)]
        found = composed_attention(moved[0], [KVPiece(moved[1], moved[2], 7)], rotation=rotation)
        assert device.reads == []
        torch.testing.assert_close(found.to("cpu"), expected)


def test_tensors_on_two_devices_are_found() -> None:
    with SimulatedDevice() as device:
        here = torch.ones(3, device=device.name)
        with pytest.raises(RuntimeError, match="add on two devices"):
            here + torch.ones(3)
        assert (here + 1)[[0, 2]].sum().item() == 4
        assert len(device.reads) == 1
