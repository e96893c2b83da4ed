"""Admission: a request that asks for more precision than there is waits in SGLang's queue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def add_one_req(
        original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return runtime.admit(partial(original, adder, req, *args, **kwargs), adder, req)

    return add_one_req


PATCH = Patch(
    name="admission",
    target="sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
    kind="around",
    process="scheduler",
    why="A request with a floor may not be computed below the precision it asks for.",
    why_not_milder=(
        "Priorities order the queue but do not hold a request back. Keeping it outside the queue "
        "would hide it from aborts, time limits and reports."
    ),
    upstream="none found",
    remove_when="Plugins can say of a waiting request that it must not be scheduled yet.",
    source_sha256="0e0643fee8c7348d9b60b98f3a7a9a5dca75fa93d168cee6caa7dae1cf194e93",
    make_hook=make_hook,
)
