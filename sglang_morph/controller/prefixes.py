"""What becomes of cached prefixes whose KV was computed below full precision.

- `share`: they are reused like any other, and counted (`request_exposure`).
- `namespace`: a request finds only prefixes computed at the level it is admitted at. SGLang keeps
  prefixes with different `extra_key` apart; each level above 0 adds its own.
- `refresh`: they are reused until precision is full again, and then dropped.

A request that is running while the level changes (with `refresh`: while it becomes 0) goes on,
but puts no more KV into the cache: what it computes next would be a mixture.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Final

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from memory_backends.page_levels import PageLevels
from sglang_morph.controller.executor import Executor
from sglang_morph.controller.scheduler_view import page_tables
from sglang_morph.options import PREFIX_POLICIES


class PrefixPolicy:
    """`share`, and what the others have in common. Called from the scheduler's thread."""

    name: ClassVar[str] = "share"

    def __init__(self, scheduler: Any, executor: Executor, pages: PageLevels) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._pages = pages
        self.dropped_tokens = 0
        """Cached tokens that were dropped for their precision."""

    def queued(self, req: Any) -> None:
        """`req` entered the waiting queue, for the first time or after a retraction."""

    def follow(self) -> None:
        """The level may have changed; nothing is planned at the new one yet."""

    def status(self) -> dict[str, object]:
        return {"policy": self.name, "dropped_tokens": self.dropped_tokens}

    def _keep_running_requests_out(self) -> None:
        """No request with KV puts more of it into the cache."""
        for req in page_tables(self._scheduler).requests:
            req.skip_radix_cache_insert = True


class Namespace(PrefixPolicy):
    name = "namespace"

    def __init__(self, scheduler: Any, executor: Executor, pages: PageLevels) -> None:
        super().__init__(scheduler, executor, pages)
        self._level = executor.level

    def queued(self, req: Any) -> None:
        # A retracted request starts anew, with no KV of another level.
        req.skip_radix_cache_insert = False
        if not hasattr(req, "morph_own_key"):
            req.morph_own_key = req.extra_key
        req.extra_key = self._key(req.morph_own_key)

    def follow(self) -> None:
        level = self._executor.level
        if level == self._level:
            return
        self._level = level
        for req in self._scheduler.waiting_queue:
            req.extra_key = self._key(req.morph_own_key)
        self._keep_running_requests_out()

    def _key(self, own: str | None) -> str | None:
        if self._level == 0:
            return own
        return f"{own or ''}|precision level {self._level}"


class Refresh(PrefixPolicy):
    name = "refresh"

    def __init__(self, scheduler: Any, executor: Executor, pages: PageLevels) -> None:
        super().__init__(scheduler, executor, pages)
        self._was_lowered = False
        self._hidden: list[Any] = []
        """Radix nodes that requests still use; out of reach of any look-up."""
        self._root: Any = None
        """Of the tree they are in: a flush makes a new tree."""
        self._serial = 0

    def queued(self, req: Any) -> None:
        req.skip_radix_cache_insert = False

    def follow(self) -> None:
        if self._executor.level:
            self._was_lowered = True
        elif self._was_lowered:
            self._was_lowered = False
            self._drop_lowered()
        if self._hidden:
            self._drop_unlocked()

    def status(self) -> dict[str, object]:
        return {**super().status(), "nodes_in_use": len(self._hidden)}

    def _drop_lowered(self) -> None:
        tree = self._scheduler.tree_cache
        if tree.is_chunk_cache() or not self._pages.any:
            return
        self._keep_running_requests_out()
        self._root = tree.root_node
        clean = self._clean_tokens(list(_nodes(tree.root_node)))
        pending = [tree.root_node]
        while pending:
            for child in list(pending.pop().children.values()):
                if child in self._hidden:
                    continue
                if child.id not in clean:
                    pending.append(child)
                    continue
                if tokens := clean[child.id]:
                    tree._split_node(child.key, child, tokens)  # `child` is the rear part now
                self._hide_or_drop(child)

    def _clean_tokens(self, nodes: list[Any]) -> dict[int, int]:
        """By node id: how many of its first tokens are at full precision. The host waits."""
        if not nodes:
            return {}
        lowered = self._pages.lowered(torch.cat([node.value for node in nodes])).cpu()
        parts = lowered.split([len(node.value) for node in nodes])
        return {
            node.id: int(part.int().argmax())
            for node, part in zip(nodes, parts, strict=True)
            if part.any()
        }

    def _hide_or_drop(self, node: Any) -> None:
        if node.lock_ref == 0:
            self._drop(node)
            return
        # Under a key nobody asks for, it can't be matched and so be locked for ever.
        self._serial += 1
        siblings = node.parent.children
        del siblings[node.key.child_key()]
        node.key = RadixKey(node.key.token_ids, f"lowered {self._serial}", node.key.is_bigram)
        siblings[node.key.child_key()] = node
        self._hidden.append(node)

    def _drop_unlocked(self) -> None:
        if self._scheduler.tree_cache.root_node is not self._root:
            self._hidden = []
            return
        waiting = []
        for node in self._hidden:
            if node.parent.children.get(node.key.child_key()) is not node:
                continue  # SGLang has evicted it
            if node.lock_ref:
                waiting.append(node)
            else:
                self._drop(node)
        self._hidden = waiting

    def _drop(self, top: Any) -> None:
        """Evict `top` and all below it, leaves first, as SGLang evicts. Nothing there is locked."""
        tree = self._scheduler.tree_cache
        for node in reversed([top, *_nodes(top)]):
            tree.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
            tree._delete_leaf(node)
            tree._record_remove_event(node)
            self.dropped_tokens += len(node.value)


def _nodes(top: Any) -> Iterable[Any]:
    """All nodes below `top`, parents first."""
    pending = list(top.children.values())
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())


_CLASSES: Final = dict(zip(PREFIX_POLICIES, (PrefixPolicy, Namespace, Refresh), strict=True))


def create_prefix_policy(
    name: str, scheduler: Any, executor: Executor, pages: PageLevels
) -> PrefixPolicy:
    """`name`: one of `PREFIX_POLICIES`."""
    return _CLASSES[name](scheduler, executor, pages)


def keep_chunk(req: Any, tree_cache: Any) -> None:
    """A chunk of `req` was computed that must not go into the cache: the next one follows on it."""
    row = tree_cache.req_to_token_pool.req_to_token[req.req_pool_idx, : req.extend_range.end]
    req.prefix_indices = row.to(dtype=torch.int64, copy=True)
