"""Commands of `kvmosaic cache`: list, verify and clean the entries of a tier."""

from __future__ import annotations

from typing import Annotated

import typer

from kvmosaic.console.help import CommandGroup
from kvmosaic.console.options import AsFields, ModelDigits, Name, SecretVariable, Tier

cache = CommandGroup(
    no_args_is_help=True,
    add_completion=False,
    help="List, verify and clean the documents stored in tiers.",
)


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
