"""Options of `kvmosaic warm`: which documents, after which system text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvmosaic.console.options import System, TenantName

if TYPE_CHECKING:
    from kvmosaic.console.warm.folder import Warming


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """The documents to warm, and where they will be used."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of documents, one per file.")]
    system: System = None
    system_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The system text, from a file of UTF-8 text.")
    ] = None
    glob: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Which files, such as '**/*.md'. Default: .txt and .md, no sub-folders."),
    ] = None
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Then write these documents to a bundle for other machines.")
    ] = None
    tenant: TenantName = ""

    def warming(self) -> Warming:
        """What `warm_folder` needs."""
        from kvmosaic.console.warm.folder import Warming

        return Warming(self.folder, self.glob, self.system, self.system_file, self.bundle, self.tenant)
