"""Retract: before SGLang throws a running request out, memory may be made by a morph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def check_decode_mem(
        original: Callable[..., bool], batch: Any, selected_indices: Sequence[int] | None = None
    ) -> bool:
        if original(batch, selected_indices):
            return True
        # With indices SGLang asks from inside a retraction: requests are already being dropped.
        if selected_indices is not None or not runtime.relieve(batch):
            return False
        return original(batch, selected_indices)

    return check_decode_mem


PATCH = Patch(
    name="retract",
    target="sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
    kind="around",
    process="scheduler",
    why="A retracted request loses its KV and is computed again; a downshift loses nothing.",
    why_not_milder=(
        "--retraction-policy chooses the victims of a retraction, not whether it happens."
    ),
    upstream="none found",
    remove_when="Retraction asks a plugin for memory first.",
    source_sha256="4a524f91bed9f5d6f1810251600d617f5ad7b9a10b6cc19c9e84ac58a64bdcf3",
    make_hook=make_hook,
)
