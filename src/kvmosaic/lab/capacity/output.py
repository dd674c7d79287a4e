"""Terminal output of a capacity plan: memory, what is found, and the command that serves it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.cache.plan import Plan
from kvmosaic.config import ChunkCacheConfig, EngineConfig, parse_bytes
from kvmosaic.console.model import memory_table
from kvmosaic.console.options import ModelOptions, open_llm
from kvmosaic.console.prompt_source import PromptSource
from kvmosaic.console.reuse import MAX_ROWS, Badge, Strip, bars_of
from kvmosaic.console.text import ends, one_line, shrinking, size_text
from kvmosaic.errors import InvalidConfig, KeepsState
from kvmosaic.lab.capacity import CapacityPlan, Demand, ModelFacts, plan_capacity, read_model
from kvmosaic.lab.capacity.model_facts import dtype_here, memory_here, read_gguf_facts
from kvmosaic.lab.capacity.plan import blocks_of
from kvmosaic.prompt import SegmentKind

if TYPE_CHECKING:
    from kvmosaic.console.options import ModelOptions
    from kvmosaic.lab.capacity.command import DeviceOptions


_MIB = 2**20
_SPARE = 1.25
"""Of a cache that holds all documents: so much more than they take."""
_LEAST = 256 * _MIB  # of a few documents, their lengths and what they saw matter more than their number


def show_capacity(
    opening: ModelOptions, options: DeviceOptions, demand: Demand, folder: str | None = None, *, as_json: bool = False
) -> None:
    """Prints the plan of a device.

    Raises:
        KVMosaicError: an invalid or too large model, number or tier.
    """
    plan = _plan(opening, options, demand)
    if as_json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        console = Console()
        console.print(_memory(plan))
        console.print()
        line = _serve_line(plan, [opening.model, *filter(None, [folder])], options.chunk_tier or ())
        console.print(Text(line), soft_wrap=True)
        for note in plan.notes:
            console.print(Text(f"note: {one_line(note, 400)}", style="dim"))


def _plan(opening: ModelOptions, options: DeviceOptions, demand: Demand) -> CapacityPlan:
    """Reads the configuration of the model, and plans."""
    from kvmosaic.assembly import may_leave_llama, runs_in_llama
    from kvmosaic.model import quiet_libraries

    quiet_libraries()
    name, given, model = opening.model, opening.values, None
    if runs_in_llama(name, given["engine"], given["dtype"], given["kv_cache_dtype"]):
        if options.chunk_codec != "none":
            raise InvalidConfig(
                f"--chunk-codec {options.chunk_codec} rounds numbers, and chunks of llama.cpp also have positions; "
                "leave it out, or cache fewer bits by --kv-cache-dtype"
            )
        try:
            model = read_gguf_facts(Path(name).expanduser(), given["kv_cache_dtype"])
        except KeepsState:  # which transformers then runs
            if not may_leave_llama(given["engine"], given["kv_cache_dtype"]):
                raise
    if model is None:
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


def _memory(plan: CapacityPlan) -> Table:
    """What the weights take, how many documents fit, and what stays free."""
    model, room, demand = plan.model, plan.room, plan.demand
    size = f"{model.num_parameters / 1e9:,.2f} billion" if model.num_parameters >= 1e8 else f"{model.num_parameters:,}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=justify == "right", style="dim" if not table.columns else None)
    table.add_row(
        "weights", size_text(room.weight_bytes), Text(f"{one_line(model.name)}: {size} parameters, {model.dtype}")
    )
    fit = f"of {demand.documents:,} fit, {size_text(room.document_bytes)} each"
    table.add_row("documents", f"{room.resident:,}", Text(fit))
    for tier in plan.tiers:
        table.add_row(f"{tier.kind} tier", "all" if tier.kept is None else f"{tier.kept:,}", Text("of these fit there"))
    free = room.chunk_bytes - _documents_bytes(plan)
    table.add_row(
        "free",
        size_text(free),
        Text(f"of {size_text(room.device_bytes)}, beside {size_text(room.headroom_bytes)} headroom"),
    )
    return table


def _documents_bytes(plan: CapacityPlan) -> int:
    """The chunk cache for all documents, each as the first of a prompt and as a later one, or what memory there is."""
    copies = 2 if plan.demand.documents_per_prompt > 1 else 1
    needed = int(_SPARE * copies * plan.demand.documents * plan.room.document_bytes)
    return min(plan.room.chunk_bytes, max(_LEAST, needed))


def _serve_line(plan: CapacityPlan, names: Sequence[str], tiers: Sequence[str]) -> str:
    """The command that serves the model with these caches."""
    room, line = plan.room, ["kvmosaic", "serve", *names, "--chunk-cache-size", f"{_documents_bytes(plan) // _MIB}MiB"]
    if room.request_bytes > parse_bytes(EngineConfig().request_cache_size):
        line += ["--request-cache-size", f"{-(-room.request_bytes // _MIB)}MiB"]
    if room.block_size != ChunkCacheConfig().block_size:
        line += ["--block-size", str(room.block_size)]
    return shlex.join([*line, *(part for tier in tiers for part in ("--chunk-tier", tier))])


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
            Badge.of(span.num_reused, span.num_to_compute, span.distance),
        )
    return table
