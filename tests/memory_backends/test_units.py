"""The units' state machine: the table, every transition of it, and random histories."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memory_backends.units import (
    HOME_BACKED,
    HOME_FREE,
    KV_AVAIL,
    KV_FREE,
    KV_FULL,
    TRANSITIONS,
    Condition,
    Event,
    PageCount,
    UnitError,
    UnitState,
    UnitTable,
)

CONDITIONS = (HOME_BACKED, HOME_FREE, KV_FREE, KV_AVAIL, KV_FULL)
PAGES = 4


def bring_to(table: UnitTable, unit: int, condition: Condition) -> None:
    if condition == HOME_BACKED:
        table.uploaded([unit])
    elif condition != HOME_FREE:
        table.lend([unit])
        used = {KV_FREE: 0, KV_AVAIL: 1, KV_FULL: PAGES}[condition]
        table.use({unit: PageCount(used, PAGES)})


def happen(table: UnitTable, event: Event, unit: int) -> None:
    uses = {Event.USE_NONE: 0, Event.USE_SOME: 1, Event.USE_ALL: PAGES}
    if event in uses:
        table.use({unit: PageCount(uses[event], PAGES)})
    else:
        moves = {
            Event.LEND: table.lend,
            Event.TAKE_BACK: table.take_back,
            Event.UPLOAD: table.uploaded,
        }
        moves[event]([unit])


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("event", Event)
def test_an_event_follows_the_table_or_is_refused(event: Event, condition: Condition) -> None:
    table = UnitTable(2)
    bring_to(table, 1, condition)
    assert table[1].condition == condition
    before = table[1]
    if condition in TRANSITIONS[event]:
        happen(table, event, 1)
        assert table[1].condition == TRANSITIONS[event][condition]
    else:
        with pytest.raises(UnitError, match=f"^{event.value}: not possible for unit 1") as caught:
            happen(table, event, 1)
        assert "\n" not in str(caught.value)
        assert table[1] == before
    assert table[0].condition == HOME_FREE


def test_the_table_says_what_dps_says() -> None:
    leaves_kv = {c for c in (KV_FREE, KV_AVAIL, KV_FULL) if c in TRANSITIONS[Event.TAKE_BACK]}
    assert leaves_kv == {KV_FREE}, "memory with a page in use never moves"
    assert set(TRANSITIONS[Event.UPLOAD]) == {HOME_FREE}, "a stale residual is not written"
    for event, row in TRANSITIONS.items():
        for before, after in row.items():
            assert before in CONDITIONS and after in CONDITIONS
            if event not in (Event.LEND, Event.TAKE_BACK):
                assert (before.home is UnitState.STALE) == (after.home is UnitState.STALE)


def test_a_bad_unit_among_good_ones_changes_nothing() -> None:
    table = UnitTable(4)
    table.lend([2])
    table.use({2: PageCount(1, PAGES)})
    before = [table[i] for i in range(4)]
    for change in (
        lambda: table.lend([0, 2]),
        lambda: table.lend([0, 0]),
        lambda: table.lend([0, 4]),
        lambda: table.lend([-1]),
        lambda: table.take_back([2]),
        lambda: table.uploaded([0, 2]),
        lambda: table.use({2: PageCount(0, PAGES), 1: PageCount(0, PAGES)}),
        lambda: table.use({2: PageCount(5, PAGES)}),
    ):
        with pytest.raises(UnitError):
            change()
        assert [table[i] for i in range(4)] == before


def test_allocation_order_is_avail_free_backed() -> None:
    table = UnitTable(6)
    table.uploaded([0, 1])
    table.lend([5, 4, 3])  # slots 0, 1, 2
    table.use({5: PageCount(4, 4), 3: PageCount(2, 4)})
    assert table.allocation_order() == [3, 4, 2, 0, 1]
    assert table.counts() == {
        UnitState.BACKED: 2,
        UnitState.FREE: 2,
        UnitState.AVAIL: 1,
        UnitState.FULL: 1,
        UnitState.STALE: 3,
    }


def test_lent_units_fill_the_lowest_slots() -> None:
    table = UnitTable(5)
    table.lend([4, 0, 2])
    assert table.at_slots([0, 1, 2]) == [4, 0, 2]
    table.take_back([0])
    assert table.lent_slots() == [0, 2]
    with pytest.raises(UnitError, match="slots \\[1\\]"):
        table.at_slots([0, 1])
    table.lend([1, 0])
    assert table.at_slots([0, 1, 2, 3]) == [4, 1, 2, 0]


def test_the_restorer_is_told_of_free_units_whose_residual_is_wanted() -> None:
    told: list[int] = []
    table = UnitTable(4, told.append)
    table.lend([0, 1, 2])
    table.use({0: PageCount(1, 4), 1: PageCount(4, 4)})
    assert told == [], "nothing is wanted yet"
    table.want([0, 2, 3])
    assert told == [2], "FREE already; 3 is at home, 0 is in use"
    table.use({0: PageCount(0, 4), 1: PageCount(0, 4)})
    assert told == [2, 0]
    table.take_back([0])
    table.lend([0])
    assert told == [2, 0], "taken back: not wanted any more"
    table.use({2: PageCount(3, 4)})
    table.unwant([2])
    table.use({2: PageCount(0, 4)})
    assert told == [2, 0]


def test_the_restorer_may_take_units_back_when_told() -> None:
    table = UnitTable(3, lambda _: table.take_back([0, 1]))
    table.lend([0, 1, 2])
    table.use({u: PageCount(1, 4) for u in range(3)})
    table.want([0, 1])
    table.use({u: PageCount(0, 4) for u in range(3)})
    assert [table[u].condition for u in range(3)] == [HOME_FREE, HOME_FREE, KV_FREE]


COUNT = 6
some_units = st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=COUNT, unique=True)


class Histories(RuleBasedStateMachine):
    """Any order of calls, allowed or not, beside a model that keeps places and use by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []
        self.table = UnitTable(COUNT, self.told.append)
        self.slot: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.valid: set[int] = set()
        self.wanted: set[int] = set()

    def attempt(self, allowed: bool, call: Any, *arguments: Any) -> bool:
        if allowed:
            call(*arguments)
        else:
            with pytest.raises(UnitError):
                call(*arguments)
        return allowed

    @rule(units=some_units)
    def lend(self, units: list[int]) -> None:
        free = [s for s in range(COUNT) if s not in self.slot.values()]
        if self.attempt(not any(u in self.slot for u in units), self.table.lend, units):
            self.slot |= dict(zip(units, free, strict=False))
            self.used |= dict.fromkeys(units, 0)
            self.valid -= set(units)

    @rule(units=some_units)
    def take_back(self, units: list[int]) -> None:
        allowed = all(self.used.get(u, 1) == 0 for u in units)
        if self.attempt(allowed, self.table.take_back, units):
            for u in units:
                del self.slot[u], self.used[u]
            self.wanted -= set(units)

    @rule(units=some_units)
    def upload(self, units: list[int]) -> None:
        allowed = not any(u in self.slot or u in self.valid for u in units)
        if self.attempt(allowed, self.table.uploaded, units):
            self.valid |= set(units)

    @precondition(lambda self: self.slot)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        units = data.draw(st.lists(st.sampled_from(sorted(self.slot)), min_size=1, unique=True))
        used = {u: data.draw(st.integers(0, PAGES)) for u in units}
        self.told.clear()
        self.table.use({u: PageCount(n, PAGES) for u, n in used.items()})
        self.used |= used
        assert self.told == [u for u in units if used[u] == 0 and u in self.wanted]

    @rule(units=some_units)
    def want(self, units: list[int]) -> None:
        self.told.clear()
        self.table.want(units)
        self.wanted |= set(units) & set(self.slot)
        assert self.told == [u for u in units if self.used.get(u) == 0]

    @rule(units=some_units)
    def unwant(self, units: list[int]) -> None:
        self.table.unwant(units)
        self.wanted -= set(units)

    @invariant()
    def every_unit_is_in_one_place(self) -> None:
        lent = self.table.lent_slots()
        assert lent == sorted(self.slot.values())
        assert len(set(self.table.at_slots(lent))) == len(lent)
        for u in range(COUNT):
            assert self.table[u].slot == self.slot.get(u)
            assert (self.table[u].condition.home is UnitState.STALE) == (u in self.slot)

    @invariant()
    def states_say_what_is_held(self) -> None:
        for u in range(COUNT):
            memory = self.table[u].condition.memory
            assert (memory is UnitState.BACKED) == (u in self.valid)
            assert (memory is UnitState.FULL) == (self.used.get(u) == PAGES)
            assert (memory is UnitState.AVAIL) == (0 < self.used.get(u, 0) < PAGES)

    @invariant()
    def counts_add_up(self) -> None:
        counts = self.table.counts()
        assert sum(counts.values()) - counts[UnitState.STALE] == COUNT
        assert counts[UnitState.STALE] == len(self.slot)

    @invariant()
    def allocation_order_leaves_out_full_units_only(self) -> None:
        order = self.table.allocation_order()
        states = [self.table[u].condition.memory for u in order]
        ranks = [UnitState.AVAIL, UnitState.FREE, UnitState.BACKED]
        assert states == sorted(states, key=ranks.index)
        assert set(range(COUNT)) - set(order) == {u for u, n in self.used.items() if n == PAGES}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
