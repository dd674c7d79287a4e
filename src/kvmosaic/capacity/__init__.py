"""Capacity planning: what fits on a device, and its hit rate."""

from kvmosaic.capacity.demand import Demand
from kvmosaic.capacity.model_facts import ModelFacts, read_model
from kvmosaic.capacity.plan import CapacityPlan, MemorySplit, TierPlan, plan_capacity
