"""Take lent pages back in one step: evict what does not fit, migrate the rest, rewrite, withdraw.

Everything that holds a page id is rewritten through one look-up table, so requests keep running
and the prefix cache stays valid. Either all pages are withdrawn or none (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from memory_backends.base import PageRange
from memory_backends.pages import count

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode

    from memory_backends.kv_pool import ElasticMHATokenToKVPool
    from memory_backends.token_pool import ElasticTokenToKVPoolAllocator


class DoesNotFit(RuntimeError):
    """More pages are in use than remain; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Pages withdrawn from the allocator, moved to another page, dropped from the prefix cache."""

    withdrawn: int
    migrated: int
    evicted: int


@dataclass(frozen=True, slots=True)
class PageTables:
    """Everything that holds page ids at the start of a scheduler step."""

    allocator: ElasticTokenToKVPoolAllocator
    pool: ElasticMHATokenToKVPool
    tree_cache: RadixCache
    req_to_token_pool: ReqToTokenPool
    requests: Sequence[Req]
    """Requests with KV: running, prefilled but not merged yet, and the chunked one."""
    chunked: Req | None


def held_pages(tables: PageTables) -> int:
    """Pages that a request holds; cached prefixes nobody uses are not counted."""
    allocator = tables.allocator
    return allocator.size - allocator.available_size() - tables.tree_cache.evictable_size()


def reclaim(ranges: Sequence[PageRange], tables: PageTables, reserve: int) -> Reclaimed:
    """Withdraw the lent pages `ranges`, or raise `DoesNotFit` and leave every page where it is.

    `reserve` pages must be left beside those held, for what the requests will grow by. Cached
    prefixes are evicted by SGLang's own order, and only as many as do not fit; the others migrate.
    Copies are enqueued on the current stream.
    """
    allocator = tables.allocator
    remaining = allocator.size - count(ranges)
    held = held_pages(tables)
    if held + reserve > remaining:
        raise DoesNotFit(
            f"requests in flight would not fit: they hold {held} pages and may grow by {reserve}, "
            f"{remaining} would remain"
        )

    surplus = allocator.size - allocator.available_size() - remaining
    evicted = 0
    if surplus > 0:
        evicted = tables.tree_cache.evict(EvictParams(num_tokens=surplus)).num_tokens_evicted

    source = allocator.used_in(ranges)
    migrate(source, allocator.free_outside(ranges, len(source)), tables)
    allocator.withdraw(ranges)
    return Reclaimed(withdrawn=count(ranges), migrated=len(source), evicted=evicted)


def migrate(source: torch.Tensor, target: torch.Tensor, tables: PageTables) -> None:
    """Move the pages `source` (in use) to `target` (free), int64, and rewrite every page table.

    Whatever can fail comes first: the copy goes to free pages and the new ids to new tensors, so
    until the first assignment nothing has changed.
    """
    if len(source) != len(target):
        raise DoesNotFit(f"{len(source)} pages to move, {len(target)} free")
    if not len(source):
        return
    tables.pool.copy_pages(target, source)
    new_id = torch.arange(tables.pool.size + 1, dtype=torch.int64, device=source.device)
    new_id[source] = target
    rows, ids = _request_ids(tables, new_id)
    nodes = list(_nodes(tables.tree_cache))
    values = _node_values(nodes, new_id)
    chunked = tables.chunked
    prefix = None if chunked is None else new_id[chunked.prefix_indices.long()]

    tables.allocator.exchange(taken=target, returned=source)
    if rows is not None:
        tables.req_to_token_pool.req_to_token[rows, : ids.shape[1]] = ids
    for node, value in zip(nodes, values, strict=True):
        node.value = value
    if chunked is not None:
        chunked.prefix_indices = prefix


def requests_with_kv(batches: Iterable[Iterable[Req]]) -> list[Req]:
    """The requests in `batches` that hold KV, each once."""
    found = {
        id(req): req
        for batch in batches
        for req in batch
        if req.req_pool_idx is not None and req.kv is not None
    }
    return list(found.values())


ROWS_AT_ONCE = 64
"""Rows of the request table that are gathered together: bounds the temporary memory."""


def _request_ids(
    tables: PageTables, new_id: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Row numbers of all requests (None without any), and their new page ids `[requests, longest]`.

    Entries behind a row's allocated length are stale and are written before they are read, so it
    does no harm to map them too.
    """
    table = tables.req_to_token_pool.req_to_token
    if not tables.requests:
        return None, table[:0]
    rows = torch.tensor(
        [req.req_pool_idx for req in tables.requests], dtype=torch.int64, device=table.device
    )
    width = max(req.kv.kv_allocated_len for req in tables.requests)
    narrow = new_id.to(table.dtype)
    return rows, torch.cat([narrow[table[block, :width]] for block in rows.split(ROWS_AT_ONCE)])


def _node_values(nodes: Sequence[TreeNode], new_id: torch.Tensor) -> list[torch.Tensor]:
    """The nodes' new page ids. Cloned: a view would keep every other node's ids alive."""
    if not nodes:
        return []
    ids = new_id[torch.cat([node.value for node in nodes])]
    return [value.clone() for value in ids.split([len(node.value) for node in nodes])]


def _nodes(tree_cache: RadixCache) -> Iterable[TreeNode]:
    """All nodes that hold KV; none where prefixes are not cached (`--disable-radix-cache`)."""
    pending = [] if tree_cache.is_chunk_cache() else list(tree_cache.root_node.children.values())
    while pending:
        node = pending.pop()
        if node.value is not None:
            yield node
        pending.extend(node.children.values())
