from __future__ import annotations

import pytest

from benchmarks.layer_profile import agreement, kendall_tau
from sglang_morph.profiling.greedy import Pick
from sglang_morph.profiling.ranking import Ranking, StageRanking


def ranking(layers: list[int]) -> Ranking:
    stage = StageRanking("int8", [Pick(layer, 0.0, 1) for layer in layers], [], [])
    return Ranking([stage], 4, 4.0, 10.0, 1.0)


@pytest.mark.parametrize(
    ("other", "tau"), [([0, 1, 2, 3], 1.0), ([3, 2, 1, 0], -1.0), ([1, 0, 2, 3], 4 / 6)]
)
def test_kendall_tau(other: list[int], tau: float) -> None:
    assert kendall_tau([0, 1, 2, 3], other) == pytest.approx(tau)


def test_agreement_of_every_two_searches() -> None:
    found = {"a": ranking([0, 1, 2, 3]), "b": ranking([1, 2, 0, 3]), "c": ranking([3, 2, 1, 0])}
    rows = agreement(found)
    assert [row["searches"] for row in rows] == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert [row["same_in_first_half"] for row in rows] == [0.5, 0.0, 0.5]
    assert rows[0]["kendall_tau"] == pytest.approx(1 / 3, abs=1e-3)
