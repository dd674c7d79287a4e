"""Capacity planning: what fits on a device, its hit rate, and the time to the first token."""

from kvmosaic.capacity.demand import Demand
from kvmosaic.capacity.model_facts import ModelFacts, read_model
from kvmosaic.capacity.plan import CapacityPlan, MemorySplit, Stage, plan_capacity
from kvmosaic.capacity.speed import HARDWARE, Speed, spec_speed
from kvmosaic.capacity.tier_plan import ASSUMED_TIERS, TierPlan, TierSpeed

__all__ = [
    "ASSUMED_TIERS",
    "HARDWARE",
    "CapacityPlan",
    "Demand",
    "MemorySplit",
    "ModelFacts",
    "Speed",
    "Stage",
    "TierPlan",
    "TierSpeed",
    "plan_capacity",
    "read_model",
    "spec_speed",
]
