"""The two ways to ask a server for tokens: SGLang's `/generate` and OpenAI's `/v1/completions`.

Both take prompts as token ids, so the count is exact. Chat completions take text and add a
template, so they can't be replayed exactly and are left out.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

import orjson

from sglang_morph.bench.outcome import Outcome

RouteName = Literal["sglang", "sglang-oai"]
"""As `sglang.bench_serving --backend` names them."""


class Route(Protocol):
    name: ClassVar[RouteName]
    path: ClassVar[str]

    def body(self, input_ids: list[int], output_tokens: int) -> bytes:
        """Asks for exactly `output_tokens` tokens, greedily, streamed."""

    def take(self, event: dict[str, Any], outcome: Outcome, now_s: float) -> None:
        """Add a streamed event to `outcome`. Raises ValueError for an error the server sends."""


class GenerateRoute:
    name: ClassVar[RouteName] = "sglang"
    path: ClassVar[str] = "/generate"

    def body(self, input_ids: list[int], output_tokens: int) -> bytes:
        sampling = {"max_new_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
        return orjson.dumps({"input_ids": input_ids, "sampling_params": sampling, "stream": True})

    def take(self, event: dict[str, Any], outcome: Outcome, now_s: float) -> None:
        _raise_error(event)
        meta = event["meta_info"]
        reason = meta.get("finish_reason")
        if reason and reason["type"] == "abort":
            raise ValueError(f"aborted: {reason.get('message', 'no reason given')}")
        outcome.arrived(now_s, meta["completion_tokens"])
        outcome.prompt_tokens = meta["prompt_tokens"]
        outcome.cached_tokens = meta.get("cached_tokens") or 0
        outcome.retractions = meta.get("num_retractions") or 0
        outcome.queue_s = meta.get("queue_time", outcome.queue_s)
        outcome.text = event.get("text") or outcome.text


class CompletionsRoute:
    name: ClassVar[RouteName] = "sglang-oai"
    path: ClassVar[str] = "/v1/completions"

    def __init__(self, model: str) -> None:
        self._model = model

    def body(self, input_ids: list[int], output_tokens: int) -> bytes:
        return orjson.dumps(
            {
                "model": self._model,
                "prompt": input_ids,
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )

    def take(self, event: dict[str, Any], outcome: Outcome, now_s: float) -> None:
        _raise_error(event)
        for choice in event["choices"]:
            outcome.text += choice.get("text") or ""
        if usage := event.get("usage"):
            outcome.arrived(now_s, usage["completion_tokens"])
            outcome.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            outcome.cached_tokens = details.get("cached_tokens") or outcome.cached_tokens
        elif any(choice.get("text") for choice in event["choices"]):
            # A server that sends usage only at the end: one token a chunk, corrected by the last.
            outcome.arrived(now_s, outcome.output_tokens + 1)


def _raise_error(event: dict[str, Any]) -> None:
    if error := event.get("error"):
        message = error.get("message", error) if isinstance(error, dict) else error
        raise ValueError(f"server: {message}")


def make_route(name: RouteName, model: str) -> Route:
    """`model` is what an OpenAI request names as its model."""
    return GenerateRoute() if name == "sglang" else CompletionsRoute(model)
