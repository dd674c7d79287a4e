"""Layer probe: detects a model's attention layers with a few tiny forwards.

Attention is replaced by "every token returns its own value", which answers three questions in all layers at
once: does every layer call attention exactly once; does anything besides attention mix tokens; and how do queries and
keys of the same token change with its position?
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvmosaic.errors import WAY_OUT, UnsupportedModel
from kvmosaic.layers import AttentionCall, LayerSpec, MaskSpec
from kvmosaic.model.adapters import install_adapters, installed_adapters, remove_adapters
from kvmosaic.model.frequencies import frequency_buffers
from kvmosaic.model.hook import ATTENTION_NAME, LAYER_ATTRIBUTE, PROBE_NAME, attention_scope, install
from kvmosaic.model.indexer import hook_indexers
from kvmosaic.model.latent import expand_again, with_latents
from kvmosaic.model.probe.adapter_layers import with_biases
from kvmosaic.model.probe.masks import read_mask
from kvmosaic.model.states import mixing_scope, row_by_row, state_modules
from kvmosaic.model.unsupported import check_rules
from kvmosaic.rope import PROBE_POSITIONS, Detection, detect_rotation, relative_error

Record = Callable[[Sequence[int], Sequence[int] | None], list[AttentionCall]]
"""Runs tokens at positions (None: as the model numbers them), and returns the attention calls."""
_SAME = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_FINE_SAME = 1e-4
_ALIKE = {torch.bfloat16: 0.3, torch.float16: 0.1}
_FINE_ALIKE = 0.05
"""Relative change of a row in another place of the forward that rounding explains."""


def check_rows_are_alike(module: Any, calls: list[AttentionCall]) -> None:
    """Requires that one token at one position is the same in every row of a forward.

    Half of the rows may differ: in a tie between experts, rounding decides. The size of rounding errors does not matter
    here; a counted row differs altogether.

    Args:
        module: the transformers model.
        calls: attention calls for one token, at the same position in all rows.

    Raises:
        UnsupportedModel: the model counts rows instead of reading positions.
    """
    for call in calls:
        # the first layer has hardly rounded anything yet, and learned positions are added before it
        tolerances, fine = (_SAME, _FINE_SAME) if call is calls[0] else (_ALIKE, _FINE_ALIKE)
        limit = tolerances.get(call.key.dtype, fine)
        for part in call.rows:
            if float(_change(part[1:], part[:1]).median()) > limit:
                raise UnsupportedModel(
                    f"{type(module).__name__} counts the tokens of a forward instead of reading the positions it is "
                    f"given, so the position of a cached chunk cannot be passed to it; {WAY_OUT}"
                )


def check_begins_at_zero(module: Any, calls: list[AttentionCall], numbered: list[AttentionCall]) -> None:
    """Requires that a prompt begins at position 0.

    Args:
        module: the transformers model, whose values depend on the position.
        calls: attention calls for a few tokens at positions 0, 1, 2, …
        numbered: the same as the model numbers them itself.

    Raises:
        UnsupportedModel: the model numbers them differently.
    """
    for call, other in zip(calls, numbered, strict=True):
        if not _is_same(call.value, other.value):
            raise UnsupportedModel(
                f"{type(module).__name__} does not begin at position 0 when it numbers the tokens of a prompt itself, "
                f"and only such models can be run; {WAY_OUT}"
            )


def table_length(record: Record, token: int, positions: Sequence[int]) -> int | None:
    """Size of a model's position table; None if it has none.

    Args:
        record: see `Record`.
        token: any token.
        positions: some distinct ones. A look-up of these numbers plus a constant offset (OPT has one of 2) is theirs.
    """
    look_ups = _LookUps(positions)
    with look_ups:
        record([token] * len(positions), positions)
    return look_ups.num_positions


class _LookUps(TorchFunctionMode):
    """Records look-ups in embeddings."""

    def __init__(self, positions: Sequence[int]) -> None:
        super().__init__()
        self._positions = torch.tensor(positions)
        self.num_positions: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding:
            self._note(*args[:2])
        return func(*args, **(kwargs or {}))

    def _note(self, indices: Tensor, table: Tensor) -> None:
        if indices.numel() != len(self._positions):
            return
        offsets = indices.flatten().cpu() - self._positions
        first = int(offsets[0])
        if first >= 0 and bool((offsets == first).all()):
            length = table.shape[0] - first
            self.num_positions = length if self.num_positions is None else min(length, self.num_positions)


def _is_same(x: Tensor, expected: Tensor) -> bool:
    tolerance = _SAME.get(x.dtype, _FINE_SAME)
    return float(relative_error(x.double(), expected.double()).square().mean().sqrt()) <= tolerance


def _change(x: Tensor, expected: Tensor) -> Tensor:
    """[rows, heads, size]: distance of each row from the expected one, relative to the latter's norm."""
    x, expected = x.double().flatten(1), expected.double().flatten(1)
    change = (x - expected).square().sum(dim=-1) / expected.square().sum(dim=-1).clamp_min(1e-30)
    return change.sqrt()


_NUM_TOKENS = 6
_MIXING = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_FINE_MIXING = 1e-4
"""Relative change of a token's heads, when its neighbour is replaced, that rounding cannot explain."""


def probe_layers(module: Any, max_positions: int | None) -> tuple[LayerSpec, ...]:
    """Detects the properties of every attention layer of a transformers model, and prepares it for our receivers.

    Args:
        module: a `...ForCausalLM` in evaluation mode, with pinned frequencies.
        max_positions: the max position of the model's configuration, if it has a limit.

    Raises:
        UnsupportedModel: attention cannot be reached in every layer, or tokens are mixed by something else.
    """
    install()
    before = module.config._attn_implementation
    for part in module.modules():
        expand_again(part)
        part.__dict__.pop(LAYER_ATTRIBUTE, None)
    check_rules(module)
    hook_indexers(module)
    try:
        select_attention(module, PROBE_NAME)
        with torch.inference_mode():
            layers = _read_layers(module, max_positions)
        select_attention(module, ATTENTION_NAME)
    except BaseException:
        remove_adapters(module)
        module.set_attn_implementation(before)
        raise
    return layers


def num_learned_positions(module: Any, layers: Sequence[LayerSpec], max_positions: int | None) -> int | None:
    """Number of learned positions of a probed model, if it looks them up in a table."""
    if all(layer.is_movable for layer in layers):
        return None
    with torch.inference_mode():
        return table_length(partial(record_calls, module), _probe_tokens(module)[0], _probe_positions(max_positions))


def _read_layers(module: Any, max_positions: int | None) -> tuple[LayerSpec, ...]:
    tokens = _probe_tokens(module)
    contiguous = list(range(_NUM_TOKENS))
    spare = tokens.pop()
    changed = [spare if index % 2 == 0 else token for index, token in enumerate(tokens)]
    calls = record_calls(module, tokens, contiguous)
    check_calls(module, calls)
    number_layers(calls)
    others = record_calls(module, changed, contiguous)
    _check_arguments(module, calls)
    _check_finite(module, calls)
    _check_independence(calls, others)
    positions = _probe_positions(max_positions)
    rows = [tokens[0]] * len(positions)
    moved, home = record_calls(module, rows, positions), record_calls(module, rows, [0] * len(rows))
    check_rows_are_alike(module, home)
    frequencies = frequency_buffers(module)
    detections = [
        detect_rotation(call.rows, at_home.rows, positions, frequencies)
        for call, at_home in zip(moved, home, strict=True)
    ]
    if not all(detection.is_movable for detection in detections):
        check_begins_at_zero(module, calls, record_calls(module, tokens, None))
    sources = _sources(calls)
    masks = _masks(calls, max_positions)
    layers = [
        _layer(call, detection, mask, source)
        for call, detection, mask, source in zip(calls, detections, masks, sources, strict=True)
    ]
    if opened := installed_adapters(module):
        layers = with_biases(module, opened, layers, max_positions)
    return with_latents(layers, calls, lambda: record_calls(module, tokens, contiguous))


def select_attention(module: Any, name: str) -> None:
    """Switches the model to one of our attention functions, or adapts its modules; raises if neither is possible."""
    if install_adapters(module):
        return
    try:
        module.set_attn_implementation(name)
    except (ValueError, KeyError, AttributeError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{_name(module)} cannot be given another attention function: {error}; {WAY_OUT}"
        ) from error
    if module.config.get_text_config()._attn_implementation != name:
        raise UnsupportedModel(
            f"the attention of {_name(module)} cannot be reached: it is written into the model instead of being called "
            f"through transformers' AttentionInterface; {WAY_OUT}"
        )


def record_calls(module: Any, tokens: Sequence[int], positions: Sequence[int] | None) -> list[AttentionCall]:
    """Runs one forward in which every token returns its own value; returns the calls in layer order.

    Without positions, the model numbers the tokens itself.
    """
    calls: list[AttentionCall] = []

    def own_value(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)

    device = module.get_input_embeddings().weight.device
    # Gemma 4 cuts its mask unless a tensor says which rows need logits.
    keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
    options = {"logits_to_keep": torch.tensor([len(tokens) - 1], device=device)} if keeps_rows else {}
    if positions is not None:
        options["position_ids"] = torch.tensor([positions], device=device)
    try:
        with attention_scope(own_value), mixing_scope(row_by_row):
            module(input_ids=torch.tensor([tokens], device=device), use_cache=False, **options)
    except Exception as error:  # whatever the model's code raises, the answer is the same
        raise UnsupportedModel(
            f"{_name(module)} fails when its attention is called from outside "
            f"({type(error).__name__}: {error}); its layers use the mask or the cache for something else; {WAY_OUT}"
        ) from error
    calls.sort(key=lambda call: call.layer_index)
    return calls


def check_calls(module: Any, calls: list[AttentionCall]) -> None:
    """Requires exactly one call per layer; indexers are layers beside these."""
    indices = [call.layer_index for call in calls if not call.num_chosen]
    num_layers = max(int(module.config.get_text_config().num_hidden_layers), max(indices, default=-1) + 1)
    with_state = {int(part.layer_idx) for part, _ in state_modules(module)}  # type: ignore[arg-type]
    if not indices and with_state:
        raise UnsupportedModel(
            f"{_name(module)} has layers with a state only and none with attention, whose keys and values are what is "
            f"cached here; {WAY_OUT}"
        )
    if not indices:
        raise UnsupportedModel(
            f"{_name(module)} never calls attention through transformers' AttentionInterface"
            f"{_layer_kinds(module, [0])}, so it cannot be reached; {WAY_OUT}"
        )
    missing = sorted(set(range(num_layers)) - set(indices) - with_state)
    if missing and not with_state:  # there, some layers may have neither
        raise UnsupportedModel(
            f"{_name(module)}: attention is never called in {_layers_text(missing)} of {num_layers}"
            f"{_layer_kinds(module, missing)}; what such a layer knows about earlier tokens is one state that depends "
            f"on their order and cannot be composed; {WAY_OUT}"
        )
    twice = sorted({index for index in indices if indices.count(index) > 1})
    if twice:
        raise UnsupportedModel(
            f"{_name(module)}: attention is called more than once per forward in {_layers_text(twice)}; "
            f"exactly one call per layer is supported; {WAY_OUT}"
        )


def number_layers(calls: Sequence[AttentionCall]) -> None:
    """Numbers the layers with attention from 0 on, where others have none."""
    for number, call in enumerate(calls):
        if call.layer_index != number:
            call.layer_index = call.module.__dict__[LAYER_ATTRIBUTE] = number


def _check_arguments(module: Any, calls: list[AttentionCall]) -> None:
    """Requires that no layer passes a tensor to its attention that we would ignore."""
    for call in calls:
        if isinstance(call.mask, Tensor):
            raise UnsupportedModel(
                f"{_name(module)}: layer {call.layer_index} passes its mask as a tensor that it made itself "
                f"({_shape_text(call.mask)}), instead of letting transformers make it; what it hides is not known in "
                f"longer prompts; {WAY_OUT}"
            )
        if call.unknown:
            names = ", ".join(call.unknown)
            raise UnsupportedModel(
                f"{_name(module)}: layer {call.layer_index} passes {names} to its attention function, which is not "
                f"known here and would be left out (a bias, for instance); {WAY_OUT}"
            )


def _check_finite(module: Any, calls: list[AttentionCall]) -> None:
    """Requires finite numbers in all queries, keys and values."""
    for call in calls:
        if not all(bool(part.isfinite().all()) for part in (call.query, call.key, call.value)):
            raise UnsupportedModel(
                f"{_name(module)}: layer {call.layer_index} computes numbers that are not finite in "
                f"{call.query.dtype}; load it in another dtype, such as bfloat16 or float32"
            )


def _check_independence(calls: list[AttentionCall], others: list[AttentionCall]) -> None:
    """Requires that queries, keys and values ignore the token before theirs, when attention does.

    Every second token was replaced. Two of the three tokens in between must have changed to be sure: a single one may
    be routed to another expert because the batch was rounded differently.
    """
    tolerance = _MIXING.get(calls[0].query.dtype, _FINE_MIXING)
    for call, other in zip(calls, others, strict=True):
        for mine, theirs in ((call.query, other.query), (call.key, other.key), (call.value, other.value)):
            change = relative_error(theirs[1::2].double(), mine[1::2].double()).square().mean(dim=-1).sqrt()
            if float(change.median()) > tolerance:
                raise UnsupportedModel(
                    f"{_name(call.module)}: layer {call.layer_index} mixes tokens outside attention (a recurrent or "
                    "convolutional state); such a state depends on the order of all tokens and cannot be composed; "
                    f"{WAY_OUT}"
                )


def _masks(calls: list[AttentionCall], max_positions: int | None) -> list[MaskSpec]:
    """Every layer's mask: from its predicate, else from its window argument."""
    known: dict[int, MaskSpec | None] = {}
    masks = []
    for call in calls:
        if callable(call.mask):
            if id(call.mask) not in known:
                known[id(call.mask)] = read_mask(call.mask, call.query.device)
            mask = known[id(call.mask)]
        else:
            mask = MaskSpec("window", call.window) if call.window else MaskSpec()
        if mask is None:
            raise UnsupportedModel(
                f"{_name(call.module)}: the mask of layer {call.layer_index} is neither causal nor a causal window or "
                f"chunk, so parts of a prompt cannot be computed before the rest is known; {WAY_OUT}"
            )
        reaches_all = max_positions is not None and mask.size >= max_positions
        masks.append(MaskSpec() if reaches_all else mask)
    return masks


def _sources(calls: list[AttentionCall]) -> list[int]:
    """For every layer, the first layer with exactly the same keys and values."""
    first: dict[tuple[bytes, bytes], int] = {}
    return [first.setdefault((_bytes(call.key), _bytes(call.value)), call.layer_index) for call in calls]


def _layer(call: AttentionCall, detection: Detection, mask: MaskSpec, source: int) -> LayerSpec:
    return LayerSpec(
        index=call.layer_index,
        num_query_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        key_dim=call.key.shape[2],
        value_dim=(call.key if call.num_chosen else call.value).shape[2],
        value_in_key=bool(call.num_chosen),
        num_chosen=call.num_chosen,
        rotation=detection.rotation,
        is_movable=detection.is_movable,
        immovable_reason=detection.reason,
        mask=mask,
        source_layer=source,
    )


def _probe_positions(max_positions: int | None) -> list[int]:
    """Near and far positions; all of them, if the model has hardly any."""
    if max_positions is not None and max_positions <= PROBE_POSITIONS[-2]:
        return list(range(max_positions))
    return [position for position in PROBE_POSITIONS if max_positions is None or position < max_positions]


def _probe_tokens(module: Any) -> list[int]:
    """One token more than a forward takes, all distinct, without the padding token (its embedding may be zero)."""
    config = module.config.get_text_config()
    padding = getattr(config, "pad_token_id", None)
    vocab_size = int(config.vocab_size)
    ids = [(vocab_size // 3 + 7 * number) % vocab_size for number in range(_NUM_TOKENS + 2)]
    return [token for token in ids if token != padding][: _NUM_TOKENS + 1]


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _shape_text(x: Tensor) -> str:
    return "shape " + " x ".join(str(size) for size in x.shape)


def _name(module: Any) -> str:
    return type(module).__name__


def _layers_text(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"layer {indices[0]}"
    return "layers " + ", ".join(str(index) for index in indices[:8]) + (", …" if len(indices) > 8 else "")


def _layer_kinds(module: Any, indices: list[int]) -> str:
    """The configuration's names for these layers, in brackets."""
    kinds = getattr(module.config.get_text_config(), "layer_types", None) or getattr(
        module.config.get_text_config(), "layers_block_type", None
    )
    if not kinds or max(indices) >= len(kinds):
        return ""
    return " (" + ", ".join(sorted({str(kinds[index]) for index in indices})) + ")"
