"""Lengths: a prompt too long for the KV cache at full precision is taken in if a level has room."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def handle_generate_request(
        original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return runtime.take_in(partial(original, scheduler, request, *args, **kwargs), request)

    return handle_generate_request


PATCH = Patch(
    name="request_lengths",
    target="sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
    kind="around",
    process="scheduler",
    why="A request that fits the KV cache once precision falls must not be refused for its length.",
    why_not_milder=(
        "The limits are plain numbers of the scheduler. Raised for good they would also let a "
        "request of unknown length ask for all the memory there is."
    ),
    upstream="none found",
    remove_when="The scheduler asks the allocator how long a request may be.",
    source_sha256="f0610d799ae778e19c7d620485396626ad1677c7da3b4894e375c3f27d8f1d60",
    make_hook=make_hook,
)
