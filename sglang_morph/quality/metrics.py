"""What answers and next-token distributions are measured by. Numpy only."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]

RESAMPLES = 10_000
CONFIDENCE = 0.95

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over units that are independent of each other, and its bootstrap interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float] | Floats, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean; `values` is one number a unit (block, prompt)."""
    numbers = np.asarray(values, dtype=float)
    draws = np.random.default_rng(seed).choice(numbers, size=(RESAMPLES, len(numbers)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(draws.mean(axis=1), [tail, 100 - tail])
    return Interval(float(numbers.mean()), float(low), float(high))


def perplexity(losses: Sequence[float] | Floats) -> float:
    """Of negative log-likelihoods in nats."""
    return float(np.exp(np.mean(losses)))


def kl_divergence(log_p: Floats, log_q: Floats) -> Floats:
    """KL(p || q) in nats over the last axis, of log-probabilities; `[..., V]` to `[...]`."""
    # A log-probability of minus infinity where p is 0 contributes nothing, not NaN.
    with np.errstate(invalid="ignore"):
        terms = np.where(log_p == -np.inf, 0.0, np.exp(log_p) * (log_p - log_q))
    return np.asarray(terms.sum(axis=-1, dtype=np.float64))


def token_agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Share of positions with the same token; a position only one of them has is none."""
    longest = max(len(tokens), len(reference))
    same = sum(a == b for a, b in zip(tokens, reference, strict=False))
    return same / longest if longest else 1.0


def first_divergence(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens before the first that differs; the reference's length where none does."""
    for position, (a, b) in enumerate(zip(tokens, reference, strict=False)):
        if a != b:
            return position
    return min(len(tokens), len(reference))


def f1(prediction: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, of the best reference (as SQuAD's).

    Case, punctuation and English articles don't count. Where one side has no words, 1 if neither
    has, else 0.
    """
    return max(_f1(_answer_words(prediction), _answer_words(one)) for one in references)


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words, of the best reference.

    Words are runs of letters and digits in lower case, neither stemmed nor split in sentences.
    """
    return max(_rouge_l(_words(prediction), _words(one)) for one in references)


def _answer_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    shared = sum((Counter(prediction) & Counter(reference)).values())
    return _harmonic(shared, len(prediction), len(reference))


def _rouge_l(prediction: Sequence[str], reference: Sequence[str]) -> float:
    return _harmonic(_common_subsequence(prediction, reference), len(prediction), len(reference))


def _harmonic(shared: int, predicted: int, wanted: int) -> float:
    """2PR / (P + R) with P = shared / predicted and R = shared / wanted."""
    if not predicted and not wanted:
        return 1.0
    return 2 * shared / (predicted + wanted)


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest one."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for column, other in enumerate(second, start=1):
            above = row[column]
            row[column] = diagonal + 1 if word == other else max(above, row[column - 1])
            diagonal = above
    return row[-1]
