"""What was asked: segments and prompts from text, chat, documents or tokens."""

from kvmosaic.prompt.segment import Prompt, Segment, SegmentKind

__all__ = ["Prompt", "Segment", "SegmentKind"]
