"""Commands of `kvmosaic cache`: list, verify, clean, export and import the entries of a tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvmosaic.console.help import CommandGroup
from kvmosaic.console.model_options import ModelOptions
from kvmosaic.console.option_groups import Takes, grouped
from kvmosaic.console.options import (
    AsFields,
    AsJSON,
    ChunkTiers,
    ModelDigits,
    Name,
    PromptArguments,
    SecretVariable,
    TenantName,
    Tier,
)

EXPLAIN = """chunk_separator position_strategy chunk_context preamble find_documents document_pattern profile
long_chunks max_section_tokens chunk_codec chunk_cache_size dtype
device engine kv_cache_dtype"""

cache = CommandGroup(
    no_args_is_help=True,
    add_completion=False,
    help="List, verify, clean and copy the documents stored in tiers.",
)
BundleFile = Annotated[Path, typer.Argument(metavar="FILE", help="A bundle.")]


@cache.command("ls")
def list_entries(
    tier: Tier,
    limit: Annotated[int, typer.Option(min=0, help="Most entries that are shown; 0 shows all.")] = 50,
    name: Name = None,
    model: ModelDigits = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object per line and entry.")] = False,
) -> None:
    """List the entries of a tier, the last used first.

    kvmosaic cache ls disk:/var/cache/kvmosaic
    """
    from kvmosaic.console.cache.list import list_entries
    from kvmosaic.console.cache.selection import Selection

    list_entries(tier, Selection(name, model), limit, as_json)


@cache.command()
def stat(tier: Tier, as_json: AsFields = False) -> None:
    """Count the entries and bytes of a tier."""
    from kvmosaic.console.cache.list import show_stat

    show_stat(tier, as_json)


@cache.command()
def verify(
    tier: Tier,
    secret_env: SecretVariable = None,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Put damaged entries aside.")] = False,
    as_json: AsFields = False,
) -> None:
    """Check every byte of every entry. Exit code 1 if one is damaged."""
    from kvmosaic.console.cache.verify import verify

    if not verify(tier, secret_env, quarantine, as_json):
        raise typer.Exit(1)


@cache.command("gc")
def collect(
    tier: Tier,
    quota: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Remove what was not used for longest until this is kept.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", help="Only entries not used for so many days.")
    ] = None,
    model: ModelDigits = None,
    not_model: Annotated[
        str | None, typer.Option("--not-model", metavar="FINGERPRINT", help="Only entries of other models.")
    ] = None,
    name: Name = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    as_json: AsFields = False,
) -> None:
    """Remove the entries that meet all conditions, and then the longest unused ones until a quota is kept.

    kvmosaic cache gc disk:/var/cache/kvmosaic --older-than 30 --quota 50GiB
    """
    from kvmosaic.console.cache.selection import Selection
    from kvmosaic.console.cache.verify import clean

    clean(tier, Selection(name, model, not_model, older_than), quota, dry_run, as_json)


@cache.command("export")
def export_bundle(
    tier: Tier,
    file: BundleFile,
    name: Name = None,
    model: ModelDigits = None,
    secret_env: SecretVariable = None,
    as_json: AsFields = False,
) -> None:
    """Write entries to a bundle, a file for another machine. Exit code 1 if one was damaged and left out."""
    from kvmosaic.console.cache.bundles import export_bundle
    from kvmosaic.console.cache.selection import Selection

    if not export_bundle(tier, file, Selection(name, model), secret_env, as_json):
        raise typer.Exit(1)


@cache.command("import")
def import_bundle(file: BundleFile, tier: Tier, secret_env: SecretVariable = None, as_json: AsFields = False) -> None:
    """Put the entries of a bundle into a tier; entries that it has already are skipped. Exit code 1 if one was not put.

    kvmosaic cache import notes.bundle "disk:/var/cache/kvmosaic?quota=100GiB"
    """
    from kvmosaic.console.cache.bundles import import_bundle

    if not import_bundle(file, tier, secret_env, as_json):
        raise typer.Exit(1)


@cache.command()
@grouped
def explain(
    prompts: PromptArguments,
    opening: Annotated[ModelOptions, Takes(EXPLAIN)],
    chunk_tier: ChunkTiers = None,
    tenant: TenantName = "",
    as_json: AsJSON = False,
) -> None:
    """Say for every segment of a prompt whether a tier has it, and if not, why.

    kvmosaic cache explain reader --documents notes --question "Where?" --chunk-tier disk:/var/cache/kvmosaic
    """
    from kvmosaic.errors import InvalidConfig

    opening, asking = prompts.read("cache explain", opening, tenant)
    if not chunk_tier:
        raise InvalidConfig("no tier is asked; give --chunk-tier URL, such as disk:/var/cache/kvmosaic")

    from kvmosaic.console.cache.explain import explain

    explain(opening, asking, chunk_tier, as_json)
