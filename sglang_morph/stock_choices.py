"""Sizes that SGLang chooses by the memory of the GPU."""

from __future__ import annotations

CHOICES_BELOW_GIB = (
    (20, 2048, 8),
    (35, 2048, 24),
    (60, 4096, 32),
    (160, 8192, 256),
    (float("inf"), 16384, 512),
)
"""SGLang 0.5.17's prefill chunk and largest decode graph (tensor parallel below 4), by memory."""


def stock_choices(memory_gib: float) -> tuple[int, int]:
    """Prefill chunk and largest decode graph that SGLang chooses on a GPU of that size."""
    return next((chunk, graph) for below, chunk, graph in CHOICES_BELOW_GIB if memory_gib < below)
