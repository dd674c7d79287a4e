"""Terminal output of a capacity plan: memory, and the hit rates of the device and its tiers."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.cache.plan import Plan, SpanPlan
from kvmosaic.capacity import CapacityPlan, Demand, ModelFacts, plan_capacity, read_model
from kvmosaic.capacity.model_facts import dtype_here, memory_here, read_gguf_facts
from kvmosaic.capacity.plan import blocks_of
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.console.model import memory_table
from kvmosaic.console.options import ModelOptions, open_llm
from kvmosaic.console.prompt_source import PromptSource
from kvmosaic.console.reuse import MAX_ROWS, Badge, Strip, bars_of
from kvmosaic.console.text import ends, one_line, shrinking, size_text
from kvmosaic.errors import InvalidConfig
from kvmosaic.prompt import SegmentKind

if TYPE_CHECKING:
    from kvmosaic.console.options import ModelOptions
    from kvmosaic.console.plan import DeviceOptions


_MIB = 2**20
_MAX_KINDS = 12
"""Maximum number of layer kinds listed."""


def show_capacity(opening: ModelOptions, options: DeviceOptions, demand: Demand, *, as_json: bool = False) -> None:
    """Prints the plan of a device.

    Raises:
        KVMosaicError: an invalid or too large model, number or tier.
    """
    plan = _plan(opening, options, demand)
    if as_json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        console = Console()
        for part in (_memory(plan), _found(plan), _about(plan), _notes(plan)):
            console.print(part)
            console.print()


def _plan(opening: ModelOptions, options: DeviceOptions, demand: Demand) -> CapacityPlan:
    """Reads the configuration of the model, and plans."""
    from kvmosaic.assembly import runs_in_llama
    from kvmosaic.model import quiet_libraries

    quiet_libraries()
    name, given = options.config or opening.model, opening.values
    if runs_in_llama(name, given["engine"], given["dtype"], given["kv_cache_dtype"]):
        if options.chunk_codec != "none":
            raise InvalidConfig(
                f"--chunk-codec {options.chunk_codec} rounds numbers, and chunks of llama.cpp also have positions; "
                "leave it out, or cache fewer bits by --kv-cache-dtype"
            )
        model = read_gguf_facts(Path(name).expanduser(), given["kv_cache_dtype"])
    else:
        model = _model(name, given["dtype"], is_here=options.device_memory is None)
    return plan_capacity(
        model,
        str(memory_here()) if options.device_memory is None else options.device_memory,
        demand,
        block_size=options.block_size,
        headroom=options.headroom,
        weights=options.weights,
        tiers=tuple(options.chunk_tier or ()),
        codec=options.chunk_codec,
    )


def _model(name: str, dtype: str, *, is_here: bool) -> ModelFacts:
    """Returns the model in the requested dtype; "auto" is this machine's choice if it is about this machine."""
    model = read_model(name, dtype=dtype)
    if dtype != "auto" or not is_here:
        return model
    here = dtype_here(model.dtype)
    return model if here == model.dtype else read_model(name, dtype=here)


def _table(*headings: str) -> Table:
    """Returns a table whose columns are numeric except the first; without headings, the last is text, too."""
    has_headings = any(headings)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0), show_header=has_headings)
    for number, heading in enumerate(headings):
        is_text = number == 0 or (not has_headings and number == len(headings) - 1)
        style = "dim" if number == 0 and not has_headings else None
        table.add_column(heading, style=style, justify="left" if is_text else "right", no_wrap=not is_text)
    return table


def _memory(plan: CapacityPlan) -> Table:
    model, room, demand = plan.model, plan.room, plan.demand
    size = f"{model.num_parameters / 1e9:,.2f} billion" if model.num_parameters >= 1e8 else f"{model.num_parameters:,}"
    table = _table("", "", "")
    table.add_row("model", one_line(model.name), Text(f"{size} parameters, {model.dtype}"))
    table.add_row("one token", size_text(model.kv_bytes_per_token), Text(_saving(plan)))
    kinds = model.kinds()
    for kind, count, num_bytes in kinds[:_MAX_KINDS]:
        table.add_row("", Text(size_text(num_bytes), style="dim"), Text(f"{count} × {kind}", style="dim"))
    if len(kinds) > _MAX_KINDS:
        table.add_row("", "", Text(f"… {len(kinds) - _MAX_KINDS} kinds of layers more", style="dim"))
    table.add_row()
    table.add_row("device", size_text(room.device_bytes), "")
    table.add_row("weights", size_text(room.weight_bytes), "")
    table.add_row("headroom", size_text(room.headroom_bytes), Text("activations, driver: an assumption (--headroom)"))
    requests = f"system text once, {demand.concurrency:,} × question and answer: {room.request_blocks:,} blocks"
    table.add_row("requests", size_text(room.request_bytes), Text(requests))
    blocks = f"{room.chunk_blocks:,} blocks of {room.block_size} tokens, {size_text(room.bytes_per_block)} each"
    table.add_row("documents", size_text(room.chunk_bytes), Text(blocks))
    waste = room.wasted_share(demand.tokens_per_document)
    each = f"of {demand.documents:,}, {size_text(room.document_bytes)} each ({waste:.1%} of it empty)"
    table.add_row("they hold", f"{room.resident:,}", Text(each))
    return table


def _serve_line(plan: CapacityPlan) -> str:
    room = plan.room
    sizes = f"--chunk-cache-size {room.chunk_bytes // _MIB}MiB --request-cache-size {-(-room.request_bytes // _MIB)}MiB"
    block_size = f" --block-size {room.block_size}" if room.block_size != ChunkCacheConfig().block_size else ""
    return f"kvmosaic serve MODEL {sizes}{block_size}"


def _saving(plan: CapacityPlan) -> str:
    model = plan.model
    share = model.kv_bytes_per_token / max(model.kv_bytes_unshared, 1)
    return f"{share:.1%} of a key head for every query head" if share < 0.99 else ""


def _found(plan: CapacityPlan) -> Table:
    room = plan.room
    table = _table("what is kept", "documents", "each", f"documents found\n(zipf {plan.demand.zipf:g})")
    kept = [("on the device", f"{room.resident:,}", room.document_bytes)]
    for tier in plan.tiers:
        number = "all" if tier.kept is None else f"{tier.kept:,}"
        kept.append((f"and in the {tier.kind} tier", number, tier.entry_bytes))
    for (name, number, num_bytes), stage in zip(kept, plan.stages, strict=True):
        table.add_row(name, number, size_text(num_bytes), f"{stage.hit_rate:.1%}")
    return table


def _about(plan: CapacityPlan) -> Text:
    demand = plan.demand
    lines = (
        f"prompt: {demand.system_tokens:,} + {demand.documents_per_prompt:,} × {demand.tokens_per_document:,} + "
        f"{demand.question_tokens:,} tokens",
        f"with the most popular documents pinned, {plan.best_hit_rate:.1%} would be found",
        _serve_line(plan),
    )
    return Text("\n".join(lines), style="dim")


def _notes(plan: CapacityPlan) -> Text:
    return Text("\n".join(f"note: {one_line(note, 400)}" for note in plan.notes))


def show_plans(opening: ModelOptions, asking: PromptSource) -> None:
    """Prints the plan of every prompt as a strip and a table, and the memory of a token and of the prompt.

    Raises:
        KVMosaicError: a prompt, document or setting that cannot work.
    """
    console, documents = Console(), asking.documents()
    with closing(open_llm(opening, Console(stderr=True))) as llm:
        for heading, prompt in asking.prompts(llm, documents):
            plan = llm.plan(prompt)
            console.print(f"Q  {heading}", style="bold", markup=False, highlight=False)
            console.print()
            console.print(plan_strip(plan))
            console.print()
            if plan.remark:
                console.print(plan.remark, style="dim")
                console.print()
            block_size = llm.chunk_cache_config.block_size
            console.print(plan_table(plan, llm.model.bytes_per_token(), block_size, is_narrow=console.width < 76))
            console.print()
            num_blocks = sum(blocks_of(span.num_tokens, block_size) for span in plan.spans)
            console.print(memory_table(llm.model, plan.num_tokens, num_blocks, block_size))
            console.print()


def plan_strip(plan: Plan) -> Strip:
    """The prompt of a plan; a span that is reused in part is drawn as two bars."""
    spans = plan.spans
    return Strip(
        [
            bar
            for span in spans
            if not span.is_left_out
            for bar in bars_of(span.name or span.kind, span.num_reused, span.num_to_compute, span.distance)
        ]
    )


def plan_table(plan: Plan, bytes_per_token: int, block_size: int, *, is_narrow: bool = False) -> Table:
    """One row per span: position where its keys are computed, position seen by the question, and the action.

    A narrow table leaves out "seen at", which is "computed at" and "moved by" together. Memory counts whole blocks.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("segment", max_width=36)
    for heading in ("tokens", "computed\nat", *([] if is_narrow else ["seen\nat"]), "moved\nby", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan")
    spans = [span for span in plan.spans if not span.is_left_out]
    shown = ends(spans, MAX_ROWS)
    for span in shown:
        if span is shown[-1] and len(shown) < len(spans):
            table.add_row(f"… {len(spans) - len(shown):,} more", style="dim")
        seen_at = "" if span.kind is SegmentKind.COMPANION else f"{plan.layout.position_of(span.index):,}"
        table.add_row(
            shrinking(span.name or span.kind),
            f"{span.num_tokens:,}",
            f"{plan.layout.spans[span.index].start:,}",
            *([] if is_narrow else [seen_at]),
            f"{span.distance:+,}" if span.distance else "",
            size_text(blocks_of(span.num_tokens, block_size) * block_size * bytes_per_token),
            _field(span),
        )
    return table


def _field(span: SpanPlan) -> Badge:
    (first, *rest) = bars_of("", span.num_reused, span.num_to_compute, span.distance)
    words = f"reuse {first.num_tokens:,}, compute {rest[0].num_tokens:,}" if rest else span.action
    return Badge(words, first.action)
