"""Terminal output of a model: its layers, rotations and memory per token, and its self-check."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvmosaic.cache.keys import Key
from kvmosaic.console.options import ModelOptions, open_llm
from kvmosaic.console.text import fact_table, printable, size_text
from kvmosaic.errors import TierError

if TYPE_CHECKING:
    from kvmosaic.assembly import AnyModel
    from kvmosaic.engine.self_check import SelfCheck
    from kvmosaic.layers import LayerShape
    from kvmosaic.llama.load_checks import TokenDifference
    from kvmosaic.rope import Rotation
    from kvmosaic.tiers import Tier


def layer_table(layers: tuple[LayerShape, ...]) -> Table:
    """One row per run of equal layers: heads, rotation, mask, and whether cached keys may be moved.

    The slowest turn is the number of tokens after which the slowest pair of dimensions has turned once.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("layers", "heads", "head\nsize", "rotation", "slowest\nturn", "sees", "movable"):
        table.add_column(heading, no_wrap=heading not in ("rotation", "sees"))
    for kind, members in groupby(layers, key=_kind):
        run = list(members)
        table.add_row(layer_range(run[0].index, run[-1].index), *kind)
    return table


def memory_table(model: AnyModel, num_tokens: int, num_blocks: int, block_size: int) -> Table:
    """Bytes of keys and values: per token, and for a prompt of this many tokens in this many blocks."""
    per_token = model.bytes_per_token()
    stored = [layer for layer in model.layers if layer.is_stored]
    table = fact_table()
    table.add_row("one token", Text(f"{size_text(per_token)} = {memory_formula(stored, per_token)}"))
    size = size_text(per_token * block_size * num_blocks)
    blocks = f"{num_blocks:,} blocks of {block_size} tokens"
    table.add_row("this prompt", Text(f"{size} for {num_tokens:,} tokens in {blocks}"))
    table.add_row("1 GiB holds", Text(f"{2**30 // max(per_token, 1):,} tokens"))
    return table


def memory_formula(stored: Sequence[LayerShape], bytes_per_token: int) -> str:
    """Returns how the bytes of one token add up, over the layers that have a KV cache of their own."""
    item_bytes = f"{bytes_per_token / sum(layer.kept_per_token for layer in stored):g}"
    terms = []
    for (latent, heads, key, value), members in groupby(
        stored, key=lambda layer: (layer.value_in_key, layer.num_kv_heads, layer.key_dim, layer.value_dim)
    ):
        count = len(list(members))
        if latent:
            terms.append(f"{count} layers × {key} latent numbers")
        elif key == value:
            terms.append(f"2 × {count} layers × {heads} heads × {key}")
        else:
            terms.append(f"{count} layers × {heads} heads × ({key} + {value})")
    sum_of_terms = " + ".join(terms)
    return f"({sum_of_terms}) × {item_bytes} bytes" if len(terms) > 1 else f"{sum_of_terms} × {item_bytes} bytes"


def rotation_text(rotation: Rotation | None) -> str:
    """A rotation in a few words: how dimensions are paired, and which of them turn."""
    if rotation is None:
        return "none"
    end = rotation.offset + rotation.rotary_dim
    part = "whole head" if rotation.rotary_dim == rotation.head_dim else f"dimensions {rotation.offset}–{end - 1}"
    return f"{rotation.layout}, {part}{', reversed' if rotation.sign < 0 else ''}"


def layer_range(first: int, last: int) -> str:
    """Layer numbers from the first to the last one."""
    return str(first) if first == last else f"{first}–{last}"


def _kind(layer: LayerShape) -> tuple[str, ...]:
    from kvmosaic.layers import LayerSpec

    heads = f"{layer.num_query_heads} / {layer.num_kv_heads}"
    size = str(layer.key_dim) if layer.key_dim == layer.value_dim else f"{layer.key_dim} / {layer.value_dim}"
    shared = "" if layer.is_stored else f", keys of layer {layer.source_layer}"
    latent = f"{size} {'index' if layer.num_chosen else 'latent'}" if layer.value_in_key else size
    shared = f", chooses {layer.num_chosen:,}" if layer.num_chosen else shared
    if not isinstance(layer, LayerSpec):
        return heads, latent, "of llama.cpp", "", f"{layer.mask}{shared}", "yes"
    movable = "yes" if layer.is_movable else "no"
    turning = "bias by distance" if layer.bias is not None else rotation_text(layer.rotation)
    return heads, latent, turning, _slowest_turn(layer.rotation), f"{layer.mask}{shared}", movable


def _slowest_turn(rotation: Rotation | None) -> str:
    turning = [frequency for frequency in rotation.inv_freq if frequency > 0] if rotation else []
    return f"{2 * math.pi / min(turning):,.0f}" if turning else ""


_CHECK_SECONDS = 5.0
"""Timeout of one call to a tier."""


def show_check(opening: ModelOptions) -> bool:
    """Prints the results for a model; returns whether its self-check passed and all tiers answer.

    Raises:
        KVMosaicError: the model cannot be loaded.
    """
    console = Console()
    with closing(open_llm(opening, Console(stderr=True))) as llm:
        console.print(model_table(opening.model, llm.model, str(llm.attention)))
        console.print()
        console.print(layer_table(llm.model.layers))
        if llm.model.immovable_reason:
            console.print(Text(f"not movable: {printable(llm.model.immovable_reason)}"))
        console.print()
        assert llm.self_check is not None, "an LLM is opened with its self-check on"
        console.print(check_text(llm.self_check, llm.model.is_movable))
        if differences := getattr(llm.model, "token_differences", ()):
            console.print()
            console.print(tokens_text(differences))
        tiers = llm.engine.offloader.tiered_store.tiers if llm.engine.offloader is not None else ()
        answers = {tier: tier_answer(tier) for tier in tiers}
        if answers:
            console.print()
            console.print(tier_table(answers))
        return llm.self_check.passed and not any(answers.values())


def tier_answer(tier: Tier) -> str:
    """Puts an entry into a tier, reads and removes it; returns the error, or nothing."""
    from kvmosaic.tiers import Deadline

    key, entry = Key(secrets.token_bytes(32)), b"kvmosaic check"
    try:
        if key not in tier.put_many({key: entry}, Deadline(_CHECK_SECONDS)):
            return "it did not store an entry in time"
        found = tier.get_many([key], Deadline(_CHECK_SECONDS)).get(key)
        tier.delete_many([key], Deadline(_CHECK_SECONDS))
    except TierError as error:
        return str(error)
    return "" if found is not None and bytes(found) == entry else "an entry did not come back as it was put"


def tier_table(answers: dict[Tier, str]) -> Table:
    """One row per tier: what it is, what it holds, and whether an entry came back."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("tier", no_wrap=True)
    table.add_column("at")
    table.add_column("quota", justify="right", no_wrap=True)
    table.add_column("one entry, put and read")
    for tier, problem in answers.items():
        stat = tier.stat()
        quota = "no limit" if stat.quota_bytes is None else size_text(stat.quota_bytes)
        answer = Text(printable(problem), style="red") if problem else Text("came back", style="green")
        table.add_row(stat.name, Text(printable(stat.address or "this process")), quota, answer)
    return table


def model_table(name: str, model: AnyModel, attention: str) -> Table:
    """Returns name, kind and size of a model, and its attention backend."""
    table = fact_table()
    limit = "no limit" if model.max_positions is None else f"{model.max_positions:,}"
    table.add_row("model", Text(f"{printable(name)} ({model.kind})"))
    table.add_row("parameters", Text(f"{model.num_parameters:,} {model.weights_text}"))
    if model.num_fused:
        table.add_row("fused", Text(", ".join(f"{count} {kind}" for kind, count in model.num_fused.items())))
    table.add_row("positions", Text(limit))
    if model.frequency_note:
        table.add_row("", Text(model.frequency_note))
    table.add_row("one token takes", Text(f"{size_text(model.bytes_per_token())} of cache"))
    if model.state_bytes:
        beside = f"a state of all layers; a document up to {size_text(2 * model.map_bytes)} beside its tokens"
        table.add_row("", Text(f"{size_text(model.state_bytes)} {beside}"))
    table.add_row("attention", Text(printable(attention)))
    return table


def check_text(check: SelfCheck, is_movable: bool) -> RenderableType:
    """Describes what the self-check compared, its result, and the consequence."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("self-check", "against", "difference", "allowed", "largest at"):
        is_number = heading in ("difference", "allowed")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number)
    for finding in check.findings:
        style = "" if finding.passed else "red"
        numbers = (f"{finding.difference:.2g}", f"{finding.limit:.2g}")
        table.add_row(finding.subject, finding.reference, *numbers, printable(finding.where), style=style)
    moved = "documents of the composed prompts were moved" if check.is_moved else "documents were not moved"
    unit = Text(f"relative differences; of logits in standard deviations; {moved}", style="dim")
    note = [Text(check.note, style="dim")] if check.note else []
    return Group(table, unit, *note, Text(), _verdict(check, is_movable))


def tokens_text(differences: Sequence[TokenDifference]) -> Text:
    """Texts that become other tokens than in llama.cpp."""
    lines = "".join(f"\n  {printable(str(difference))}" for difference in differences)
    return Text(f"other tokens than in llama.cpp, answers may be worse:{lines}", style="yellow")


def _verdict(check: SelfCheck, is_movable: bool) -> Text:
    if not check.passed:
        reason = printable(check.reason)
        return Text(f"failed: {reason}. The chunk cache is off for this model.", style="bold red")
    if is_movable:
        return Text("passed: documents can be cached and read at any position.", style="bold green")
    return Text(
        "passed: documents can be cached, and read where they were computed (shared positions).", style="bold green"
    )
