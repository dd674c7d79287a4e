"""Chunks of tenants: lookup by name, pins, deletion, priorities, quotas and usage."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import Key
from kvmosaic.cache.tenants import TenantUsage
from kvmosaic.errors import ChunkInUse, InvalidConfig
from kvmosaic.eviction import check_priority

MAX_QUOTA_BYTES = 2**50


class TenantChunks:
    """Facade for the chunks of tenants: what a caller may do with chunks other than reading and computing them.

        find_chunks("guide")                    one document under two system prompts is two chunks
        pin, unpin, evict, delete, set_priority all chunks of a name or none
        pin_when_ready("guide")                 future chunks of this name too
        set_quota("acme", 2**30)                evicts idle chunks of this tenant at once, as far as needed

    A name belongs to a tenant: another tenant's chunks are never found, not even by key. `KVCache` adds plans and
    allocations.
    """

    def __init__(self, chunks: ChunkIndex, clock: Callable[[], float]) -> None:
        self._chunks = chunks
        self._clock = clock
        self._usages: Mapping[str, TenantUsage] = {}

    @property
    def bytes_per_block(self) -> int:
        """Of all layers together."""
        return self._chunks.bytes_per_block

    def chunks(self) -> list[Chunk]:
        """All chunks, oldest first, those being computed included."""
        return self._chunks.chunks()

    def find_chunks(self, name_or_key: str | Key, salt: str | None = "", tenant: str = "") -> list[Chunk]:
        """The chunks of a tenant with this name, under one salt or (None) all, or the one with this key.

        Raises:
            UnknownChunk: no such chunk.
        """
        return self._chunks.named(name_or_key, salt, tenant)

    def has_dependents(self, chunk: Chunk) -> bool:
        """Whether unfinished chunks share its first blocks, which were not complete when they were allocated."""
        return self._chunks.has_dependents(chunk)

    def pin(self, name_or_key: str | Key, salt: str | None = "", tenant: str = "") -> int:
        """Pins all present matching chunks, which are then not evicted; returns how many. See `pin_when_ready`.

        Raises:
            UnknownChunk: no such chunk.
        """
        return self._set_pinned(name_or_key, salt, tenant, True)

    def unpin(self, name_or_key: str | Key, salt: str | None = "", tenant: str = "") -> int:
        """Unpins chunks, which may then be evicted; returns how many have this name.

        Raises:
            UnknownChunk: no such chunk.
        """
        return self._set_pinned(name_or_key, salt, tenant, False)

    def pin_when_ready(self, name: str, tenant: str = "", wanted: bool = True) -> None:
        """Pins future chunks of a tenant with this name, under any salt, when they are ready.

        The name of a split document covers its parts, too ("name (1/3)").
        Chunks are pinned as long as the tenant's pins leave half of its quota (half of the pool, if it has none)
        unpinned; further ones are cached like any other. `wanted=False` ends it, for known names or not; pinned chunks
        stay pinned until `unpin`.

        Raises:
            QuotaExceeded: the tenant already has `MAX_PINNED_NAMES` pinned names.
        """
        names = self._chunks.open(tenant).pinned_names
        if wanted:
            names.add(name)
        else:
            names.discard(name)
            self._chunks.close(tenant)

    def delete(
        self, name_or_key: str | Key, salt: str | None = "", tenant: str = "", *, when_idle: bool = False
    ) -> int:
        """Drops chunks, pinned or not, all with this name or none; returns how many.

        With `when_idle`, chunks in use or being computed are not found by new lookups. Requests that hold them
        continue, and the last release frees their blocks.

        Raises:
            UnknownChunk: no such chunk.
            ChunkInUse: a running request uses one of them, and `when_idle` is off.
        """
        chunks = self._chunks.named(name_or_key, salt, tenant)
        self._chunks.delete(chunks, when_idle=when_idle)
        return len(chunks)

    def evict(self, name_or_key: str | Key, salt: str | None = "", tenant: str = "") -> int:
        """Evicts chunks, all with this name or none; returns how many. Tiers, if there are any, get them.

        Raises:
            UnknownChunk: no such chunk.
            ChunkInUse: a running request uses one of them, or one is pinned.
        """
        chunks = self._chunks.named(name_or_key, salt, tenant)
        for chunk in chunks:
            if not chunk.is_evictable:
                label = next(iter(chunk.names), chunk.key.hex())
                way = "unpin it first" if chunk.pinned else "evict it when the requests that use it have ended"
                raise ChunkInUse(f"the chunk {label!r} is {'pinned' if chunk.pinned else 'in use'}; {way}")
        for chunk in chunks:
            self._chunks.evict(chunk)
        return len(chunks)

    def set_priority(self, name_or_key: str | Key, priority: float, salt: str | None = "", tenant: str = "") -> int:
        """Sets the priority of chunks, 0 to 1 (default 0.5), for the policy `priority`; returns how many.

        Raises:
            UnknownChunk: no such chunk.
            InvalidConfig: not between 0 and 1.
        """
        check_priority(priority, "chunks")
        chunks = self._chunks.named(name_or_key, salt, tenant)
        for chunk in chunks:
            self._chunks.set_priority(chunk, priority)
        return len(chunks)

    def evict_cold(self, min_accesses: int, idle_seconds: float) -> int:
        """Evicts chunks idle for at least so long and with fewer accesses; returns how many.

        Pinned chunks and chunks in use stay.

        Raises:
            InvalidConfig: a number outside its range.
        """
        if not 0 <= min_accesses <= 2**40 or not 0.0 <= idle_seconds <= 1e12:
            raise InvalidConfig(
                "min_accesses must be between 0 and 2**40 and idle_seconds between 0 and 1e12, "
                f"got {min_accesses!r} and {idle_seconds!r}"
            )
        before = self._clock() - idle_seconds
        cold = [
            chunk
            for chunk in self._chunks.chunks()
            if chunk.is_evictable and chunk.hits < min_accesses and chunk.last_used <= before
        ]
        for chunk in cold:
            self._chunks.evict(chunk)
        return len(cold)

    def set_quota(self, tenant: str, num_bytes: int | None) -> None:
        """Sets or (None) removes a limit on the chunk blocks of a tenant; whole blocks only.

        Evicts idle chunks at once as far as needed. What is pinned or in use above the quota stays, and nothing new is
        computed until enough is released.

        Raises:
            InvalidConfig: not between 0 and 2**50.
        """
        if num_bytes is not None and not 0 <= num_bytes <= MAX_QUOTA_BYTES:
            raise InvalidConfig(f"a quota must be between 0 and {MAX_QUOTA_BYTES} bytes, got {num_bytes!r}")
        self._chunks.set_quota(tenant, num_bytes)

    def tenant_usage(self, tenant: str = "") -> TenantUsage:
        """Current chunk pool usage of a tenant."""
        account = self._chunks.account(tenant)
        num_bytes = account.num_blocks * self.bytes_per_block
        return TenantUsage(
            account.num_chunks,
            account.num_blocks,
            num_bytes,
            account.quota_bytes,
            account.num_idle_blocks,
            account.num_pinned_blocks,
            account.num_evictions,
        )

    def usages(self) -> Mapping[str, TenantUsage]:
        """Current chunk pool usage of each tenant; tenants without chunks and quota are omitted.

        The mapping is a snapshot. Only tenants changed since the last call are visited.
        """
        if changed := self._chunks.take_changed():
            usages = dict(self._usages)
            for tenant in changed:
                usages[tenant] = self.tenant_usage(tenant)
                if not usages[tenant].num_blocks and usages[tenant].quota_bytes is None:
                    del usages[tenant]
            self._usages = usages
        return self._usages

    def _set_pinned(self, name_or_key: str | Key, salt: str | None, tenant: str, pinned: bool) -> int:
        chunks = self._chunks.named(name_or_key, salt, tenant)
        for chunk in chunks:
            self._chunks.set_pinned(chunk, pinned)
        return len(chunks)
