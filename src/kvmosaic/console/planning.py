"""Plans on the screen: how a prompt would be composed, and the memory it takes."""

from __future__ import annotations

from contextlib import closing

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.cache.plan import Plan, SpanPlan
from kvmosaic.console.asking import Asking
from kvmosaic.console.model import memory_table
from kvmosaic.console.opening import Opening, open_llm
from kvmosaic.console.reuse import MOST_ROWS
from kvmosaic.console.strip import Action, Bar, Strip, field
from kvmosaic.console.text import ends, printable, size_text


def show_plans(opening: Opening, asking: Asking) -> None:
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
            console.print(plan_table(plan, llm.model.bytes_per_token()))
            console.print()
            console.print(memory_table(llm.model, plan.num_tokens))
            console.print()


def plan_strip(plan: Plan) -> Strip:
    """The prompt of a plan; a span that is reused in part is drawn as two bars."""
    return Strip([bar for span in plan.spans for bar in _bars(span)])


def plan_table(plan: Plan, bytes_per_token: int) -> Table:
    """One row per span: where its keys are computed, where the question sees them, and what has to be done."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("segment", overflow="ellipsis", no_wrap=True, max_width=36)
    for heading in ("tokens", "computed at", "seen at", "moved by", "memory"):
        table.add_column(heading, justify="right")
    table.add_column("plan", no_wrap=True)
    shown = ends(plan.spans, MOST_ROWS)
    for span in shown:
        if span is shown[-1] and len(shown) < len(plan.spans):
            table.add_row(f"… {len(plan.spans) - len(shown):,} more", style="dim")
        table.add_row(
            printable(span.name or span.kind),
            f"{span.num_tokens:,}",
            f"{plan.layout.spans[span.index].start:,}",
            f"{plan.layout.position_of(span.index):,}",
            f"{span.distance:+,}" if span.distance else "",
            size_text(span.num_tokens * bytes_per_token),
            _action(span),
        )
    return table


def _bars(span: SpanPlan) -> list[Bar]:
    label = span.name or span.kind
    action: Action = "moved" if span.distance else "reused"
    bars = [Bar(label, span.num_reused, action, span.distance)] if span.num_reused else []
    return bars + ([Bar(label, span.num_to_compute, "computed")] if span.num_to_compute else [])


def _action(span: SpanPlan) -> Text:
    if 0 < span.num_reused < span.num_tokens:
        return Text(f" reuse {span.num_reused:,}, compute {span.num_to_compute:,} ", style=field("reused"))
    found: Action = "moved" if span.distance else "reused"
    return Text(f" {span.action} ", style=field("computed" if span.action == "compute" else found))
