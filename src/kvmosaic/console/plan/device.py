"""Terminal output of a capacity plan: memory, hit rate, TTFT, tiers, and the speeds they are computed from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.capacity import (
    ASSUMED_TIERS,
    HARDWARE,
    CapacityPlan,
    Demand,
    ModelFacts,
    Speed,
    TierPlan,
    TierSpeed,
    plan_capacity,
    read_model,
    spec_speed,
)
from kvmosaic.capacity.speed import parse_rate, parse_seconds
from kvmosaic.capacity.tier_plan import LONGEST, Codec, assumed
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.console.text import duration_text, one_line, size_text
from kvmosaic.errors import InvalidConfig
from kvmosaic.tiers import parse_tier_url

if TYPE_CHECKING:
    from kvmosaic.assembly import EngineName

ASSUMED = "h100"


@dataclass(frozen=True, slots=True)
class SpeedAsked:
    """Options for the speed of the device."""

    hardware: str | None = None
    flops: str | None = None
    bandwidth: str | None = None
    measure: bool = False

    @property
    def is_given(self) -> bool:
        """Whether any option says how fast the device is."""
        return self.measure or self.hardware is not None or self.flops is not None

    def __post_init__(self) -> None:
        ways = [self.hardware is not None, self.flops is not None or self.bandwidth is not None, self.measure]
        if sum(ways) > 1:
            raise InvalidConfig("give --hardware, or --flops and --bandwidth, or --measure: only one of them")
        if (self.flops is None) != (self.bandwidth is None):
            missing = "--bandwidth" if self.bandwidth is None else "--flops"
            raise InvalidConfig(f"--flops and --bandwidth belong together; {missing} is missing")

    def speed(self, model: ModelFacts, llama_file: Path | None = None) -> Speed:
        """Returns the speed to plan with; that of llama.cpp is measured with a file.

        Raises:
            InvalidConfig: a device without figures, or something that is no rate.
        """
        if self.measure and llama_file is not None:
            from kvmosaic.capacity.gguf_facts import measure_llama

            return measure_llama(llama_file, model)
        if self.measure:
            from kvmosaic.capacity.machine import measure_speed

            return measure_speed(model.dtype)
        if self.flops is not None and self.bandwidth is not None:
            return Speed(parse_rate(self.flops, "FLOP"), parse_rate(self.bandwidth, "B"), "as given")
        if self.hardware is not None:
            return spec_speed(self.hardware.lower())
        speed = spec_speed(ASSUMED)
        hint = "assumed, give --hardware, --flops and --bandwidth, or --measure"
        return replace(speed, source=f"{speed.source}: {hint}")


def tiers_of(urls: Sequence[str], speeds: Sequence[str], *, measure: bool) -> tuple[list[TierSpeed], list[TierSpeed]]:
    """Returns the named tiers, and tiers of other kinds whose speed was given.

    Raises:
        InvalidConfig: a URL or a speed that cannot be read, or a kind that is named twice.
    """
    given = _speeds(speeds)
    found: dict[str, TierSpeed] = {}
    for url in urls:
        spec = parse_tier_url(url)
        if spec.kind in found:
            raise InvalidConfig(f"two tiers are of kind {spec.kind}; a plan has one of each kind at most")
        found[spec.kind] = given.pop(spec.kind, assumed(spec.kind))
        if measure and found[spec.kind].source == "assumed":
            from kvmosaic.capacity.machine import measure_tier

            found[spec.kind] = measure_tier(url)
        found[spec.kind] = replace(found[spec.kind], quota_bytes=spec.quota_bytes)
    return list(found.values()), list(given.values())


def _speeds(texts: Sequence[str]) -> dict[str, TierSpeed]:
    found = {}
    for text in texts:
        kind, _, rest = text.partition("=")
        rate, _, latency = rest.partition(",")
        if kind not in ASSUMED_TIERS or not rate:
            raise InvalidConfig(
                f"--tier-speed is {text[:60]!r}; write a kind ({', '.join(ASSUMED_TIERS)}), bytes per second and a "
                "latency: disk=3GB/s,0.2ms"
            )
        seconds = parse_seconds(latency) if latency else ASSUMED_TIERS[kind][0]
        found[kind] = TierSpeed(kind, seconds, parse_rate(rate, "B"), "as given")
    return found


assert ASSUMED in HARDWARE


_MIB = 2**20
_MAX_KINDS = 12
"""Maximum number of layer kinds listed."""


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """Options of a capacity plan."""

    model: str
    dtype: str
    device_memory: str | None
    """None: this machine, whose speed is measured unless it is given."""
    demand: Demand
    block_size: int
    headroom: str
    weights: str | None
    speed: SpeedAsked
    chunk_tiers: tuple[str, ...]
    tier_speeds: tuple[str, ...]
    codec: Codec
    engine: EngineName = "auto"
    kv_cache_dtype: str = "auto"

    def plan(self) -> CapacityPlan:
        """Reads the configuration, measures if requested, and plans.

        Raises:
            KVMosaicError: an invalid or too large model, number or tier.
        """
        from kvmosaic.model.quiet import quiet_libraries

        quiet_libraries()
        tiers, compared = tiers_of(self.chunk_tiers, self.tier_speeds, measure=self.speed.measure)
        llama_file = self._llama_file()
        model = self._model() if llama_file is None else self._llama_model(llama_file)
        memory = self.device_memory
        if memory is None:
            from kvmosaic.capacity.machine import memory_here  # imports torch

            memory = str(memory_here())
        speed = self.speed if self.speed.is_given or self.device_memory is not None else SpeedAsked(measure=True)
        return plan_capacity(
            model,
            memory,
            self.demand,
            speed.speed(model, llama_file),
            block_size=self.block_size,
            headroom=self.headroom,
            weights=self.weights,
            tiers=tiers,
            compared=compared,
            codec=self.codec,
        )

    def _llama_file(self) -> Path | None:
        """The file that llama.cpp would run; None: transformers runs the model.

        Raises:
            InvalidConfig: settings that the engine does not have.
        """
        from kvmosaic.assembly import runs_in_llama

        if not runs_in_llama(self.model, self.engine, self.dtype, self.kv_cache_dtype):
            return None
        if self.codec != "none":
            raise InvalidConfig(
                f"--chunk-codec {self.codec} rounds numbers, and chunks of llama.cpp also have positions; leave it "
                "out, or cache fewer bits by --kv-cache-dtype"
            )
        return Path(self.model).expanduser()

    def _llama_model(self, path: Path) -> ModelFacts:
        from kvmosaic.capacity.gguf_facts import read_gguf_facts

        return read_gguf_facts(path, self.kv_cache_dtype)

    def _model(self) -> ModelFacts:
        """Returns the model in the requested dtype; "auto" is this machine's choice if it is about this machine."""
        model = read_model(self.model, dtype=self.dtype)
        if self.dtype != "auto" or not (self.speed.measure or self.device_memory is None):
            return model
        from kvmosaic.capacity.machine import dtype_here

        here = dtype_here(model.dtype)
        return model if here == model.dtype else read_model(self.model, dtype=here)


def show_capacity(asked: CapacityRequest, *, as_json: bool = False, plot: Path | None = None) -> None:
    """Prints the plan of a device, and draws it if a file is given.

    Raises:
        KVMosaicError: see `CapacityRequest.plan`; or a plot that cannot be drawn.
    """
    plan = asked.plan()
    if as_json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        console = Console()
        for part in (_memory(plan), _first_token(plan), _about(plan), _tiers(plan), _notes(plan)):
            console.print(part)
            console.print()
    if plot is not None:
        from kvmosaic.capacity.plot import save_plot

        try:
            save_plot(plan, plot)
        except OSError as error:
            raise InvalidConfig(f"{one_line(str(plot))} cannot be written: {error.strerror or error}") from error


def _table(*headings: str) -> Table:
    """Returns a table whose columns are numeric except the first; without headings, the last is text, too."""
    has_headings = any(headings)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0), show_header=has_headings)
    for number, heading in enumerate(headings):
        is_text = number == 0 or heading == "reads" or (not has_headings and number == len(headings) - 1)
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


def _first_token(plan: CapacityPlan) -> Table:
    demand = plan.demand
    table = _table(
        "what is kept", f"documents found\n(zipf {demand.zipf:g})", "first token\n(one prompt alone)", "faster by"
    )
    names = {"computed": "nothing", "device": "on the device"}
    for stage in plan.stages:
        name = names.get(stage.name, f"and in the {stage.name} tier")
        table.add_row(name, f"{stage.hit_rate:.1%}", duration_text(stage.first_token_seconds), f"{stage.speedup:.2f}")
    return table


def _about(plan: CapacityPlan) -> Text:
    demand = plan.demand
    uses = "always stays" if plan.hit_rate >= 1.0 else f"is asked for {plan.uses:.2f} times per computation"
    lines = (
        f"prompt: {demand.system_tokens:,} + {demand.documents_per_prompt:,} × {demand.tokens_per_document:,} + "
        f"{demand.question_tokens:,} tokens",
        f"speed: {plan.speed.source}",
        f"β = {plan.saved_share:.3f} of the first token is saved where all documents are found: 1 / (1 - αβ)",
        f"a document {uses}; with the most popular ones pinned, {plan.best_hit_rate:.1%} would be found",
        _serve_line(plan),
    )
    return Text("\n".join(lines), style="dim")


def _tiers(plan: CapacityPlan) -> Table:
    is_wide = any(tier.is_planned for tier in plan.tiers)
    table = _table(
        *("tier", "reads", "load one\ndocument", "compute\nit", "worth it\nfrom tokens", "or hit\nrate"),
        *(("keeps", "adds") if is_wide else ()),
    )
    for tier in plan.tiers:
        rate = f"{tier.tier.bytes_per_second / 1e9:.3g} GB/s, {duration_text(tier.tier.latency_seconds)}"
        more = (_kept(tier), f"{tier.found:.1%}") if tier.is_planned else ("", "")
        table.add_row(
            tier.tier.kind,
            Text(f"{rate} ({tier.tier.source})"),
            duration_text(tier.load_seconds),
            duration_text(tier.compute_seconds),
            f"never (above {LONGEST:,})" if tier.break_even_tokens is None else f"{tier.break_even_tokens:,}",
            "no" if tier.least_hit_rate is None else f"{tier.least_hit_rate:.1%}",
            *(more if is_wide else ()),
            style=None if tier.is_planned or not is_wide else "dim",
        )
    return table


def _kept(tier: TierPlan) -> str:
    return "all" if tier.kept is None else f"{tier.kept:,}"


def _notes(plan: CapacityPlan) -> Text:
    return Text("\n".join(f"note: {one_line(note, 400)}" for note in plan.notes))
