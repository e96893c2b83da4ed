"""CUDA graphs: decode graphs for every precision level; prefill graphs at level 0 only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_decode_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def after_runner_class(runner_class: type, *_: Any) -> type:
        return runtime.decode_graph_runner(runner_class)

    return after_runner_class


def make_prefill_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def can_run_graph(original: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
        return runtime.at_full_precision() and original(runner, forward_batch)

    return can_run_graph


DECODE = Patch(
    name="decode_graphs",
    target="sglang.srt.model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls",
    kind="after",
    process="scheduler",
    why="A graph replays the kernels of the precision it was captured with.",
    why_not_milder=(
        "The method is made to be overridden in a subclass of ModelRunner, but SGLang offers no "
        "way to name such a subclass."
    ),
    upstream="none found",
    remove_when="The runner class can be named, as the radix cache backend can.",
    source_sha256="d67907dd61130217940826629f296d0cdff858cbb555aad7a95239e4b950f352",
    make_hook=make_decode_hook,
)

PREFILL = Patch(
    name="prefill_graphs",
    target=(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
        ".PrefillCudaGraphRunner.can_run_graph"
    ),
    kind="around",
    process="scheduler",
    why="Prefill graphs are captured at full precision and have no variants per level.",
    why_not_milder="Disabling prefill graphs altogether would slow full precision down.",
    upstream="none found",
    remove_when="Prefill graphs can be captured per level.",
    source_sha256="170e64658202e274c1e45e46d357f6f66703a9977061ab912adf2708960d6fd1",
    make_hook=make_prefill_hook,
)

PATCHES = (DECODE, PREFILL)
