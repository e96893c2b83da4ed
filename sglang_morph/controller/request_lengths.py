"""Lets in prompts that the KV cache has no room for at full precision, where it has at a lower one.

SGLang's limits per request follow from the KV cache it starts with. For everybody whose prompt
keeps them they stay: an output of unknown length must not ask for more memory than the request
turns out to use. A longer prompt is measured by the deepest level that it may count on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_KEPT_FREE = 5
"""SGLang's own distance between the longest request and the longest prompt, in tokens."""


class RequestLengths:
    """Widens the scheduler's limits while it takes in a long prompt."""

    def __init__(
        self, scheduler: Any, level_pages: Sequence[int], reach: Callable[[Any], int]
    ) -> None:
        """`reach(request)`: the deepest level that the request may count on."""
        self._scheduler = scheduler
        self._level_pages = level_pages
        self._reach = reach

    @contextmanager
    def taking_in(self, request: Any) -> Iterator[None]:
        """While SGLang checks and queues `request`, a `TokenizedGenerateReqInput`."""
        scheduler = self._scheduler
        pages = self._pages_for(request)
        longest = min(scheduler.model_config.context_len - 1, pages - 1)
        if longest <= scheduler.max_req_len:
            yield
            return
        usual = (
            scheduler.max_total_num_tokens,
            scheduler.max_req_len,
            scheduler.max_req_input_len,
        )
        self._set(pages, longest, longest - _KEPT_FREE)
        try:
            yield
        finally:
            self._set(*usual)

    def _pages_for(self, request: Any) -> int:
        """That `request` may count on: more than there are at level 0 for a long prompt only."""
        scheduler, prompt = self._scheduler, request.input_ids
        if prompt is None or len(prompt) < scheduler.max_req_input_len:
            return self._level_pages[0]
        # Without chunks a prompt must fit SGLang's input buffers, which are as long as at start.
        whole = scheduler.chunked_prefill_size is None
        return self._level_pages[0 if whole else self._reach(request)]

    def _set(self, tokens: int, request: int, prompt: int) -> None:
        scheduler = self._scheduler
        scheduler.max_total_num_tokens = tokens
        scheduler.max_req_len = request
        scheduler.max_req_input_len = prompt
