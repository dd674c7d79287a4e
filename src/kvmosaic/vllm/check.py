"""Check of vLLM with the plugin on this machine, in this process and in its workers: `kvmosaic check --vllm`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.console.text import fact_table, printable
from kvmosaic.errors import InvalidConfig
from kvmosaic.vllm.composed_check import CheckResult, ComposedCheck, load_reference
from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.front.command import check_installed
from kvmosaic.vllm.plugin import NAME
from kvmosaic.vllm.worker import extra_forward, position_shift
from kvmosaic.vllm.worker.composing_worker import ComposingWorker
from kvmosaic.vllm.worker.kv_layout import LayerPlace
from kvmosaic.vllm.worker.trial.plan import trial_tokens

_MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """All findings about one model in this vLLM on this machine."""

    version: str
    platform: str
    model: str
    dtype: str
    block_size: int
    trouble: str
    """Why no request is composed here; empty: they are."""
    workers: tuple[WorkerDiagnostics, ...]
    findings: tuple[CheckResult, ...]
    compiled: str = ""
    """Whether the model is compiled, and which graphs are captured: as in a server with these options."""

    @property
    def passed(self) -> bool:
        """Whether documents can be composed, and all checks passed."""
        return not self.trouble and bool(self.findings) and all(finding.passed for finding in self.findings)


def check_engine(model: str, options: Sequence[str] = ()) -> EngineCheck:
    """Starts vLLM with the plugin in this process, and checks it.

    Args:
        model: a folder or a hub name.
        options: options of `vllm serve`, such as `["--tensor-parallel-size", "2"]`.
    """
    # the scheduler must be in this process, to read its blocks
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *options]))
    if arguments.enable_prefix_caching is None:  # some models default to off
        arguments.enable_prefix_caching = True
    arguments.kv_transfer_config = KVTransferConfig(kv_connector=NAME, kv_role="kv_both")
    try:
        llm = vllm.LLM.from_engine_args(arguments)
    except Exception as error:  # any error of vLLM about a model or an option
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidConfig(f"vLLM does not start with {model!r:.200}: {said[0][:400]}") from error
    try:
        engine = _Engine(llm)
        workers = tuple(llm.collective_rpc(diagnose))
        findings: list[CheckResult] = []
        if not engine.trouble:
            model_config = engine.config.model_config
            reference = load_reference(model_config, sum(worker.num_parameters for worker in workers))
            composed = ComposedCheck(engine, partial(trial_tokens, model_config), reference)
            findings += composed.findings(
                can_repair=not any(worker.no_repair for worker in workers),
                can_shift=not any(worker.no_shift for worker in workers),
            )
            findings += reading_findings(workers, llm.collective_rpc(num_reading_forwards))
        return EngineCheck(
            version=vllm.__version__,
            platform=current_platform.device_name or current_platform.device_type,
            model=model,
            compiled=_compiled(engine.config.compilation_config),
            dtype=str(engine.config.model_config.dtype).removeprefix("torch."),
            block_size=engine.block_size,
            trouble=engine.trouble,
            workers=workers,
            findings=tuple(findings),
        )
    finally:
        llm.llm_engine.engine_core.shutdown()


class _Engine:
    """The engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.config = llm.llm_engine.vllm_config
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.block_size = int(scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self.trouble = str(scheduler.connector.trouble)

    def answer(
        self, token_ids: Sequence[int], composition: Composition | None = None, *, max_tokens: int = 1, **prompt: Any
    ) -> Any:
        """The output for a prompt: greedy, with some log-probabilities."""
        from vllm import SamplingParams

        most = min(_MAX_LOGPROBS, self.config.model_config.max_logprobs)
        extra = {} if composition is None else {"kv_transfer_params": composition.to_params()}
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=most, detokenize=False, extra_args=extra
        )
        (output,) = self.llm.generate([{"prompt_token_ids": list(token_ids), **prompt}], params, use_tqdm=False)
        return output


@dataclass(frozen=True, slots=True)
class WorkerDiagnostics:
    """The state of one worker, for people."""

    rank: str
    device: str
    num_layers: int
    layouts: tuple[str, ...]
    """Layout names, each with its number of layers."""
    rotations: tuple[str, ...]
    trouble: str
    no_repair: str
    no_shift: str
    tested: str = ""
    """What the worker tested at startup."""
    num_parameters: int = 0
    """Of its share of the model."""
    no_reading: str = ""
    """Why it does not read documents in place, where that was chosen."""


def diagnose(worker: Any) -> WorkerDiagnostics:
    """What the worker found out about its share of the model. Called in every worker, with vLLM's own."""
    from vllm.distributed import get_pp_group, get_tp_group

    composing = _composing()
    places = composing.places
    config, kv_cache_config = composing.configuration
    layers = places.layers if places else ()
    return WorkerDiagnostics(
        rank=f"{get_pp_group().rank_in_group}.{get_tp_group().rank_in_group}",
        device=str(places.device) if places else str(getattr(worker, "device", "?")),
        num_layers=len(layers),
        layouts=_counted(f"{_words(place.layout)}, blocks of {place.layout.block_size}" for place in layers),
        rotations=_counted(_rotation(place) for place in layers),
        trouble=composing.facts.trouble,
        no_repair="" if composing.facts.can_repair else extra_forward.can_run(config, kv_cache_config) or "it failed",
        no_shift=""
        if composing.facts.can_shift
        else (position_shift.can_shift(config, kv_cache_config, places.root) if places else "") or "it failed",
        tested=composing.start_check.tested,
        num_parameters=sum(each.numel() for each in places.root.parameters()) if places else 0,
        no_reading=composing.facts.no_reading,
    )


def num_reading_forwards(worker: Any) -> int | None:
    """Forwards in which this worker read documents in place; None: it does not read them so."""
    reader = _composing().reader
    return None if reader is None else reader.num_forwards


def reading_findings(workers: Sequence[WorkerDiagnostics], counts: Sequence[int | None]) -> list[CheckResult]:
    """Whether documents were read in place, where that was chosen; empty where it was not.

    Args:
        workers: findings of all workers.
        counts: by worker, see `num_reading_forwards`.
    """
    what, allowed = "documents read in place", "in at least one forward of each worker"
    if refused := next((worker.no_reading for worker in workers if worker.no_reading), ""):
        return [CheckResult(what, "", f"copied: {refused}", allowed, passed=False)]
    if any(count is None for count in counts):
        return []
    found = min(count or 0 for count in counts)
    return [CheckResult(what, "", f"in {found} forwards", allowed, passed=found > 0)]


def _compiled(config: Any) -> str:
    """How vLLM runs the model, in its own words."""
    mode, graphs = (getattr(each, "name", str(each)) for each in (config.mode, config.cudagraph_mode))
    by = f" by {config.backend}" if config.backend and mode != "NONE" else ""
    return f"{mode}{by}, graphs: {graphs}"


def _composing() -> ComposingWorker:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvmosaic.vllm.connector import ComposingConnector

    connector = get_kv_transfer_group()
    assert isinstance(connector, ComposingConnector) and connector._worker is not None
    return connector._worker


def _counted(said: Any) -> tuple[str, ...]:
    return tuple(f"{count} x {what}" for what, count in Counter(said).items())


def _words(layout: Any) -> str:
    return " ".join(re.findall("[A-Z][a-z0-9]*", type(layout).__name__.removesuffix("Layout"))).lower()


def _rotation(place: LayerPlace) -> str:
    rotation = place.rotation
    if rotation is None:
        return "not turned"
    pairs = "neighbours" if rotation.layout == "interleaved" else "halves"
    return f"{rotation.rotary_dim} of {place.layout.key_size} numbers from {rotation.first} on, paired by {pairs}"


def show_engine_check(model: str, options: Sequence[str]) -> bool:
    """Prints the check results of vLLM with the plugin; returns whether documents can be composed.

    Raises:
        InvalidConfig: there is no vLLM.
    """
    check_installed()
    from kvmosaic.assembly import BUNDLED_READER, bundled_reader

    check = check_engine(str(bundled_reader()) if model == BUNDLED_READER else model, options)
    console = Console()
    console.print(engine_table(check))
    console.print()
    console.print(worker_table(check))
    if check.findings:
        console.print()
        console.print(finding_table(check))
    console.print()
    console.print(verdict(check))
    return check.passed


def engine_table(check: EngineCheck) -> Table:
    """Returns a table of the checked engine."""
    table = fact_table()
    table.add_row("vllm", Text(f"{printable(check.version)} on {printable(check.platform)}"))
    table.add_row("model", Text(f"{printable(check.model)} in {check.dtype}"))
    if check.compiled:
        table.add_row("compiled", Text(printable(check.compiled)))
    table.add_row("blocks", Text(f"of {check.block_size} tokens"))
    return table


def worker_table(check: EngineCheck) -> Table:
    """Returns one block of rows per worker: KV layout, rotation and capabilities."""
    table = fact_table()
    for worker in check.workers:
        table.add_row("worker", Text(f"{worker.rank} on {printable(worker.device)}, {worker.num_layers} layers"))
        for name, lines in (("  cache", worker.layouts), ("  rotation", worker.rotations)):
            for line in lines:
                table.add_row(name, Text(printable(line)))
        if worker.tested:
            table.add_row("  tested", Text(printable(worker.tested)))
        table.add_row("  moving", _possible(worker.trouble))
        if not worker.trouble:
            table.add_row("  repair", _possible(worker.no_repair, "yellow"))
            table.add_row("  shared positions", _possible(worker.no_shift, "yellow"))
        if worker.no_reading:
            table.add_row("  reading in place", _possible(worker.no_reading))
    return table


def finding_table(check: EngineCheck) -> Table:
    """Returns the findings, one row each."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("tried", "compared with", "found", "allowed"):
        table.add_column(heading)
    for finding in check.findings:
        style = "green" if finding.passed else "red"
        row = (finding.what, finding.compared_with, finding.found, finding.allowed)
        table.add_row(*(Text(printable(part), style=style if part is finding.found else "") for part in row))
    return table


def verdict(check: EngineCheck) -> Text:
    """The result in one line."""
    if check.passed:
        return Text("passed: documents are composed here.", style="bold green")
    failed = next((finding.what for finding in check.findings if not finding.passed), "nothing was composed")
    return Text(f"failed: {printable(check.trouble or failed)}. Do not compose documents here.", style="bold red")


def _possible(reason: str, style: str = "red") -> Text:
    return Text(f"no: {printable(reason)}", style=style) if reason else Text("yes", style="green")
