"""Weights: right after SGLang has loaded them, before it measures memory for the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def after_load_model(result: Any, model_runner: Any) -> None:
        runtime.adopt_weights(model_runner)

    return after_load_model


PATCH = Patch(
    name="weights",
    target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
    kind="after",
    process="scheduler",
    why="Morphable layers move into memory that can be lent, backed up bit for bit.",
    why_not_milder=(
        "A custom model loader (--load-format) sees one model before quantisation methods have "
        "post-processed it, and would take the place of the user's own load format."
    ),
    upstream="none found",
    remove_when="SGLang offers a callback between loading weights and sizing the KV cache.",
    source_sha256="d2ba5b4a9650562927b3da4178d5ab4e3762e95b053689c24029a33902edb2ae",
    make_hook=make_hook,
)
