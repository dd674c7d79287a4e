"""Default sampling parameters from a model's generation configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvmosaic.errors import InvalidSampling
from kvmosaic.sampling.params import SamplingParams

FOLLOWED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields of a generation configuration that are used, as in vLLM."""

logger = logging.getLogger("kvmosaic")


def default_sampling(declared: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams()`, overridden by a model's generation configuration.

    An explicit `do_sample: false` means temperature 0, whatever the temperature beside it says, as in transformers.

    Args:
        declared: fields of the configuration; None is the same as an absent one. A value that `SamplingParams` would
            refuse is ignored with a log line: the model can be used without it.
    """
    usable: dict[str, Any] = {}
    for name in FOLLOWED:
        value = declared.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidSampling as error:
            logger.warning("the model's generation_config.json is not followed in one value: %s", error)
        else:
            usable[name] = value
    if declared.get("do_sample") is False:
        usable["temperature"] = 0.0
    return SamplingParams(**usable)
