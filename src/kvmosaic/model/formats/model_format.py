"""The model format: where weights, configuration and tokenizer are stored, and how they are read. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is loaded of a model, and where to."""

    source: str
    """What `ModelFormat.find` returned."""
    dtype: str | torch.dtype
    device: torch.device
    options: Mapping[str, Any]
    """Arguments of transformers' loaders: `revision`, `trust_remote_code`, `local_files_only`."""


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model as read from its format."""

    module: Any
    """The transformers module, with all weights in the chosen dtype."""
    tokenizer: Any
    """None if the source has none."""
    note: str = ""
    """What was changed in the weights, for the user; empty if nothing."""
    fingerprint: Callable[[str], str] = field(default=lambda of_module: of_module)
    """Makes the model's fingerprint from that of its configuration and weights."""


class ModelFormat(ABC):
    """A format of model files. Finding and describing read at most a header, and import no torch."""

    title: ClassVar[str]
    """What users give, for help texts: "a GGUF file"."""
    is_last: ClassVar[bool] = False
    """Whether it is asked after all others, because it takes whatever they leave."""
    capacity_note: ClassVar[str] = ""
    """How capacity planning counts the weights, if not as they are stored."""

    @abstractmethod
    def find(self, name_or_path: str | Path) -> str | None:
        """The source, if a name or path is of this format, whether it exists or not; None if it is of another one."""

    @abstractmethod
    def read(self, request: LoadRequest) -> ReadModel:
        """Loads the weights.

        Raises:
            ModelNotFound: the source does not exist, or has no weights.
            UnsupportedModel: it cannot be read.
            InvalidConfig: a dtype or quantization that it does not support.
        """

    @abstractmethod
    def read_config(self, source: str) -> Any:
        """The transformers configuration, with the dtype of the weights; no weights are read. Raises as `read`."""

    @abstractmethod
    def display_name(self, source: str) -> str:
        """The model's name in tables."""

    @abstractmethod
    def profile_path(self, source: str, file_name: str) -> Path | None:
        """The place of a file that belongs to the model, such as its profile; None where there is none, as on a hub."""

    def files_in(self, folder: Path) -> Sequence[str]:
        """Names of files of this format in a folder, to suggest them; empty for a format of folders."""
        return ()


def first_bytes(path: Path) -> bytes:
    """The first bytes of a file, enough to know its format; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError:
        return b""


def what_begins_with(start: bytes) -> str:
    """What a file of an unexpected format is, from its first bytes, for an error."""
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS; fetch the file itself with `git lfs pull`"
    return f"it begins with {start[:8]!r}"
