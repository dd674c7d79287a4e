"""The table of architectures: builds every tiny model of the tests, measures it, and writes docs/architectures.md.

python scripts/architectures.py
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.engines import GREEDY, answer, build_engine, token_ids  # noqa: E402
from support.engines import dense_logits as dense_answer_logits  # noqa: E402
from support.families import FAMILIES, HYBRIDS, build  # noqa: E402
from support.float64 import Float64  # noqa: E402
from support.hybrid import oracle_logits  # noqa: E402
from support.loaded import dense_layout, dense_logits, random_prompt  # noqa: E402
from support.reference import eager_logits  # noqa: E402

from kvmosaic.errors import WAY_OUT, UnsupportedModel  # noqa: E402
from kvmosaic.layers import LayerSpec  # noqa: E402
from kvmosaic.layout import arrange  # noqa: E402
from kvmosaic.model import LoadedModel  # noqa: E402
from kvmosaic.prompt import Prompt  # noqa: E402

Measure = Callable[[LoadedModel], float | None]
"""Takes a model, returns the largest difference of a logit, or None where it does not apply."""

HEADER = """# Architectures

Look your model up below, or check it:

    kvmosaic check path/to/a/model

Written by `scripts/architectures.py` with transformers {version} and torch {torch}; run it again instead of editing.
{num_movable} architectures are movable, {num_hybrid} of them with [layers that carry a state](#with-a-state);
{num_fixed} are usable without moving, {num_refused} refused.

Each was run as a tiny random model in float64, with windows of 8 tokens. Its properties were detected by running its
own attention at load.

- **rotation**: which dimensions are rotated in pairs ("half": the first half of the rotary dimensions with the second;
  "interleaved": neighbours), and rotary dimensions of all dimensions of a head. "none": layers without positions.
  "bias": layers that add a slope times the distance to every score (ALiBi); only torch attention computes it.
- **mask**: tokens that a layer hides besides future ones.
- **kept**: numbers stored per token and layer. "latent": the compressed latent and its rotary part, once for all heads.
  "index key": what an indexer scores, which [chooses the best keys](models.md#layers-that-read-the-best-keys-only).

| largest difference of a logit, over all of them | |
| --- | --- |
| our dense attention / transformers' eager attention (Falcon: sdpa), composed prompts, `shared` positions | {dense} |
| the engine (chunks cached, cold and warm) / one dense forward, in `shared` positions | {composed} |
| the same in `sequential` positions, where cached chunks are moved | {moved} |
| with a state: the engine / transformers alone, token by token, its caches joined, in `shared` positions | {states} |

In some models a token depends on its absolute position by more than the rotation (Beam, Ministral 3, Mistral 4,
Llama 4): a moved chunk then differs from a dense forward at the new position. Llama 4 is limited to sequences and
forwards shorter than its `floor_scale`. Falcon rounds its bias to bfloat16; in a finer type its chunks are used only at
the positions where they were computed.
"""


STATES = """Beside their layers with attention, these have layers that carry a state from token to token: a memory, the
last inputs of a convolution, or both. What a document does to a memory is cached with it, and applied in the order of
the prompt ([how](models.md#layers-with-a-state)).

- **memory**: what a document multiplies it by, found at load by running the layer."""


FIXED = """`shared` and `absolute` positions only: `sequential`, and `chunk_context="none"` in `shared` positions, are
refused at load.

A prompt or an offset beyond the model's table of positions is refused before it runs."""


def dense_difference(model: LoadedModel) -> float:
    """Dense twin against transformers."""
    layout = dense_layout(random_prompt())
    expected = eager_logits(model.module, layout, [layer.mask for layer in model.layers if not layer.num_chosen])
    return float((dense_logits(model, layout) - expected).abs().max())


def composed_difference(model: LoadedModel) -> float:
    """Engine against dense twin, nothing moved."""
    return _engine_difference(model, "shared")


def moved_difference(model: LoadedModel) -> float | None:
    """Engine against dense twin, chunks moved."""
    return _engine_difference(model, "sequential") if model.is_movable else None


MEASURES: dict[str, Measure] = {
    "dense": dense_difference,
    "composed": composed_difference,
    "moved": moved_difference,
}


def _engine_difference(model: LoadedModel, strategy: str) -> float:
    prompt = random_prompt()
    engine = build_engine(model, position_strategy=strategy)
    largest = 0.0
    for _ in ("cold", "warm"):
        request, logits = answer(engine, prompt)
        expected = dense_answer_logits(model, arrange(prompt, strategy), token_ids(request))  # type: ignore[arg-type]
        largest = max(largest, float((logits - expected).abs().max()))
    return largest


def _distinct(values: list[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _rotation(layer: LayerSpec) -> str:
    if layer.bias is not None:
        return "bias"
    if layer.rotation is None:
        return "none" if layer.is_movable else "not found"
    rotation = layer.rotation
    turning = "half" if rotation.layout == "half" else "interleaved"
    backwards = ", backwards" if rotation.sign < 0 else ""
    # Proportional frequencies keep every pair but turn only some.
    turned = 2 * sum(frequency != 0 for frequency in rotation.inv_freq)
    return f"{turning}{backwards} {turned}/{rotation.head_dim}"


def _kept(layer: LayerSpec) -> str:
    if not layer.is_stored:
        return f"layer {layer.source_layer}'s"
    if layer.num_chosen:
        return f"{layer.key_dim} (index key)"
    if layer.value_in_key:
        return f"{layer.key_dim} (latent)"
    return str(layer.num_kv_heads * (layer.key_dim + layer.value_dim))


def _memory(model: LoadedModel) -> str:
    kinds = {"left": "a matrix per head", "right": "a matrix per head", None: "none, a convolution only"}
    layer = model.state_layers[0]
    if layer.kind == "numbers":
        return "a number per head" if layer.constant else "a number per channel"
    return kinds[layer.kind]


def state_difference(model: LoadedModel) -> float:
    """Engine against transformers alone, documents in two orders, cold and warm."""
    engine, largest = build_engine(model), 0.0
    parts = [list(segment.token_ids or ()) for segment in random_prompt().segments]
    for chunks in (parts[1:-1], parts[-2:0:-1]) * 2:
        prompt = Prompt.from_tokens(parts[0], chunks, parts[-1])
        request, logits = answer(engine, prompt, replace(GREEDY, max_tokens=1))
        largest = max(largest, float((logits[0] - oracle_logits(model.module, request.layout)[-1]).abs().max()))
    return largest


def _label(family: str) -> str:
    model_type = (FAMILIES | HYBRIDS)[family].model_type
    return f"`{model_type}`" + ("" if family == model_type else f" ({family})")


def _reason(error: UnsupportedModel) -> str:
    """Why a model is refused, without the names of its classes."""
    text = re.sub(r"^(the attention of )?\w+(ForCausalLM|LMHeadModel)", r"\1the model", str(error))
    return re.sub(r"(token to token) \(\w+\)", r"\1", text).removesuffix(f"; {WAY_OUT}")


def _properties(model: LoadedModel) -> tuple[str, str, str]:
    return (
        _distinct([_rotation(layer) for layer in model.layers]),
        _distinct([str(layer.mask) for layer in model.layers]),
        _distinct([_kept(layer) for layer in model.layers]),
    )


def _table(columns: list[str], rows: list[tuple[str, tuple[str, ...]]]) -> str:
    """A line for each group of architectures with the same properties."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for label, cells in rows:
        groups.setdefault(cells, []).append(label)
    lines = [f"| {' | '.join([', '.join(labels), *cells])} |" for cells, labels in groups.items()]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns), *lines])


Rows = list[tuple[str, tuple[str, ...]]]


def page(movable: Rows, hybrid: Rows, fixed: Rows, refused: Rows, **numbers: str | int) -> str:
    """The whole page."""
    columns = ["architectures", "rotation", "mask", "kept"]
    text = HEADER.format(num_hybrid=len(hybrid), num_fixed=len(fixed), num_refused=len(refused), **numbers)
    text += "\n## Movable\n\n" + _table(columns, movable)
    text += "\n\n## With a state\n\n" + STATES + "\n\n" + _table([*columns, "memory"], hybrid)
    text += "\n\n## Usable without moving\n\n" + FIXED + "\n\n"
    text += _table([*columns, "why"], fixed)
    text += "\n\n## Refused\n\nEach is refused at load with the reason. "
    return text + "So are encoder-decoder models (T5, BART).\n\n" + _table(["architectures", "why"], refused) + "\n"


def write_table(path: Path, measures: dict[str, Measure]) -> tuple[int, int, int]:
    """Measures every family and writes the table.

    Returns:
        How many are movable, usable without moving, and refused.
    """
    movable: Rows = []
    hybrid: Rows = []
    fixed: Rows = []
    refused: Rows = []
    types: set[str] = set()
    largest = dict.fromkeys(measures, 0.0)
    for family in FAMILIES:
        print(family, flush=True)
        try:
            model = LoadedModel.from_module(build(family))
        except UnsupportedModel as error:
            refused.append((_label(family), (_reason(error),)))
            continue
        for name, measure in measures.items():
            largest[name] = max(largest[name], measure(model) or 0.0)
        if model.is_movable:
            movable.append((_label(family), _properties(model)))
            types.add(FAMILIES[family].model_type)
        else:
            fixed.append((_label(family), (*_properties(model), str(model.immovable_reason))))
    states = 0.0
    for family in HYBRIDS:
        print(family, flush=True)
        with Float64():
            model = LoadedModel.from_module(build(family))
        states = max(states, state_difference(model))
        hybrid.append((_label(family), (*_properties(model), _memory(model))))
        types.add(HYBRIDS[family].model_type)
    text = page(
        movable,
        hybrid,
        fixed,
        refused,
        version=transformers.__version__,
        torch=torch.__version__,
        num_movable=len(types),
        states=f"{states:.0e}",
        **{name: f"{difference:.0e}" for name, difference in largest.items()},
    )
    path.write_text(text, encoding="utf-8")
    return len(types), len(fixed), len(refused)


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "architectures.md", help="file to write")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    movable, fixed, refused = write_table(arguments.output, MEASURES)
    print(f"{movable} movable, {fixed} usable without moving, {refused} refused -> {arguments.output}")


if __name__ == "__main__":
    main()
