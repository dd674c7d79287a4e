"""Capacity planning: what fits on a device."""

from kvmosaic.lab.capacity.model_facts import ModelFacts, read_model
from kvmosaic.lab.capacity.plan import CapacityPlan, Demand, MemorySplit, TierPlan, plan_capacity
