"""The loop: requests, sequences, steps."""

from kvmosaic.engine.engine import Engine, not_movable
from kvmosaic.engine.request import Request
from kvmosaic.engine.scheduler import Scheduler
from kvmosaic.engine.sequence import Sequence, SequenceState
from kvmosaic.engine.step import Step, Work

__all__ = ["Engine", "Request", "Scheduler", "Sequence", "SequenceState", "Step", "Work", "not_movable"]
