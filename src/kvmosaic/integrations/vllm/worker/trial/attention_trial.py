"""Attention modules called alone, on rows like those of a norm, where the model as a whole cannot be called."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.errors import NotMovable
from kvmosaic.integrations.vllm.worker.extra_forward import ExtraForward
from kvmosaic.integrations.vllm.worker.kv_layout import KVLayout
from kvmosaic.integrations.vllm.worker.trial.attention import AttentionRecorder
from kvmosaic.integrations.vllm.worker.trial.layer_trial import LayerTrial, RecordedCall, outputs
from kvmosaic.integrations.vllm.worker.trial.plan import TrialPlan
from kvmosaic.integrations.vllm.worker.trial.units import modules_around

_POSITIONS = ("positions", "position_ids")
_ROWS = "hidden_states"


class AttentionTrial:
    """Trials of the module around each attention layer: projections, rotation, cache, softmax, output projection.

        rows, as the layer's norm gives them ──▶ attention module ──▶ trial of its call

    No other stage of a pipeline, no expert and no other replica takes part: a worker calls modules of its own only.
    """

    def __init__(self, places: KVLayout, nested: ExtraForward, plan: TrialPlan) -> None:
        """Finds the modules.

        Raises:
            NotMovable: a layer without a module that takes positions and hidden states.
        """
        self._places, self._nested, self._plan = places, nested, plan
        self._recorder = AttentionRecorder(places.layers)
        self._trial = LayerTrial(places, nested, plan, self._recorder)
        around = modules_around(places)
        self._calls = {place.name: _module(place.name, around[place.name]) for place in places.layers}
        self._norms = {name: getattr(modules[0], "input_layernorm", None) for name, modules in around.items()}

    def trouble(self) -> str:
        """The defect of the first defective layer; runs the same forwards whatever it finds."""
        with self._recorder.watching():
            found = [self._of_layer(name, number) for number, name in enumerate(self._calls)]
        return next(filter(None, found), "")

    def _of_layer(self, name: str, number: int) -> str:
        module, positions_name, others = self._calls[name]
        given = self._rows(name, number)
        with self._nested.step([self._plan.text_run], compiled=False) as rows:
            arguments = {**others, positions_name: rows.positions, _ROWS: given}
            call = RecordedCall(module, (), {**arguments, _ROWS: given.clone()}, rows.positions.clone(), 0)
            output = outputs(module(**arguments), len(given))
        return self._trial.trouble(call, output, (name,))

    def _rows(self, name: str, number: int) -> Tensor:
        """[T, hidden size]: the same on every worker."""
        size = int(self._nested.model_config.get_hidden_size())
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(len(self._plan.tokens), size, generator=generator).to(
            self._places.device, self._nested.dtype
        )
        norm = self._norms[name]
        normed = norm(rows) if isinstance(norm, nn.Module) else rows
        return normed if isinstance(normed, Tensor) else rows


def _module(name: str, around: Any) -> tuple[nn.Module, str, dict[str, None]]:
    """The innermost module around a layer that takes positions and hidden states, and its other arguments: none."""
    for module in reversed(around):
        parameters = inspect.signature(module.forward).parameters
        positions = next((each for each in _POSITIONS if each in parameters), None)
        if positions and _ROWS in parameters:
            known = (positions, _ROWS)
            plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            others = [
                key
                for key, each in parameters.items()
                if key not in known and each.kind in plain and each.default is inspect.Parameter.empty
            ]
            return module, positions, dict.fromkeys(others)
    raise NotMovable(f"{name}: no module around it takes positions and hidden states")
