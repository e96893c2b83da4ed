"""What a quality run found, as it is written to JSON. Numbers stay by block or prompt, because
levels are compared on the same blocks and prompts."""

from __future__ import annotations

from typing import Any

import msgspec

THROUGHOUT = "throughout"
FULL_FIRST = "full, then the level"
FULL_LAST = "the level, then full"


class TextResult(msgspec.Struct, frozen=True):
    """Means over the predicted positions of each block of the text."""

    loss: list[float]
    """Negative log-likelihood, nats."""
    kl: list[float]
    """KL(full || level) of the next-token distributions, nats."""
    same_top: list[float]
    """Share of positions whose likeliest token is full precision's."""


class ContinuationResult(msgspec.Struct, frozen=True):
    """By prompt: greedy continuations against those of full precision."""

    agreement: list[float]
    first_divergence: list[int]
    """Tokens before the first that differs."""


class AnswerResult(msgspec.Struct, frozen=True):
    """By prompt: greedy answers against the references."""

    f1: list[float]
    rouge_l: list[float]
    answers: list[str]


class LevelResult(msgspec.Struct, frozen=True):
    """A level of one plan, or a response in the middle of which the level changes."""

    plan: str
    level: int
    served: str
    """`THROUGHOUT`, or with a change in the middle: `FULL_FIRST` or `FULL_LAST`."""
    layers: dict[str, int]
    """Variant -> decoder layers in it, at that level."""
    freed_bytes: int
    """By the weights' sizes alone, not in whole KV pages."""
    text: TextResult | None
    """None where the level changes: the text is read at once."""
    continuations: ContinuationResult
    answers: AnswerResult


class Settings(msgspec.Struct, frozen=True):
    """What was measured on."""

    text: dict[str, Any]
    """Origin of the evaluation text, see `TextOrigin`."""
    prompts: str
    """Origin of the prompts with references."""
    blocks: int
    block_tokens: int
    continued_tokens: int
    """Length of the greedy continuations."""
    answer_tokens: int
    seed: int


class QualityReport(msgspec.Struct, frozen=True):
    model: str
    model_digest: str
    """Of its shape, see `ModelIdentity`."""
    settings: Settings
    plans: dict[str, str]
    """Name -> SHA-256 of the plan."""
    provenance: dict[str, str]
    results: list[LevelResult]
    """Full precision first: level 0 of the first plan."""
