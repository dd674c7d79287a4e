"""The engine loop: requests, sequences, scheduling, steps, and the asynchronous interface."""

from kvmosaic.engine.async_engine import AsyncEngine
from kvmosaic.engine.engine import Engine
from kvmosaic.engine.figures import EngineFigures
from kvmosaic.engine.placement import not_movable
from kvmosaic.engine.request import Request
from kvmosaic.engine.scheduler import Scheduler
from kvmosaic.engine.sequence import Sequence, SequenceStatus
from kvmosaic.engine.step import ScheduledTokens, Step
from kvmosaic.engine.stream import AnswerDelta, RequestDelta
