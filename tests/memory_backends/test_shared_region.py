"""The shared region over real remapping: memory moves without copies, and any failing driver call
leaves mappings, content and states as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memory_backends.base import PageRange
from memory_backends.shared_region import SharedRegion, check_unit_bytes
from memory_backends.units import Unit, UnitError, UnitState
from memory_backends.vmm import MIB, ByteRange, VmmError, VmmFatalError
from memory_backends.vmm.host import HostDriver
from tests.memory_backends.vmm.faulty import (
    FaultyDriver,
    SystemMapping,
    discard,
)

UNIT = 2 * MIB
UNITS = 4
BASE = UNIT + 4096
"""Not a multiple of the granularity."""


@pytest.fixture
def driver() -> Iterator[FaultyDriver]:
    driver = FaultyDriver(HostDriver())
    yield driver
    discard(driver.inner)


def build(driver: FaultyDriver) -> SharedRegion:
    """A region whose homes and base part are filled with bytes that tell where they come from."""
    region = SharedRegion(driver, base_bytes=BASE, units=UNITS, unit_bytes=UNIT)
    for unit in range(UNITS):
        home(region, unit).fill_(unit + 1)
    region.kv_tensor[: region.slot(0).start].fill_(100)
    region.uploaded(range(UNITS))
    return region


def home(region: SharedRegion, unit: int) -> torch.Tensor:
    place = region.home(unit)
    return region.residual_tensor[place.start : place.stop]


def at_slot(region: SharedRegion, slot: int) -> torch.Tensor:
    place = region.slot(slot)
    return region.kv_tensor[place.start : place.stop]


State = tuple[set[SystemMapping], list[Unit], list[int]]


def state(region: SharedRegion) -> State:
    """What the system has mapped, the units' states, and a checksum of all that is mapped."""
    units = [region.units[u] for u in range(UNITS)]
    mapped = [region.kv_tensor[r.start : r.stop] for r in region.kv_ranges()]
    mapped += [home(region, u.index) for u in units if u.slot is None]
    return region._driver.census.mappings(), units, [int(m.sum(dtype=torch.int64)) for m in mapped]


def test_all_units_start_at_home_behind_a_rounded_base(driver: FaultyDriver) -> None:
    region = build(driver)
    assert region.slot(0) == ByteRange(2 * UNIT, 3 * UNIT)
    assert region.kv_ranges() == [ByteRange(0, 2 * UNIT)]
    assert region.kv_tensor.shape == ((2 + UNITS) * UNIT,)
    assert region.residual_tensor.shape == (UNITS * UNIT,)
    assert region.units.counts()[UnitState.BACKED] == UNITS


def test_lending_moves_memory_and_copies_nothing(driver: FaultyDriver) -> None:
    region = build(driver)
    inode = {m.start: m.file for m in driver.census.mappings()}
    homes = region.residual_tensor.data_ptr()
    assert region.lend([2, 0]) == [ByteRange(2 * UNIT, 4 * UNIT)]
    assert region.lend([3]) == [ByteRange(4 * UNIT, 5 * UNIT)]
    assert region.kv_ranges() == [ByteRange(0, 5 * UNIT)]
    for slot, unit in enumerate([2, 0, 3]):
        assert bool((at_slot(region, slot) == unit + 1).all())
        moved = {m.start: m.file for m in driver.census.mappings()}
        assert moved[at_slot(region, slot).data_ptr()] == inode[homes + unit * UNIT]
    assert bool((home(region, 1) == 2).all())


def test_units_come_back_home(driver: FaultyDriver) -> None:
    region = build(driver)
    before = driver.census.mappings()
    region.lend([1, 2, 3])
    at_slot(region, 1).fill_(77)
    region.take_back([3, 2])
    assert region.kv_ranges() == [ByteRange(0, 3 * UNIT)]
    assert region.units[2].condition.memory is UnitState.FREE
    assert bool((home(region, 2) == 77).all()), "content goes with the memory"
    region.take_back([1])
    assert driver.census.mappings() == before
    region.uploaded([1, 2, 3])
    assert region.units.counts()[UnitState.BACKED] == UNITS


def test_a_hole_is_filled_first(driver: FaultyDriver) -> None:
    region = build(driver)
    region.lend([0, 1, 2])
    region.take_back([1])
    assert region.kv_ranges() == [ByteRange(0, 3 * UNIT), ByteRange(4 * UNIT, 5 * UNIT)]
    assert region.lend([3, 1]) == [ByteRange(3 * UNIT, 4 * UNIT), ByteRange(5 * UNIT, 6 * UNIT)]
    assert region.kv_ranges() == [ByteRange(0, 6 * UNIT)]


def test_aliased_memory_is_mapped_at_both_places_for_good() -> None:
    driver = FaultyDriver(HostDriver(aliases=True))
    region = build(driver)
    mapped = driver.census.mappings()
    driver.fail()
    assert region.lend([0, 1]) == [ByteRange(2 * UNIT, 4 * UNIT)]
    assert region.kv_ranges() == [ByteRange(0, 4 * UNIT)]
    for unit in (0, 1):
        assert bool((at_slot(region, unit) == unit + 1).all())
    at_slot(region, 1).fill_(77)
    region.take_back([1])
    assert bool((home(region, 1) == 77).all())
    assert region.units[1].condition.memory is UnitState.FREE
    assert driver.calls == 0 and driver.census.mappings() == mapped
    region.close()
    assert not driver.census.mappings() and not driver.census.files()
    discard(driver.inner)


def test_aliased_units_go_to_their_own_slots() -> None:
    driver = FaultyDriver(HostDriver(aliases=True))
    region = build(driver)
    for units in ([2, 0], [1], [0, 2]):
        with pytest.raises(UnitError, match="not mapped at the next slots"):
            region.lend(units)
    assert region.units.counts()[UnitState.BACKED] == UNITS
    region.lend([0])
    region.lend([1, 2])
    region.close()


def test_a_failed_start_with_aliases_leaves_nothing_behind() -> None:
    call = 0
    while True:
        call += 1
        driver = FaultyDriver(HostDriver(aliases=True))
        driver.fail(call)
        try:
            region = SharedRegion(driver, base_bytes=BASE, units=UNITS, unit_bytes=UNIT)
        except VmmError:
            assert not driver.census.mappings() and not driver.census.files()
            continue
        driver.fail()
        region.close()
        break
    assert call > 4 * UNITS


def test_memory_in_use_does_not_move(driver: FaultyDriver) -> None:
    region = build(driver)
    region.lend([0, 1])
    page = UNIT // 2
    region.observe([PageRange(0, 3), PageRange(6, 7)], page)  # unit 1 lies at pages 6 and 7
    before = state(region)
    with pytest.raises(UnitError, match="take back: not possible for unit 1, .* avail"):
        region.take_back([0, 1])
    assert state(region) == before
    region.observe([PageRange(0, 4)], page)
    region.take_back([0, 1])


@pytest.mark.parametrize(
    ("used", "states"),
    [
        ([], "free free"),
        ([(0, 11)], "full avail"),  # page 10 crosses from unit 0 into unit 1
        ([(0, 10)], "avail free"),
        ([(10, 11)], "avail avail"),
        ([(0, 14)], "full full"),  # page 14 ends beyond the lent memory: it does not exist
        ([(11, 12), (13, 14)], "free avail"),
        ([(1, 7)], "free free"),
        ([(7, 8)], "avail free"),  # crosses from the base part
    ],
)
def test_pages_in_use_decide_the_state(
    driver: FaultyDriver, used: list[tuple[int, int]], states: str
) -> None:
    region = build(driver)
    region.lend([0, 1])
    page = UNIT // 4 + 50_000  # unit 0 is touched by pages 7 to 10, unit 1 by 10 to 13
    region.observe([PageRange(*r) for r in used], page)
    assert [region.units[u].condition.memory.value for u in (0, 1)] == states.split()


def test_the_restorer_hears_of_a_unit_when_its_last_page_is_freed(driver: FaultyDriver) -> None:
    told: list[int] = []
    region = SharedRegion(
        driver, base_bytes=BASE, units=UNITS, unit_bytes=UNIT, on_free=told.append
    )
    region.lend([3, 2])
    region.observe([PageRange(4, 8)], UNIT // 2)
    region.units.want([2, 3])
    assert told == []
    region.observe([PageRange(4, 5)], UNIT // 2)
    assert told == [2]
    region.take_back([2])
    region.observe([], UNIT // 2)
    assert told == [2, 3]


def test_close_gives_everything_back(driver: FaultyDriver) -> None:
    region = build(driver)
    region.lend([1, 3])
    region.close()
    assert driver.census.mappings() == set()
    assert driver.census.files() == 0 and not driver.inner._raw


Operation = Callable[[SharedRegion], object]

OPERATIONS: dict[str, tuple[Operation, Operation]] = {
    "lend one": (lambda r: None, lambda r: r.lend([2])),
    "lend all": (lambda r: None, lambda r: r.lend([3, 1, 0, 2])),
    "lend around a hole": (
        lambda r: (r.lend([0, 1, 2]), r.take_back([1])),
        lambda r: r.lend([3, 1]),
    ),
    "take one back": (lambda r: r.lend([0, 1, 2]), lambda r: r.take_back([2])),
    "take all back": (lambda r: r.lend([2, 0, 3, 1]), lambda r: r.take_back([0, 2, 3, 1])),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_move_survives_the_failure_of_any_call(driver: FaultyDriver, name: str) -> None:
    prepare, move = OPERATIONS[name]
    region = build(driver)
    prepare(region)
    before = state(region)
    failures = 0
    while True:
        driver.fail(failures + 1)
        try:
            move(region)
            break
        except VmmError:
            failures += 1
        assert state(region) == before
    assert failures == driver.calls >= 3
    assert state(region) != before


@pytest.mark.parametrize("name", ["lend one", "take one back"])
def test_a_failure_that_cannot_be_undone_is_fatal(name: str) -> None:
    prepare, move = OPERATIONS[name]

    def attempt(*failing: int) -> tuple[Exception | None, int]:
        driver = FaultyDriver(HostDriver())
        region = build(driver)
        prepare(region)
        driver.fail(*failing)
        error: Exception | None = None
        try:
            move(region)
        except (VmmError, VmmFatalError) as caught:
            error = caught
        finally:
            discard(driver.inner)
        return error, driver.calls

    _, calls = attempt()
    for failing in range(2, calls + 1):
        _, made = attempt(failing)
        for undoing in range(failing + 1, made + 1):
            error, _ = attempt(failing, undoing)
            assert isinstance(error, VmmFatalError) and f"call {undoing} " in str(error)


def test_building_leaves_nothing_behind_when_any_call_fails(driver: FaultyDriver) -> None:
    failures = 0
    while True:
        driver.fail(failures + 1)
        try:
            SharedRegion(driver, base_bytes=BASE, units=UNITS, unit_bytes=UNIT)
            break
        except VmmError:
            failures += 1
        assert driver.census.mappings() == set()
        assert driver.census.files() == 0 and not driver.inner._raw
    assert failures == driver.calls == 2 + 3 + 2 * UNITS + 1 + 2


def test_a_page_that_does_not_exist_cannot_be_in_use(driver: FaultyDriver) -> None:
    region = build(driver)
    region.lend([0])
    with pytest.raises(UnitError, match="3 of 2 pages"):
        region.observe([PageRange(3, 6)], UNIT // 2 + 200_000)


@pytest.mark.parametrize(
    ("unit_bytes", "granularity", "message"),
    [
        (0, 2 * MIB, "multiple of 2 MiB .* take 2097152$"),
        (3 * MIB, 2 * MIB, "multiple of 2 MiB .* take 4194304$"),
        (-2 * MIB, 2 * MIB, "multiple of 2 MiB"),
        (6 * MIB, 4 * MIB, "mapping granularity .* take 8388608$"),
    ],
)
def test_a_bad_unit_size_is_one_clear_line(unit_bytes: int, granularity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_unit_bytes(unit_bytes, granularity)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("base_bytes", "units"), [(0, 4), (BASE, 0)])
def test_an_empty_region_is_refused(driver: FaultyDriver, base_bytes: int, units: int) -> None:
    with pytest.raises(ValueError, match="needs base KV bytes and units"):
        SharedRegion(driver, base_bytes=base_bytes, units=units, unit_bytes=UNIT)


class Histories(RuleBasedStateMachine):
    """Random moves with random failures; a model knows what every byte should be.

    The host driver refuses what CUDA forbids: to map over a mapping, to unmap what is none, to free
    addresses that are mapped, to release a handle twice.
    """

    ALIASES = False

    def __init__(self) -> None:
        super().__init__()
        self.driver = FaultyDriver(HostDriver(aliases=self.ALIASES))

    @initialize()
    def start(self) -> None:
        self.region = build(self.driver)
        self.slots: dict[int, int] = {}
        self.content = {unit: unit + 1 for unit in range(UNITS)}
        self.stamp = UNITS

    def teardown(self) -> None:
        """Closed in whatever state it is in, a region leaves nothing behind."""
        self.region.close()
        assert self.driver.census.mappings() == set()
        assert self.driver.census.files() == 0 and not self.driver.inner._raw

    def attempt(self, move: Callable[[], object], failing: int) -> bool:
        self.driver.fail(failing)
        try:
            move()
        except VmmError:
            return False
        finally:
            self.driver.fail()
        return True

    units = st.lists(st.integers(0, UNITS - 1), min_size=1, max_size=UNITS, unique=True)
    failing = st.integers(0, 12)

    @rule(units=units, failing=failing)
    def lend(self, units: list[int], failing: int) -> None:
        units = [u for u in units if u not in self.slots]
        if self.attempt(lambda: self.region.lend(units), failing):
            free = [s for s in range(UNITS) if s not in self.slots.values()]
            self.slots |= dict(zip(units, free, strict=False))

    @rule(units=units, failing=failing)
    def take_back(self, units: list[int], failing: int) -> None:
        units = [u for u in units if u in self.slots]
        if self.attempt(lambda: self.region.take_back(units), failing):
            for unit in units:
                del self.slots[unit]

    @rule(unit=st.integers(0, UNITS - 1))
    def write(self, unit: int) -> None:
        self.stamp = self.stamp % 250 + 1
        self.content[unit] = self.stamp
        self.place(unit).fill_(self.stamp)

    def place(self, unit: int) -> torch.Tensor:
        slot = self.slots.get(unit)
        return home(self.region, unit) if slot is None else at_slot(self.region, slot)

    @invariant()
    def content_is_where_it_should_be(self) -> None:
        for unit in range(UNITS):
            assert self.region.units[unit].slot == self.slots.get(unit)
            place = self.place(unit)
            assert int(place[0]) == int(place[-1]) == self.content[unit]

    @invariant()
    def all_memory_is_mapped_once(self) -> None:
        files = [m.file for m in self.driver.census.mappings()]
        assert len(files) == UNITS * (1 + self.ALIASES) + 1 and len(set(files)) == UNITS + 1


class AliasedHistories(Histories):
    """The same with memory at both its places: only units next in order can be lent."""

    ALIASES = True

    def attempt(self, move: Callable[[], object], failing: int) -> bool:
        try:
            return super().attempt(move, failing)
        except UnitError:
            return False


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestAliasedHistories = AliasedHistories.TestCase
TestAliasedHistories.settings = TestHistories.settings
