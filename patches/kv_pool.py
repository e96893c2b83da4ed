"""KV pool: SGLang's MHA pool over page-major memory that the backend owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def build_pool(
        original: Callable[..., Any],
        configurator: Any,
        *,
        max_total_num_tokens: int,
        mha_pool_class: type,  # SGLang's choice; the elastic pool takes its place
        quant_method: Any = None,
    ) -> Any:
        return original(
            configurator,
            max_total_num_tokens=max_total_num_tokens,
            mha_pool_class=runtime.kv_pool_class(configurator, max_total_num_tokens),
            quant_method=quant_method,
        )

    return build_pool


PATCH = Patch(
    name="kv_pool",
    target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
    kind="around",
    process="scheduler",
    why="KV pages must lie in one address range with the slabs, so that lent bytes are pages.",
    why_not_milder=(
        "Platform.get_mha_kv_pool_cls is asked only on out-of-tree platforms, which changes the "
        "attention default, operator dispatch and memory queries as well."
    ),
    upstream="sgl-project/sglang#7911 (elastic KV pool, closed), #37797 (VMM-backed pool, open)",
    remove_when="The KV pool class can be chosen by name, as the radix cache backend can.",
    source_sha256="f370814b8b8f259fffabfefbb2af4b9fb804659a836ce8f88074bb7e62a99b68",
    make_hook=make_hook,
)
