"""KV budget: the slabs hold their place in memory although they are not allocated yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def after_profile(available_bytes: int, *_: Any, **__: Any) -> int:
        return runtime.kv_budget(available_bytes)

    return after_profile


PATCH = Patch(
    name="kv_budget",
    target=(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"
    ),
    kind="after",
    process="scheduler",
    why=(
        "SGLang counts free memory as KV cache. The morphable weights wait in host memory at that "
        "moment, so their bytes would be given away twice."
    ),
    why_not_milder=(
        "--mem-fraction-static is a fraction of the whole device, --max-total-tokens a count; "
        "neither can be worked out before the model is loaded."
    ),
    upstream="none found",
    remove_when="SGLang lets a plugin reserve bytes before it sizes the KV cache.",
    source_sha256="c0c03991965e2206485739976c3fed67c095202aacf5876f2446c8e4fcc87a7e",
    make_hook=make_hook,
)
