from __future__ import annotations

import math

import numpy as np
import pytest

from sglang_morph.quality.metrics import (
    f1,
    first_divergence,
    kl_divergence,
    mean_interval,
    perplexity,
    rouge_l,
    token_agreement,
)


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("The cat sat.", ["a cat sat"], 1.0),  # articles, case and punctuation don't count
        ("cat sat", ["dog ran"], 0.0),
        ("cat cat sat", ["cat sat down"], 2 / 3),  # 2 shared words of 3 and 3: each counts once
        ("the cat", ["dog", "cat"], 1.0),  # the best reference
        ("", [""], 1.0),
        ("", ["cat"], 0.0),
    ],
)
def test_f1(prediction: str, references: list[str], expected: float) -> None:
    assert f1(prediction, references) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        # Lin 2004: "police kill the gunman" against "police killed the gunman": LCS 3 of 4 words.
        ("police kill the gunman", ["police killed the gunman"], 3 / 4),
        ("the gunman kill police", ["police killed the gunman"], 2 / 4),  # order counts
        ("a b c d e f", ["a c e"], 2 * 3 / 9),
        ("nothing shared", ["at all"], 0.0),
        ("nothing", ["at all", "Nothing!"], 1.0),
        ("", ["cat"], 0.0),
    ],
)
def test_rouge_l(prediction: str, references: list[str], expected: float) -> None:
    assert rouge_l(prediction, references) == pytest.approx(expected)


def test_kl_divergence_is_that_of_the_definition() -> None:
    p, q = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert kl_divergence(p, q) == pytest.approx([expected, 0.0])


def test_kl_divergence_ignores_what_cannot_happen() -> None:
    with np.errstate(divide="ignore"):
        p = np.log([0.0, 1.0])
    assert kl_divergence(p, np.log([0.5, 0.5])) == pytest.approx(math.log(2))


def test_perplexity_of_a_fair_coin_is_two() -> None:
    assert perplexity([math.log(2)] * 3) == pytest.approx(2.0)


def test_token_agreement_and_first_divergence() -> None:
    assert token_agreement([1, 2, 9, 4], [1, 2, 3, 4]) == 0.75
    assert first_divergence([1, 2, 9, 4], [1, 2, 3, 4]) == 2
    assert token_agreement([1, 2], [1, 2]) == 1.0
    assert first_divergence([1, 2], [1, 2]) == 2
    assert token_agreement([1], [1, 2]) == 0.5
    assert first_divergence([1], [1, 2]) == 1


def test_the_interval_holds_the_mean_and_narrows_with_more_values() -> None:
    rng = np.random.default_rng(0)
    few, many = (mean_interval(rng.normal(3.0, 1.0, count)) for count in (10, 1000))
    for found in (few, many):
        assert found.low < found.mean < found.high
    assert many.high - many.low < (few.high - few.low) / 3
    assert many.low < 3.0 < many.high


def test_an_interval_of_equal_values_is_a_point() -> None:
    found = mean_interval([2.0] * 5)
    assert (found.low, found.mean, found.high) == (2.0, 2.0, 2.0)
