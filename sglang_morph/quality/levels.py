"""Examines the levels of plans: throughout a response, and with a change in its middle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_morph.precision.names import FULL
from sglang_morph.precision.plan import PrecisionPlan
from sglang_morph.quality.generation import Tokens, continue_greedily, switch_in_the_middle
from sglang_morph.quality.lowered import LayerVariants, LoweredModel
from sglang_morph.quality.metrics import f1, first_divergence, rouge_l, token_agreement
from sglang_morph.quality.on_text import TextMeter
from sglang_morph.quality.prompts import ReferencePrompt, encode
from sglang_morph.quality.results import (
    FULL_FIRST,
    FULL_LAST,
    THROUGHOUT,
    AnswerResult,
    ContinuationResult,
    LevelResult,
    TextResult,
)

FreedBytes = Callable[[LayerVariants], int]
"""What an assignment's weights are smaller by than at full precision."""


@dataclass(frozen=True, slots=True)
class Material:
    """What levels are examined with."""

    blocks: Sequence[Sequence[int]]
    """`[B, T]` tokens of the evaluation text; the first half of each is continued, too."""
    continued_tokens: int
    """Length of the continuations."""
    prompts: Sequence[ReferencePrompt]
    """At least one."""
    prompt_tokens: int
    """Longest text of a prompt; a longer one loses its middle."""
    answer_tokens: int
    """Most tokens of an answer."""


@dataclass(frozen=True, slots=True)
class _Task:
    """Prompts to respond to."""

    prompts: Sequence[Sequence[int]]
    limit: int
    end_tokens: frozenset[int]

    def respond(self, lowered: LoweredModel, variants: LayerVariants) -> list[Tokens]:
        return continue_greedily(
            lowered,
            self.prompts,
            [self.limit] * len(self.prompts),
            variants,
            variants,
            self.end_tokens,
        )

    def switch(
        self,
        lowered: LoweredModel,
        responses: Sequence[Tokens],
        before: LayerVariants,
        after: LayerVariants,
    ) -> list[Tokens]:
        return switch_in_the_middle(
            lowered, self.prompts, responses, self.limit, before, after, self.end_tokens
        )


class Examiner:
    """Measures one assignment of variants after the other, all against full precision."""

    def __init__(self, lowered: LoweredModel, tokenizer: Any, material: Material) -> None:
        """`tokenizer`: of transformers. Full precision is measured right here."""
        self._lowered = lowered
        self._tokenizer = tokenizer
        self._prompts = material.prompts
        openings = [block[: len(block) // 2] for block in material.blocks]
        self._continuing = _Task(openings, material.continued_tokens, frozenset())
        self._answering = _Task(
            encode(tokenizer, material.prompts, material.prompt_tokens),
            material.answer_tokens,
            _end_tokens(lowered.model.hf.generation_config),
        )
        self._meter = TextMeter(lowered, material.blocks)
        self._continuations = self._continuing.respond(lowered, lowered.full)
        self._answers = self._answering.respond(lowered, lowered.full)

    def text(self, variants: LayerVariants) -> TextResult:
        scores = self._meter.measure(variants)
        return TextResult(
            loss=scores.losses.mean(axis=1).tolist(),
            kl=scores.kl.mean(axis=1).tolist(),
            same_top=scores.same_top.mean(axis=1).tolist(),
        )

    def continuations(self, variants: LayerVariants) -> ContinuationResult:
        return self._compare(self._continuing.respond(self._lowered, variants))

    def full(self, plan: str) -> LevelResult:
        """Level 0 of `plan`, or of any other."""
        full = self._lowered.full
        return LevelResult(
            plan,
            0,
            THROUGHOUT,
            {},
            0,
            self.text(full),
            self._compare(self._continuations),
            self._score(self._answers),
        )

    def examine(
        self, name: str, plan: PrecisionPlan, level: int, freed_bytes: FreedBytes
    ) -> list[LevelResult]:
        """`level` throughout, full precision before it, and full precision after it."""
        lowered, full, low = self._lowered, self._lowered.full, plan.layer_variants(level)
        text = self.text(low)
        continuations = self._continuing.respond(lowered, low)
        answers = self._answering.respond(lowered, low)
        layers = dict(Counter(variant for variant in low if variant != FULL))

        def result(
            served: str, text: TextResult | None, going_on: list[Tokens], answers: list[Tokens]
        ) -> LevelResult:
            compared, scored = self._compare(going_on), self._score(answers)
            freed = freed_bytes(low)
            return LevelResult(name, level, served, layers, freed, text, compared, scored)

        return [
            result(THROUGHOUT, text, continuations, answers),
            result(
                FULL_FIRST,
                None,
                self._continuing.switch(lowered, self._continuations, full, low),
                self._answering.switch(lowered, self._answers, full, low),
            ),
            result(
                FULL_LAST,
                None,
                self._continuing.switch(lowered, continuations, low, full),
                self._answering.switch(lowered, answers, low, full),
            ),
        ]

    def _compare(self, continuations: Sequence[Tokens]) -> ContinuationResult:
        pairs = list(zip(continuations, self._continuations, strict=True))
        return ContinuationResult(
            agreement=[token_agreement(tokens, full) for tokens, full in pairs],
            first_divergence=[first_divergence(tokens, full) for tokens, full in pairs],
        )

    def _score(self, responses: Sequence[Tokens]) -> AnswerResult:
        answers = [self._tokenizer.decode(r, skip_special_tokens=True).strip() for r in responses]
        pairs = [(a, p.answers) for a, p in zip(answers, self._prompts, strict=True)]
        return AnswerResult(
            f1=[f1(answer, references) for answer, references in pairs],
            rouge_l=[rouge_l(answer, references) for answer, references in pairs],
            answers=answers,
        )


def _end_tokens(generation_config: Any) -> frozenset[int]:
    found = generation_config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
