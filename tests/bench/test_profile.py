"""Clocks in the modules of a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.families import build

from kvmosaic.bench.peers.own import OwnPeer
from kvmosaic.bench.profile import profile_answers
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

PROMPT = Prompt.from_tokens(range(20, 24), [range(30, 40), range(40, 52)], range(60, 65))


def test_parts_of_a_step_follow_the_layer_that_is_slow_and_no_clock_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = build("llama", torch.float32)
    peer = OwnPeer(LoadedModel.from_module(module), enable_chunk_cache=True, capacity="1MiB")
    layers = module.model.layers
    now = [0.0]

    def seconds() -> float:
        now[0] += 1e-6
        return now[0]

    def take_long(*_: object) -> None:
        now[0] += 0.01

    monkeypatch.setattr("kvmosaic.bench.profile.time", SimpleNamespace(perf_counter=seconds))
    for linear in (layers[0].self_attn.q_proj, layers[0].mlp.up_proj):
        linear.register_forward_hook(take_long, prepend=True)
    num_hooks = [len(m._forward_hooks) for m in module.modules()]
    (parts,) = profile_answers(peer, {"permuted": [PROMPT]}, 4)
    assert 0.02 < parts.linear < 0.021 and parts.step > 0
    assert 0 < parts.attention < 0.001, "what its linear layers take is not counted twice"
    assert [len(m._forward_hooks) for m in module.modules()] == num_hooks


def test_batches_that_are_compared_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = OwnPeer(LoadedModel.from_module(build("llama", torch.float32)), enable_chunk_cache=True, capacity="1MiB")
    asked, answer = [], peer.answer
    monkeypatch.setattr(peer, "answer", lambda prompts, count: asked.append(len(prompts)) or answer(prompts, count))
    one, three = profile_answers(peer, {"one": [PROMPT], "three": [PROMPT] * 3}, 4, rounds=2)
    assert asked == [1] + [1] * 3 + [1, 3, 1, 3], "first the documents, one by one"
    assert (one.name, one.width, three.name, three.width) == ("one", 1, "three", 3)
    assert one.attention > 0 and three.attention > 0
