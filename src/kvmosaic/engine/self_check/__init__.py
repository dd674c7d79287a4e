"""Self-check: does this model, on this machine, give composed what it gives in one dense forward?

    rows        every token has its own queries, keys and values, and keys rotate as detected: near and far
    layers      attention of every layer equals its own code; fused operations equal what they replace
    composed    attention over cached pieces equals dense attention, first per layer, then in the logits

Each check is made where no error has accumulated, so that the result depends neither on the prompt nor on rounding
in earlier layers. Only the logits are about whole forwards, and they are judged against the model's own noise.
"""

from __future__ import annotations

from kvmosaic.attention import AttentionBackend
from kvmosaic.engine.self_check.comparison import Comparison, SelfCheck
from kvmosaic.engine.self_check.composed import check_composed, composed_prompts, moves
from kvmosaic.engine.self_check.layers import check_layers
from kvmosaic.engine.self_check.rows import check_rows
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.ordinary_text import ordinary_tokens

__all__ = ["Comparison", "SelfCheck", "run_self_check"]

_MIN_POSITIONS = 50
_LENGTHS = ((9, 7, 13, 5, 12), (4, 11, 9, 10), (6, 8, 3, 14, 7))
"""Number of tokens of system text, documents and question of the composed prompts."""
_LONG = (9, 67, 13, 12)
"""Replaces the first one, if the model has the positions: a document longer than any tile of a kernel."""
_NUM_CPU_ROWS, _NUM_GPU_ROWS = 128, 512
"""Rows of forwards that test effects on late rows only; multiples of all tiles, so that rows round alike."""


def run_self_check(model: LoadedModel, backend: AttentionBackend | None = None) -> SelfCheck:
    """Runs the check: about eight forwards, some 1,000 rows in all."""
    is_moved = moves(model)
    if model.max_positions is not None and model.max_positions < _MIN_POSITIONS:
        error = f"the check needs {_MIN_POSITIONS} positions, this model has {model.max_positions}"
        return SelfCheck((), is_moved, error)
    lengths = (_LONG if _most(model, sum(_LONG) + 8) == sum(_LONG) + 8 else _LENGTHS[0], *_LENGTHS[1:])
    num_rows = _most(model, _NUM_CPU_ROWS if model.device.type == "cpu" else _NUM_GPU_ROWS)
    num_tokens = max(num_rows, sum(sum(counts) for counts in lengths))
    tokens = ordinary_tokens(model.tokenizer, model.vocab_size, num_tokens)
    rows = tokens[:num_rows]
    findings: list[Comparison] = []
    try:
        findings += check_rows(model, rows)
        findings += check_layers(model, rows)
        findings += check_composed(model, composed_prompts(tokens, lengths), backend)
    except Exception as error:  # a failure here would also fail in an answer
        return SelfCheck(tuple(findings), is_moved, f"{type(error).__name__}: {error}")
    return SelfCheck(tuple(findings), is_moved)


def _most(model: LoadedModel, count: int) -> int:
    """Returns `count`, or fewer if the model's max position or max tokens per forward is lower."""
    return min(limit for limit in (count, model.max_positions, model.max_forward_tokens) if limit is not None)
