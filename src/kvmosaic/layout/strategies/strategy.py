"""The position strategy: where documents are computed, and where the prompt reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class PositionStrategy(ABC):
    """Positions of the documents of a prompt.

    A document is *computed* at a position that does not depend on the other documents of a prompt, and *read* at the
    position that the prompt gives it; the distance between the two rotates the query, never the key.

    A strategy is stateless: one instance serves all prompts.
    """

    name: ClassVar[str]
    """Its name in configuration, requests and reports."""
    summary: ClassVar[str]
    """What documents do, for help texts: they "overlap"."""
    overlaps: ClassVar[bool] = False
    """Whether documents share positions, so that their order is not in the positions."""
    takes_offsets: ClassVar[bool] = False
    """Whether the caller gives every document its position (`position_offset`), where it is computed and read."""

    @abstractmethod
    def moves(self, chunk_context: str) -> bool:
        """Whether documents computed in this context may be read at another position: the model must be movable."""

    @abstractmethod
    def position(self, start: int, cursor: int, shift: int) -> int:
        """Position at which the question reads a document's first token.

        Args:
            start: where the document was computed.
            cursor: end of the system text and of the documents before it, one after the other.
            shift: end of the system text, minus the end of what the document saw of it when it was computed.
        """

    def position_of_seen(self, start: int, end: int) -> int:
        """Position at which a later document reads this one, which it names in `sees`.

        Args:
            start: where this document was computed.
            end: end of what the later document sees before it.
        """
        return start
