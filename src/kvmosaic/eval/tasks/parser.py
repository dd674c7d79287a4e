"""Parser of task texts such as "one-hop(3)"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvmosaic.errors import InvalidConfig
from kvmosaic.eval.tasks.long import Long
from kvmosaic.eval.tasks.needle import Needle
from kvmosaic.eval.tasks.one_hop import OneHop
from kvmosaic.eval.tasks.order import Order
from kvmosaic.eval.tasks.story import Story
from kvmosaic.eval.tasks.task import Task
from kvmosaic.eval.tasks.two_hop import TwoHop

TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {"one-hop": OneHop, "two-hop": TwoHop, "story": Story, "order": Order, "needle": Needle, "long": Long}
)
FORMS = "one-hop(documents), two-hop, story, order, needle(documents), long(tokens)"
_SIZED = (OneHop, Needle, Long)
_FORM = re.compile(r"([a-z-]+)(?:\(\s*([0-9]{1,9})\s*\))?")
_MAX_CHARACTERS = 100


def task(text: str) -> Task:
    """The task of a text: a name, and in brackets its size if it has one.

    Raises:
        InvalidConfig: no such task, or a size that it cannot have.
    """
    form = _FORM.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
    if form is None or form[1] not in TASKS:
        raise InvalidConfig(f"there is no task {text[:80]!r}; choose from {FORMS}")
    make = TASKS[form[1]]
    if form[2] is None:
        return make()
    if make not in _SIZED:
        raise InvalidConfig(f"the task {form[1]} has one size only, got {text!r}; the forms are {FORMS}")
    return make(int(form[2]))
