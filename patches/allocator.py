"""Allocator: SGLang's token allocator, with a capacity that follows what is lent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def build_allocator(
        original: Callable[..., Any],
        configurator: Any,
        *,
        sizes: Any,
        token_to_kv_pool: Any,
        token_to_kv_pool_allocator: Any,
        **rest: Any,
    ) -> Any:
        if token_to_kv_pool_allocator is None:
            return runtime.build_allocator(
                size=sizes.max_total_num_tokens,
                dtype=configurator.kv_cache_dtype,
                device=configurator.device,
                kvcache=token_to_kv_pool,
                need_sort=False,  # only PD disaggregation, which is refused, needs sorted pages
            )
        return original(
            configurator,
            sizes=sizes,
            token_to_kv_pool=token_to_kv_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            **rest,
        )

    return build_allocator


PATCH = Patch(
    name="allocator",
    target=(
        "sglang.srt.mem_cache.kv_cache_configurator"
        ".KVCacheConfigurator._build_token_to_kv_pool_allocator"
    ),
    kind="around",
    process="scheduler",
    why="Pages are lent to the allocator and withdrawn from it while it is in use.",
    why_not_milder=(
        "Platform.get_paged_allocator_cls is asked only on out-of-tree platforms; the allocator's "
        "own `resize` forgets every page in use."
    ),
    upstream="sgl-project/sglang#7911 (elastic allocator, closed)",
    remove_when="The allocator class can be chosen by name and can grow and shrink in use.",
    source_sha256="c16331b9b64942dd29cab05c93cb9e4a182abf5052f9a072d217408e075b2588",
    make_hook=make_hook,
)
