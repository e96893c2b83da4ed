"""Decode graphs for every level of a plan, over the same addresses.

A graph replays the kernels it was captured with, so each level needs its own: the key carries the
depth. At a depth between two levels, after a restore's step has failed, decoding is eager.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from memory_backends.base import MemoryBackend

logger = logging.getLogger(__name__)


def level_graph_runner(base: type, backend: MemoryBackend, depths: Sequence[int]) -> type:
    """A subclass of SGLang's decode graph runner `base` that captures every one of `depths`.

    Captured ascending, with the real weights of each depth; the backend is at depth 0 afterwards.
    """

    class LevelDecodeCudaGraphRunner(base):
        def _make_graph_key(
            self, size: int, stream_idx: int | None = None, variant_label: str | None = None
        ) -> Any:
            label = variant_label if backend.depth == 0 else f"depth {backend.depth}"
            return super()._make_graph_key(size, stream_idx, label)

        def can_run_graph(self, forward_batch: Any) -> bool:
            # SGLang compares the batch size only: a key that is missing must mean eager.
            return backend.depth in depths and bool(super().can_run_graph(forward_batch))

        def _capture_one_stream(self, stream_idx: int | None = None) -> None:
            for depth in depths:
                if depth > backend.depth:
                    backend.lower(depth)
                logger.info("Capturing decode graphs with %d plan steps applied", depth)
                super()._capture_one_stream(stream_idx)
            backend.prepare(0)
            backend.restore(0)
            torch.cuda.current_stream().synchronize()  # forwards run on another stream

    return LevelDecodeCudaGraphRunner
