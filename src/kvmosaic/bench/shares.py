"""Shares: the minimum that the machine needs / the measured value, per row."""

from __future__ import annotations

from statistics import fmean

from kvmosaic.bench.limits import Limits
from kvmosaic.bench.measurement import BenchRow
from kvmosaic.bench.models import TokenCost


def add_shares(row: BenchRow, limits: Limits, weight: TokenCost) -> None:
    """Writes the shares of the limits and the least bytes into a row.

    Prompts of one batch that share documents read them once; the others read their own. For prompts asked together, the
    last first token counts: until then, all of them were computed.
    """
    if row.first is None or not row.num_prompt:
        return
    num_prompt = max(row.num_prompt)
    is_shared = row.workload.startswith("shared-")
    num_context = num_prompt * (1 if is_shared else row.width)
    if row.num_computed:
        num_computed = fmean(row.num_computed) * row.width
        least = limits.first_token_seconds(weight, row.dtype, round(num_computed), num_context)
        lasts = [max(row.first_seconds[begin:][: row.width]) for begin in range(0, len(row.first_seconds), row.width)]
        row.first_share = least / fmean(lasts)
        num_steps = row.num_answered / max(len(row.first_seconds), 1)
        read = num_steps * (weight.step_bytes + weight.kv_bytes_per_token * num_context)
        row.least_bytes = round(read + weight.kv_bytes_per_token * (num_computed + num_steps * row.width))
    if row.token is not None:
        row.token_share = limits.token_seconds(weight, num_context) / row.token.median
