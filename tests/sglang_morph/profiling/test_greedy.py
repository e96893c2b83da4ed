from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_morph.profiling.greedy import greedy_order, neighbours

STEADY = settings(deadline=None, derandomize=True)


class Table:
    """Harms by (set of chosen layers, layer); floors not above any of them."""

    def __init__(self, harms: dict[tuple[frozenset[int], int], float], slack: Sequence[float]):
        self._harms = harms
        self._slack = slack
        self.asked = 0

    def floor(self, layer: int) -> float:
        least = min(harm for (_, one), harm in self._harms.items() if one == layer)
        return least - self._slack[layer]

    def harms(self, chosen: Sequence[int], layers: Sequence[int]) -> list[float]:
        self.asked += len(layers)
        return [self._harms[frozenset(chosen), layer] for layer in layers]


@st.composite
def tables(draw: st.DrawFn, rising: bool = False) -> Table:
    """`rising`: a layer's harm never falls as more is chosen. Small integers make ties likely."""
    count = draw(st.integers(1, 5))
    harms: dict[tuple[frozenset[int], int], float] = {}
    for size in range(count):
        for chosen in map(frozenset, itertools.combinations(range(count), size)):
            for layer in set(range(count)) - chosen:
                least = max((harms[chosen - {x}, layer] for x in chosen), default=0)
                harms[chosen, layer] = draw(st.integers(0, 6)) + (least if rising else 0)
    return Table(harms, draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))


def brute_force(table: Table, count: int) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < count:
        remaining = [layer for layer in range(count) if layer not in chosen]
        chosen.append(min(remaining, key=lambda x: (table.harms(chosen, [x])[0], x)))
    return chosen


def layers_of(table: Table) -> range:
    return range(len(table._slack))


@STEADY
@given(tables(), st.integers(1, 3))
def test_exact_is_the_plain_greedy_order(table: Table, batch: int) -> None:
    layers = layers_of(table)
    expected = brute_force(table, len(layers))
    picks = greedy_order(layers, table, batch=batch)
    assert [pick.layer for pick in picks] == expected


@STEADY
@given(tables(rising=True))
def test_lazy_is_exact_where_harm_never_falls(table: Table) -> None:
    layers = layers_of(table)
    expected = brute_force(table, len(layers))
    assert [pick.layer for pick in greedy_order(layers, table, lazy=True)] == expected


def test_floors_save_measurements() -> None:
    harms = {
        (frozenset(chosen), layer): float(layer)
        for size in range(4)
        for chosen in itertools.combinations(range(4), size)
        for layer in set(range(4)) - set(chosen)
    }
    table = Table(harms, [0.5] * 4)
    assert [pick.measured for pick in greedy_order(range(4), table)] == [1, 1, 1, 1]
    assert table.asked == 4


@STEADY
@given(tables())
def test_a_contiguous_order_is_a_growing_block(table: Table) -> None:
    order = [p.layer for p in greedy_order(layers_of(table), table, candidates=neighbours)]
    for end in range(1, len(order) + 1):
        block = sorted(order[:end])
        assert block == list(range(block[0], block[0] + end))


def test_equal_harms_go_by_position() -> None:
    harms = {
        (frozenset(chosen), layer): 1.0
        for size in range(3)
        for chosen in itertools.combinations(range(3), size)
        for layer in set(range(3)) - set(chosen)
    }
    assert [p.layer for p in greedy_order([2, 0, 1], Table(harms, [0, 0, 0]))] == [2, 0, 1]


def test_a_pick_is_told_as_it_is_made() -> None:
    told: list[int] = []
    table = Table({(frozenset(), 0): 2.0}, [0])
    [pick] = greedy_order([0], table, on_pick=lambda pick: told.append(pick.layer))
    assert (told, pick.harm) == ([0], pytest.approx(2.0))
