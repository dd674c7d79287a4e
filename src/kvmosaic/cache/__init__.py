"""What can be reused: keys, pools, tables, caches, and the planner over all of them. No tensors here."""

from kvmosaic.cache.account import TenantUsage
from kvmosaic.cache.attachment import AttachedSpan, Attachment
from kvmosaic.cache.block_map import BlockMap, BlockState
from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.block_table import BlockCopy, BlockRun, BlockTable
from kvmosaic.cache.chunk import Chunk, ChunkState
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import DEFAULT_TENANT, Key, KeyChain
from kvmosaic.cache.plan import Plan, SpanPlan
from kvmosaic.cache.planner import Planner
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.statistics import ChunkCacheStats
from kvmosaic.cache.tree import PrefixTree, TreeDocument, TreeLimits, TreePlace, TreeRun, TreeSystem

__all__ = [
    "DEFAULT_TENANT",
    "AttachedSpan",
    "Attachment",
    "BlockCopy",
    "BlockId",
    "BlockMap",
    "BlockPool",
    "BlockRun",
    "BlockState",
    "BlockTable",
    "Chunk",
    "ChunkCacheStats",
    "ChunkIndex",
    "ChunkState",
    "Key",
    "KeyChain",
    "Plan",
    "Planner",
    "PrefixCache",
    "PrefixTree",
    "SpanPlan",
    "TenantUsage",
    "TreeDocument",
    "TreeLimits",
    "TreePlace",
    "TreeRun",
    "TreeSystem",
]
