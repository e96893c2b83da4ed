"""Follows SGLang's requests from forward to forward and tells each answer its exposure.

Work per decode step: one counter. Per prefill chunk and per end of a request: one small record,
kept on SGLang's request object, so that nothing outlives a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from memory_backends.page_levels import HostNumber, PageLevels
from memory_backends.token_pool import ElasticTokenToKVPoolAllocator
from sglang_morph.controller.exposure import Exposure, StepLevels, by_level
from sglang_morph.precision.demand import FIELD

SETTLE_STEPS = 64
"""Scheduler steps at level 0 between two looks at whether lowered KV is still in use."""


class RequestExposure:
    """`level()` is the precision level now; `ended(req, exposure)` hears of finished requests."""

    def __init__(
        self,
        level: Callable[[], int],
        pages: PageLevels,
        allocator: ElasticTokenToKVPoolAllocator,
        ended: Callable[[Any, Exposure], None],
    ) -> None:
        self._level = level
        self._pages = pages
        self._allocator = allocator
        self._ended = ended
        self._steps = StepLevels()
        self._since_settled = 0
        self.generated: Counter[int] = Counter()
        """Totals over all requests that ended."""
        self.prefilled: Counter[int] = Counter()
        self.reused_lowered = 0

    def launched(self, batch: Any) -> None:
        """The forward of `batch` (a `ScheduleBatch`, fully prepared) starts now."""
        level, mode = self._level(), batch.forward_mode
        if mode.is_decode():
            self._decode(batch.reqs, level)
        elif mode.is_extend():
            self._extend(batch, level)
        else:
            return
        if level or self._pages.any:
            self._pages.computed(batch.out_cache_loc, level)
            if level == 0:
                self._settle()

    def released(self, req: Any) -> None:
        """`req` gave its KV back: it has finished, or was aborted or retracted."""
        exposure: Exposure | None = getattr(req, "morph_exposure", None)
        if exposure is None:
            return
        tokens = len(req.output_ids) if req.finished_len is None else req.finished_len
        exposure.leave(self._steps, tokens)
        if not req.finished():
            return
        exposure.reused_lowered += sum(number.value for number in req.morph_reused)
        req.morph_reused = []
        self.generated.update(exposure.generated)
        self.prefilled.update(exposure.prefilled)
        self.reused_lowered += exposure.reused_lowered
        _answer(req, tokens, exposure)
        self._ended(req, exposure)

    def totals(self) -> dict[str, object]:
        """Of all requests that ended, as JSON values."""
        return {
            "generated_tokens": by_level(self.generated),
            "prefilled_tokens": by_level(self.prefilled),
            "reused_lowered_tokens": self.reused_lowered,
            "lowered_pages_tracked": self._pages.any,
        }

    def _decode(self, reqs: list[Any], level: int) -> None:
        if self._steps.launch(level):
            running = [r.morph_exposure.first_step for r in reqs if hasattr(r, "morph_exposure")]
            self._steps.forget_before(min(running, default=self._steps.steps - 1))

    def _extend(self, batch: Any, level: int) -> None:
        decoding = batch.decoding_reqs or ()
        if decoding:  # they come last in a mixed batch
            self._decode(decoding, level)
        number = len(batch.reqs) - len(decoding)
        lengths = zip(batch.reqs[:number], batch.prefix_lens, batch.extend_lens, strict=False)
        for req, prefix, new in lengths:
            exposure = getattr(req, "morph_exposure", None)
            if exposure is None:
                exposure = req.morph_exposure = Exposure()
                req.morph_reused = []
            if self._pages.any and prefix > exposure.cached:
                reused = req.prefix_indices[exposure.cached : prefix]
                lowered = self._pages.lowered(reused)
                req.morph_reused.append(HostNumber(lowered.sum()))
            exposure.prefill(level, new, self._steps.steps, len(req.output_ids))
            exposure.cached = prefix + new

    def _settle(self) -> None:
        self._since_settled += 1
        if self._since_settled >= SETTLE_STEPS:
            self._since_settled = 0
            allocator = self._allocator
            free = torch.cat((allocator.free_pages, allocator.release_pages))
            self._pages.settle(free, allocator.base_size)


def _answer(req: Any, tokens: int, exposure: Exposure) -> None:
    """Put it where SGLang carries values per output token: at the last one."""
    if not tokens:
        return
    info = req.customized_info or {}
    info[FIELD] = [*[None] * (tokens - 1), exposure.values()]
    req.customized_info = info
