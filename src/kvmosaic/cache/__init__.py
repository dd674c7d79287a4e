"""KV cache planning: keys, pools, tables, caches, and the `KVCache` facade. No tensors here."""

from kvmosaic.cache.allocation import Allocation, SpanAllocation
from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.block_table import BlockCopy, BlockRun, BlockTable
from kvmosaic.cache.chunk import Chunk, ChunkState
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import DEFAULT_TENANT, Key, KeyChain
from kvmosaic.cache.kv_cache import KVCache
from kvmosaic.cache.plan import Plan, SpanPlan
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.statistics import BlockMap, BlockState, ChunkCacheStats
from kvmosaic.cache.tenants import TenantUsage
