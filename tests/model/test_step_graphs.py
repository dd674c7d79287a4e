"""Replayed decode steps give what steps launched one by one give; what cannot be replayed is computed as before.

On a CPU the kernels are interpreted and a stand-in captures: it runs the same forward again on the same buffer. With
TRITON_INTERPRET=0 the same tests capture CUDA graphs on a GPU.
"""

from __future__ import annotations

import random
import sys
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engines import build_engine, dense_logits, fragment, token_ids
from support.families import build

from kvmosaic import Prompt, SamplingParams
from kvmosaic.model import LoadedModel

if sys.platform != "linux":
    pytest.skip("Triton is for Linux only", allow_module_level=True)

from kvmosaic.attention.triton import replays, work
from kvmosaic.attention.triton.backend import TritonBackend
from kvmosaic.attention.triton.replays import GraphCapture
from kvmosaic.model import step_graphs
from kvmosaic.model.step_graphs import StepGraphs

DEVICE = torch.device("cpu" if TritonBackend.is_interpreted else "cuda")


def run_again(function):
    """Stands for a CUDA graph: the result stays where it is, and nothing but the buffer changes between runs."""
    logits = function().clone()
    return logits, lambda: logits.copy_(function())


@pytest.fixture(autouse=True)
def _small_rooms(monkeypatch):
    """The interpreter takes as long for a program without work as for one with some."""
    monkeypatch.setattr(replays, "_LEAST_ROOM", 1)


def with_graphs(model, *, capture=None, **options):
    """Prompts are computed by torch, which takes less time than interpreted kernels."""
    engine = build_engine(model, position_strategy="sequential", **options)
    capture = capture or (run_again if DEVICE.type == "cpu" else GraphCapture(DEVICE))
    engine.runner.graphs = StepGraphs(model, engine.runner.storages, TritonBackend(), capture)
    return engine


def prompts_over(num_prompts, *, question_tokens=None, seed=0, vocab=100, sizes=(7, 4, 9)):
    """Documents in orders of their own, so that keys are moved, and questions of several lengths, or of one."""
    chance = random.Random(seed)
    documents = [[chance.randrange(5, vocab) for _ in range(size)] for size in sizes]
    made = []
    for number in range(num_prompts):
        chance.shuffle(documents)
        question = [chance.randrange(5, vocab) for _ in range(question_tokens or number % 3 + 1)]
        made.append(Prompt.from_tokens([5, 6, 7], list(documents), question))
    return made


def ask(engine, prompts, max_tokens):
    """Runs prompts at once, the first answers to the end; a request and its tokens of each."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    requests = engine.run([engine.add_request(prompt, params) for prompt in prompts])
    assert not any(request.error for request in requests)
    return requests, [token_ids(request) for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_replayed_steps_give_the_dense_logits(family):
    """Windows, soft caps and sinks; three rows in a graph of four."""
    model = LoadedModel.from_module(build(family, torch.float32).to(DEVICE))
    prompts = prompts_over(3)
    engine = with_graphs(model)
    requests, tokens = ask(engine, prompts, 4)
    graphs = engine.runner.graphs
    if family == "gpt_oss" and DEVICE.type == "cuda":
        assert graphs.replays.refused and not graphs.replays.num_replays, "its experts are chosen on the host"
    else:
        assert (graphs.replays.problem, graphs.replays.num_replays) == ("", 2), "the first step of a shape is launched"
    for row, (request, chosen) in enumerate(zip(requests, tokens, strict=True)):
        expected = dense_logits(model, request.layout, chosen)
        torch.testing.assert_close(engine.runner.logits[-1][row], expected[-1], atol=1e-4, rtol=0)
        assert expected.argmax(-1).tolist() == chosen


@pytest.mark.slow
def test_questions_are_replayed_beside_answers():
    """Rows of several tokens that see each other, alone and in a step with an answer."""
    model = LoadedModel.from_module(build("llama", torch.float32).to(DEVICE))
    engine, plain = with_graphs(model), build_engine(model, position_strategy="sequential")
    prompts = prompts_over(6, question_tokens=5)
    graphs, params = engine.runner.graphs, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for first, second in zip(prompts[::2], prompts[1::2], strict=True):
        found = []
        for each in (engine, plain):
            requests = [each.add_request(first, params)]
            while not requests[0].first_token_time:
                each.step()
            requests.append(each.add_request(second, params))
            each.run(requests)
            found.append([token_ids(request) for request in requests])
        assert found[0] == found[1]
    assert graphs.replays.problem == ""
    widths = {step.num_rows for step, captured in graphs.replays.steps.items() if captured is not None}
    assert widths >= {2, 8}, "questions of 5 rows, with one row of an answer or without, and two answers"


@cache
def small_model():
    return LoadedModel.from_module(build("llama", torch.float32))


def planned(model, storages, steps):
    """Shapes and numbers of decode steps, with and without what the step before has planned."""
    grown, anew = (StepGraphs(model, storages, TritonBackend(), run_again) for _ in range(2))
    for spans in steps:
        grown._planned = grown._planned if grown._planned and grown._planned.grow(spans) else grown._plan(spans)
        yield grown._planned, anew._plan(spans)


@given(data=st.data(), walk=st.sampled_from([1, 4, 7, 64]))
def test_a_plan_that_grows_is_that_of_the_next_step(data, walk):
    """Answers that reach the ends of blocks, runs and walks, and requests that come and go."""
    model = small_model()
    engine = build_engine(model, position_strategy="sequential", block_size=data.draw(st.sampled_from([1, 3, 8])))
    fragment(engine, data.draw(st.integers(0, 9)))
    steps = []

    def run(spans):
        if all(map(step_graphs._is_ordinary, spans)):
            steps.append(list(spans))
        return torch.zeros(sum(span.num_logits for span in spans), 128)

    engine.runner.run = run
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    for prompt, length in zip(prompts_over(len(lengths)), lengths, strict=True):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "MIN_WALK", walk)
        for grown, anew in planned(model, engine.runner.storages, steps):
            assert grown.shape == anew.shape
            assert all(map(np.array_equal, grown.parts, anew.parts))
            num_stored = sum(len(span.slots) for span in grown.spans)
            assert (grown.parts[2] < 0).sum() == grown.shape.num_rows - num_stored, "nothing more is stored"


def failing(function):
    raise RuntimeError("operation not permitted when stream is capturing")


def drifting(function):
    logits = function().clone()
    return logits, lambda: logits.mul_(1.1)


@pytest.mark.slow
@pytest.mark.parametrize(("capture", "problem"), [(failing, "not permitted"), (drifting, "replayed results of 1 rows")])
def test_what_cannot_be_captured_runs_launch_by_launch(capture, problem, caplog):
    """A forward that waits for the device, and one that a replay computes otherwise: right answers, said once."""
    model = LoadedModel.from_module(build("llama", torch.float32).to(DEVICE))
    prompts = prompts_over(1)
    engine = with_graphs(model, capture=capture)
    _, tokens = ask(engine, prompts, 5)
    assert tokens == ask(build_engine(model, position_strategy="sequential"), prompts, 5)[1]
    graphs = engine.runner.graphs
    assert problem in caplog.text and 1 <= caplog.text.count("not replayed") <= replays.MAX_REFUSED
    assert graphs.replays.num_replays == 0 and graphs.replays.refused


def test_shapes_are_rounded_up():
    assert [*map(replays.rounded, (1, 3, 5, 8, 9, 13, 17, 33, 50, 400))] == [1, 4, 8, 8, 12, 16, 24, 48, 64, 512]
    assert all(count <= replays.rounded(count) < 2 * count + 1 for count in range(1, 600))
    assert replays.room_for(0) == 0 and all(replays.room_for(count) >= count for count in range(1, 600))
