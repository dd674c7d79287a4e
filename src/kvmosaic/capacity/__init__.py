"""Capacity planning: what fits on a device."""

from kvmosaic.capacity.model_facts import ModelFacts, read_model
from kvmosaic.capacity.plan import CapacityPlan, Demand, MemorySplit, TierPlan, plan_capacity
