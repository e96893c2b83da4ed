"""Lent pages must not let SGLang plan more than its buffers, made at start, can hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_morph.controller.capacity import bound_prefill_batches


@pytest.mark.parametrize(
    ("chunk", "most", "bounded"), [(None, 16_384, 1024), (None, 512, 512), (256, 16_384, 16_384)]
)
def test_a_batch_of_whole_prompts_is_bounded_by_the_cache_at_start(
    chunk: int | None, most: int, bounded: int
) -> None:
    scheduler = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=most)
    bound_prefill_batches(scheduler, 1024)  # type: ignore[arg-type]
    assert scheduler.max_prefill_tokens == bounded
