"""Tasks with exact answers: questions about invented things, drawn from a seed."""

from kvmosaic.eval.tasks.long import Long
from kvmosaic.eval.tasks.needle import Needle
from kvmosaic.eval.tasks.one_hop import OneHop
from kvmosaic.eval.tasks.order import Order
from kvmosaic.eval.tasks.parser import FORMS, TASKS, task
from kvmosaic.eval.tasks.story import Story
from kvmosaic.eval.tasks.task import Task
from kvmosaic.eval.tasks.two_hop import TwoHop

__all__ = ["FORMS", "TASKS", "Long", "Needle", "OneHop", "Order", "Story", "Task", "TwoHop", "task"]
