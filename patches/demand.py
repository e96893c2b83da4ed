"""Demand: what a request asks of precision is checked before it reaches the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import ServerRuntime


def make_hook(runtime: ServerRuntime) -> Callable[..., Any]:
    def before_verify(params: Any, *_: Any, **__: Any) -> None:
        if params.custom_params:
            runtime.check_custom_params(params.custom_params)

    return before_verify


PATCH = Patch(
    name="demand",
    target="sglang.srt.sampling.sampling_params.SamplingParams.verify",
    kind="before",
    process="server",
    why="A demand that is misspelt is answered with 400, not served below what was meant.",
    why_not_milder=(
        "The field of the HTTP body is checked by a middleware, but the same can be asked through "
        "custom_params, which SGLang passes on unread, by HTTP and by Engine."
    ),
    upstream="none found",
    remove_when="Plugins can validate custom_params.",
    source_sha256="8d1fad6b7ca2d29a054dbbc2fd83f0d2e9387c455fce405cdd070e222969b591",
    make_hook=make_hook,
)
