"""Dense reference of a composed prompt: one forward of transformers with a dense mask, for checks and tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvmosaic.container import available_memory
from kvmosaic.errors import InvalidConfig
from kvmosaic.layout import Layout


@dataclass(frozen=True, slots=True)
class DenseRows:
    """A layout as rows of one causal forward without moved keys.

        layout    system | chunk 1 | chunk 2, moved by d |              question
        rows      system | chunk 1 | system, by d later | chunk 2 there | question

    A chunk that is moved takes what it saw along: keys depend on distances only, so both together, d positions later,
    are what it was computed from. So nothing is rotated here that the check is to prove.

    token_ids, positions [T]
    mask [T, T]: True where the row token sees the column token
    """

    token_ids: Tensor
    positions: Tensor
    mask: Tensor

    @classmethod
    def of(cls, layout: Layout) -> DenseRows:
        """The rows of a layout; those of its last span are the last."""
        token_ids: list[int] = []
        positions: list[int] = []
        places: dict[tuple[int, int], slice] = {}
        seen: list[tuple[slice, slice, Any]] = []

        def add(index: int, shift: int) -> slice:
            if (index, shift) in places:
                return places[index, shift]
            span = layout.spans[index]
            views = [(add(view.span, view.distance + shift), view.visibility) for view in span.views]
            rows = slice(len(token_ids), len(token_ids) + span.num_tokens)
            token_ids.extend(span.token_ids)
            computed_at = span.positions or range(span.start, span.start + span.num_tokens)
            positions.extend(position + shift for position in computed_at)
            seen.extend((rows, columns, visibility) for columns, visibility in views)
            places[index, shift] = rows
            return rows

        add(len(layout.spans) - 1, 0)
        mask = torch.zeros(len(token_ids), len(token_ids), dtype=torch.bool)
        for rows in places.values():
            mask[rows, rows] = torch.ones(rows.stop - rows.start, rows.stop - rows.start).tril().bool()
        for rows, columns, visibility in seen:
            shown = torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.bool)
            if visibility is not None:
                shown[:, list(visibility.hidden)] = False
                if visibility.ends:
                    shown &= torch.arange(shown.shape[1]) < torch.tensor(visibility.ends)[:, None]
            mask[rows, columns] |= shown
        return cls(torch.tensor(token_ids), torch.tensor(positions), mask)


class DenseReference:
    """A model of transformers on the CPU."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @classmethod
    def load(cls, model_config: Any, num_parameters: int) -> DenseReference:
        """Loads the model that vLLM runs, in float32 where memory allows it, else in its own dtype.

        Raises:
            InvalidConfig: not enough memory, or transformers does not load it; the message says why.
        """
        from transformers import AutoModelForCausalLM

        free = available_memory() or 0
        dtype = next(
            (each for each in (torch.float32, model_config.dtype) if num_parameters * each.itemsize < free), None
        )
        if dtype is None:
            needed = num_parameters * model_config.dtype.itemsize
            raise InvalidConfig(
                f"transformers needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
            )
        try:
            module = AutoModelForCausalLM.from_pretrained(
                model_config.model,
                revision=model_config.revision,
                trust_remote_code=model_config.trust_remote_code,
                dtype=dtype,
                attn_implementation="eager",
            )
        except Exception as error:  # another format, quantized weights, an architecture of vLLM's own
            raise InvalidConfig(f"transformers does not load it: {type(error).__name__}: {error}"[:200]) from error
        return cls(module.eval())

    @torch.inference_mode()
    def logprobs(self, layout: Layout, num_rows: int) -> Tensor:
        """[num_rows, V]: log-probabilities after each of the last tokens of a layout."""
        rows = DenseRows.of(layout)
        module = self._module
        config = module.config.get_text_config()
        mask: Any = _added(rows.mask, module.dtype)
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            is_near = rows.positions[:, None] - rows.positions < config.sliding_window
            mask = {"full_attention": mask, "sliding_attention": _added(rows.mask & is_near, module.dtype)}
        logits = module(
            rows.token_ids[None], position_ids=rows.positions[None], attention_mask=mask, use_cache=False
        ).logits
        found: Tensor = logits[0, -num_rows:].float().log_softmax(-1)
        return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 1, T, T]: what is added to scores."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)[None, None]


def distance(reference: Tensor, answered: Sequence[dict[int, float]]) -> float:
    """Root mean square of the differences of log-probabilities, over the tokens that an answer lists at each step."""
    pairs = zip(reference, answered, strict=True)
    apart = [float(row[token]) - value for row, step in pairs for token, value in step.items()]
    return math.sqrt(sum(each * each for each in apart) / len(apart))
