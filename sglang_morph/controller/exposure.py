"""At which precision level a request's tokens were computed. Plain Python: no torch, no SGLang.

A token belongs to the level at which its forward was launched. A decode step computes one token of
every request that runs, so steps are numbered and the level is kept per run of steps, not per
token: what a request met is looked up once, when it ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypedDict


class StepLevels:
    """The levels of all decode steps, as runs of equal level."""

    def __init__(self) -> None:
        self.steps = 0
        """Number of the next decode step."""
        self._starts = [0]
        self._levels = [0]

    def launch(self, level: int) -> bool:
        """A decode step is launched at `level`; whether that differs from the step before."""
        changed = level != self._levels[-1]
        if changed:
            if self._starts[-1] == self.steps:  # only before the first step of all
                self._levels[-1] = level
            else:
                self._starts.append(self.steps)
                self._levels.append(level)
        self.steps += 1
        return changed

    def forget_before(self, step: int) -> None:
        """No step before `step` will be asked for again."""
        first = bisect_right(self._starts, step) - 1
        del self._starts[:first], self._levels[:first]

    def add_to(self, counts: Counter[int], first: int, number: int) -> None:
        """Add `number` steps, from step `first` on, to `counts` by level."""
        if number <= 0:
            return
        stop = first + number
        run = bisect_right(self._starts, first) - 1
        while first < stop:
            last = run + 1 == len(self._starts)
            end = stop if last else min(stop, self._starts[run + 1])
            counts[self._levels[run]] += end - first
            first, run = end, run + 1


class Exposure:
    """Tokens of one request by level. It ends a *stay* (from admission on) by `leave`."""

    __slots__ = (
        "_first_level",
        "_first_step",
        "_tokens_before",
        "cached",
        "generated",
        "prefilled",
        "reused_lowered",
    )

    def __init__(self) -> None:
        self.generated: Counter[int] = Counter()
        """Output tokens by the level of the forward that computed them."""
        self.prefilled: Counter[int] = Counter()
        """Prompt tokens computed; after a retraction they are computed and count again."""
        self.reused_lowered = 0
        """Prompt tokens taken from the cache whose KV was computed below full precision."""
        self.cached = 0
        """How much of the sequence has KV in this stay: prefix and chunks launched so far."""
        self._first_level = 0
        self._first_step = 0
        self._tokens_before: int | None = None

    def prefill(self, level: int, tokens: int, next_step: int, output_tokens: int) -> None:
        """A chunk is launched; the last one brings an output token, and decode steps follow it.

        `next_step` is the number of the first decode step that can follow, `output_tokens` what
        the request has at that moment.
        """
        self.prefilled[level] += tokens
        self._first_level, self._first_step = level, next_step
        if output_tokens < self.generated.total():
            self.generated.clear()  # SGLang threw them away to compute them anew
        self._tokens_before = output_tokens

    def leave(self, steps: StepLevels, output_tokens: int) -> None:
        """The request ends or is retracted with `output_tokens` of output. Twice counts once."""
        if self._tokens_before is None:
            return
        new = output_tokens - self._tokens_before
        if new > 0:
            self.generated[self._first_level] += 1
            steps.add_to(self.generated, self._first_step, new - 1)
        self._tokens_before = None
        self.cached = 0

    @property
    def first_step(self) -> int:
        """The first decode step of this stay."""
        return self._first_step

    def lowest_level(self) -> int:
        """The level furthest from full precision at which any token was computed."""
        return max((*self.generated, *self.prefilled), default=0)

    def values(self) -> ExposureValues:
        return {
            "generated_tokens": by_level(self.generated),
            "prefilled_tokens": by_level(self.prefilled),
            "reused_lowered_tokens": self.reused_lowered,
        }


class ExposureValues(TypedDict):
    """What an answer tells: tokens by level (JSON's keys are strings), and a number of tokens."""

    generated_tokens: dict[str, int]
    prefilled_tokens: dict[str, int]
    reused_lowered_tokens: int


def by_level(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(level): number for level, number in sorted(counts.items()) if number}


def add_exposures(exposures: Sequence[ExposureValues]) -> ExposureValues:
    """The sum over the choices of one response."""
    generated: Counter[str] = Counter()
    prefilled: Counter[str] = Counter()
    for exposure in exposures:
        generated.update(exposure["generated_tokens"])
        prefilled.update(exposure["prefilled_tokens"])
    return {
        "generated_tokens": dict(sorted(generated.items())),
        "prefilled_tokens": dict(sorted(prefilled.items())),
        "reused_lowered_tokens": sum(e["reused_lowered_tokens"] for e in exposures),
    }
