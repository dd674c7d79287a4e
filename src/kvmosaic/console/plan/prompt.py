"""Terminal output of prompt plans: composition and memory."""

from __future__ import annotations

from contextlib import closing

from rich.console import Console
from rich.table import Table

from kvmosaic.cache.plan import Plan, SpanPlan
from kvmosaic.capacity.plan import blocks_of
from kvmosaic.console.model import memory_table
from kvmosaic.console.options import ModelOptions, open_llm
from kvmosaic.console.prompt_source import PromptSource
from kvmosaic.console.reuse import MAX_ROWS, Badge, Strip, bars_of
from kvmosaic.console.text import ends, shrinking, size_text
from kvmosaic.prompt import SegmentKind


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
