"""The table of architectures: builds every tiny model of the tests, measures it, and writes docs/architectures.md.

python scripts/architectures.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.engines import answer, build_engine, token_ids  # noqa: E402
from support.engines import dense_logits as dense_answer_logits  # noqa: E402
from support.families import FAMILIES, build  # noqa: E402
from support.loaded import dense_layout, dense_logits, random_prompt  # noqa: E402
from support.reference import eager_logits  # noqa: E402

from kvmosaic.errors import UnsupportedModel  # noqa: E402
from kvmosaic.layers import LayerSpec  # noqa: E402
from kvmosaic.layout import arrange  # noqa: E402
from kvmosaic.model import LoadedModel  # noqa: E402
from kvmosaic.model.unsupported import WAY_OUT  # noqa: E402

Measure = Callable[[LoadedModel], float | None]
"""Takes a model, returns the largest difference of a logit, or None where it does not apply."""

HEADER = """# Architectures

Does my model work, and which parts of it does kvmosaic support? Look it up below, or check it:

    kvmosaic check path/to/a/model

Written by `scripts/architectures.py` with transformers {version} and torch {torch}; run it again instead of editing.

Every row is a tiny random model of that architecture in float64: a few layers, windows of 8 tokens, norms that are not
neutral. The properties below were detected by running the model's own attention at load, not looked up by name.

- **rotation**: which dimensions are rotated in pairs ("half": the first half of the rotary dimensions with the second;
  "interleaved": neighbours), and rotary dimensions of all dimensions of a head. "none": layers without positions.
  "bias": layers that add a slope times the distance to every score (ALiBi); only torch attention computes it.
- **mask**: tokens that a layer hides besides future ones.
- **kept**: numbers stored per token and layer. "latent": the compressed latent and its rotary part, once for all heads.
- **dense**: largest difference of a logit between our dense attention and transformers' own eager attention (Falcon:
  its sdpa attention) on a composed prompt (`shared` positions, written-out mask).
- **composed**: largest difference of a logit between the engine (chunks cached, cold and warm) and one dense forward,
  in `shared` positions.
- **moved**: the same in `sequential` positions, where cached chunks are used at other positions than their own.

In some models a token depends on its absolute position by more than the rotation: Beam scales the queries of layers
without rotation, Ministral 3 and Mistral 4 those of far positions, Llama 4 cuts positions into chunks. Cached chunks
then keep the values of the position they were computed at; cached and recomputed are still the same, but a moved
chunk differs from a dense forward at the new position. Llama 4 counts tokens instead of reading positions for this,
so it is limited to sequences and forwards shorter than its `floor_scale`.

Attention that is implemented inside its module (BLOOM, MPT, Falcon, GPT-J, CodeGen, GPT-Neo, XGLM) is recognized by
the name of its class and gets an adapter at load: the module projects, our attention attends, and the result is
compared with the module's own code. Falcon rounds its bias to bfloat16 in every type, so that the bias of two tokens
depends on their positions. In bfloat16 that is ordinary rounding; in a finer type its chunks are used only at the
positions where they were computed.

{num_movable} architectures are movable, {num_fixed} usable without moving, {num_refused} refused.
"""


FIXED = """`shared` and `absolute` positions only: `sequential`, and `chunk_context="none"` in `shared` positions, are
refused at load.

In `shared` positions every chunk is computed right after the system prompt and read there, independent of the other
chunks: nothing is moved, so that learned positions are exact. In `absolute` positions a chunk is computed at its
`position_offset` and reused at that offset only. The model's table limits positions: a prompt or an offset beyond it
is refused before it runs."""


def dense_difference(model: LoadedModel) -> float:
    """Dense twin against transformers."""
    layout = dense_layout(random_prompt())
    expected = eager_logits(model.module, layout, [layer.mask for layer in model.layers])
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
    if layer.value_in_key:
        return f"{layer.key_dim} (latent)"
    return str(layer.num_kv_heads * (layer.key_dim + layer.value_dim))


def _number(difference: float | None) -> str:
    if difference is None:
        return ""
    return "0" if difference == 0 else f"{difference:.0e}"


def _label(family: str) -> str:
    model_type = FAMILIES[family].model_type
    return f"`{model_type}`" + ("" if family == model_type else f" ({family})")


def _row(family: str, model: LoadedModel, measures: dict[str, Measure]) -> str:
    cells = [
        _label(family),
        _distinct([_rotation(layer) for layer in model.layers]),
        _distinct([str(layer.mask) for layer in model.layers]),
        _distinct([_kept(layer) for layer in model.layers]),
        *(_number(measure(model)) for measure in measures.values()),
    ]
    return "| " + " | ".join(cells) + " |"


def _table(columns: list[str], rows: list[str]) -> str:
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns), *rows])


def write_table(path: Path, measures: dict[str, Measure]) -> tuple[int, int, int]:
    """Measures every family and writes the table.

    Returns:
        How many are movable, usable without moving, and refused.
    """
    movable: list[str] = []
    fixed: list[str] = []
    refused: list[str] = []
    types: set[str] = set()
    for family in FAMILIES:
        print(family, flush=True)
        try:
            model = LoadedModel.from_module(build(family))
        except UnsupportedModel as error:
            refused.append(f"| {_label(family)} | {str(error).removesuffix(f'; {WAY_OUT}')} |")
            continue
        row = _row(family, model, measures)
        if model.is_movable:
            movable.append(row)
            types.add(FAMILIES[family].model_type)
        else:
            fixed.append(f"{row} {model.immovable_reason} |")
    columns = ["architecture", "rotation", "mask", "kept", *measures]
    text = HEADER.format(
        version=transformers.__version__,
        torch=torch.__version__,
        num_movable=len(types),
        num_fixed=len(fixed),
        num_refused=len(refused),
    )
    text += "\n## Movable\n\n" + _table(columns, movable)
    text += "\n\n## Usable without moving\n\n" + FIXED + "\n\n"
    text += _table([*columns, "why"], fixed)
    text += "\n\n## Refused\n\nEach is refused at load with the reason. "
    text += "So are encoder-decoder models (T5, BART).\n\n"
    text += _table(["architecture", "why"], refused) + "\n"
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
