"""Options of `kvmosaic bench`; modules that need torch are imported when it runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmosaic.config import flag_of, settings_of
from kvmosaic.console.options import AsReport, FixedStrategy, Output, grouped, option
from kvmosaic.lab.bench.sizes import PRESETS, Sizes

if TYPE_CHECKING:
    from kvmosaic.lab.bench.peers import PeerOptions

Threads = Annotated[int | None, option("num_threads")]


def _size(name: str, least: int = 1) -> Any:
    about = settings_of(Sizes)[name]
    return typer.Option(flag_of(name), min=least, max=about.high, help=about.help)


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """Sizes other than those of the preset."""

    documents: Annotated[int | None, _size("documents")] = None
    document_tokens: Annotated[int | None, _size("document_tokens")] = None
    answer: Annotated[int | None, _size("answer", 2)] = None
    rounds: Annotated[int | None, _size("rounds")] = None
    zipf_prompts: Annotated[int | None, _size("zipf_prompts")] = None
    orders: Annotated[int | None, _size("orders")] = None
    max_sharers: Annotated[int | None, _size("max_sharers")] = None

    def sizes(self, preset: str) -> Sizes:
        """The preset with these sizes."""
        return replace(PRESETS[preset], **{name: size for name, size in asdict(self).items() if size is not None})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which engines are measured, and how they are started."""

    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only these engines: on and off (kvmosaic with and without chunk cache), transformers.",
        ),
    ] = None
    num_threads: Threads = None
    position_strategy: FixedStrategy = "shared"
    capacity: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for each of our pools. Default: 4GiB, or for llama.cpp auto."),
    ] = None

    def peers(self) -> PeerOptions:
        """What `open_peers` needs.

        Raises:
            InvalidConfig: an unknown engine, or no interpreter.
        """
        from kvmosaic.container import this_machine
        from kvmosaic.lab.bench.peers import PEERS, PeerOptions

        return PeerOptions(
            tuple(self.engine or PEERS),
            self.position_strategy,
            self.capacity,
            self.num_threads or this_machine().threads,
        )


@grouped
def bench_command(
    sizes: SizeOptions,
    engines: EngineOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            help="'reader' (the default), 'random-0.1b', 'random-0.5b' (random Llamas), a folder, or a GGUF file."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small prompts and few rounds: under a minute with the reader.")
    ] = False,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this one (several times for more): question, fresh, repeated, permuted, "
            "known, zipf, agents, turns, plain, sharers, orders.",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="auto (a GGUF file runs in llama.cpp), float32 or bfloat16; given twice, each engine counts with its "
            "best.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed asks the same prompts.")] = 0,
    output: Output = None,
    as_json: AsReport = False,
) -> None:
    """Measure speed and memory, also of transformers, with the same prompts and weights.

    kvmosaic bench --quick

    kvmosaic bench random-0.1b --dtype bfloat16 --dtype float32 --num-threads 2 -o results

    kvmosaic bench model.gguf --dtype auto --dtype float32
    """
    from kvmosaic.lab.bench.campaign import Campaign, bench

    preset = "quick" if quick else "full"
    campaign = Campaign(
        model or "reader",
        tuple(dtype or ("auto",)),
        sizes.sizes(preset),
        preset,
        tuple(workload or ()),
        engines.peers(),
        seed,
    )
    bench(campaign, output, as_json=as_json)
