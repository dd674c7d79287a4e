"""What the front end of an engine shows of the plugin on its /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY


def shown(engine: Any) -> dict[str, float]:
    """Our series of this process, without the labels that all of them share: `name` or `name[value]`."""
    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("kvmosaic:") and not sample.name.endswith("_created"):
                own = [value for label, value in sample.labels.items() if label not in ("model_name", "engine")]
                found[f"{sample.name}[{own[0]}]" if own else sample.name] = sample.value
    return found
