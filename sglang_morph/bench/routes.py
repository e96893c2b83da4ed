"""The ways to ask a server for tokens: SGLang's `/generate` and OpenAI's two completion routes.

All take prompts as token ids, so the count is exact. OpenAI's own chat route takes only text, to
which a template adds tokens; SGLang's takes ids besides, which replace both.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

import orjson

from sglang_morph.bench.exposure import take_exposure
from sglang_morph.bench.outcome import Outcome

RouteName = Literal["sglang", "sglang-oai", "sglang-oai-chat"]
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
        take_exposure(meta, outcome)
        outcome.text = event.get("text") or outcome.text


class CompletionsRoute:
    name: ClassVar[RouteName] = "sglang-oai"
    path: ClassVar[str] = "/v1/completions"

    def __init__(self, model: str) -> None:
        self._model = model

    def body(self, input_ids: list[int], output_tokens: int) -> bytes:
        return orjson.dumps(
            {
                **self._prompt(input_ids),
                "model": self._model,
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )

    def take(self, event: dict[str, Any], outcome: Outcome, now_s: float) -> None:
        _raise_error(event)
        texts = [self._text(choice) for choice in event["choices"]]
        outcome.text += "".join(texts)
        if usage := event.get("usage"):
            outcome.arrived(now_s, usage["completion_tokens"])
            outcome.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            outcome.cached_tokens = details.get("cached_tokens") or outcome.cached_tokens
        elif any(texts):
            # A server that sends usage only at the end: one token a chunk, corrected by the last.
            outcome.arrived(now_s, outcome.output_tokens + 1)

    def _prompt(self, input_ids: list[int]) -> dict[str, Any]:
        return {"prompt": input_ids}

    def _text(self, choice: dict[str, Any]) -> str:
        return choice.get("text") or ""


class ChatRoute(CompletionsRoute):
    name: ClassVar[RouteName] = "sglang-oai-chat"
    path: ClassVar[str] = "/v1/chat/completions"

    def _prompt(self, input_ids: list[int]) -> dict[str, Any]:
        # The message is for validation and stop tokens only: `input_ids` are what is computed.
        return {"messages": [{"role": "user", "content": ""}], "input_ids": input_ids}

    def _text(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta") or {}
        return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def _raise_error(event: dict[str, Any]) -> None:
    if error := event.get("error"):
        message = error.get("message", error) if isinstance(error, dict) else error
        raise ValueError(f"server: {message}")


def make_route(name: RouteName, model: str) -> Route:
    """`model` is what an OpenAI request names as its model."""
    if name == "sglang":
        return GenerateRoute()
    return CompletionsRoute(model) if name == "sglang-oai" else ChatRoute(model)
