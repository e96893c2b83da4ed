"""States of the units of physical memory that weights and KV cache share (pure Python).

A unit's physical memory is mapped in one place: *home*, at its offset in the range of the weights'
residuals, or at a *slot* of the KV range. The names are those of DPS. Its block is our page, and
its allocator works on units where ours works on pages, so they read as follows:

| state  | of           | meaning |
|--------|--------------|---|
| BACKED | memory       | at home, holds the residual |
| FREE   | memory       | holds nothing: at home before its upload, or at a slot, no page used |
| AVAIL  | memory       | at a slot, some of its pages in use, some free |
| FULL   | memory       | at a slot, all of its pages in use |
| STALE  | home mapping | the KV cache has the memory; nothing is mapped at home |

A page that crosses a unit's edge counts in both units. The allocator hands pages out in ascending
order, base pages first and then slots as they were lent, which is DPS's order of allocation: what
is left in AVAIL units, then FREE ones, then BACKED ones, which costs precision.

`memory_backends.shared_region` joins this table with a virtual memory driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import NamedTuple


class UnitState(Enum):
    """See the module's table."""

    BACKED = "backed"
    FREE = "free"
    AVAIL = "avail"
    FULL = "full"
    STALE = "stale"


class Condition(NamedTuple):
    """State of a unit's memory, and of its home mapping."""

    memory: UnitState
    home: UnitState


HOME_BACKED = Condition(UnitState.BACKED, UnitState.BACKED)
HOME_FREE = Condition(UnitState.FREE, UnitState.FREE)
KV_FREE = Condition(UnitState.FREE, UnitState.STALE)
KV_AVAIL = Condition(UnitState.AVAIL, UnitState.STALE)
KV_FULL = Condition(UnitState.FULL, UnitState.STALE)


class Event(Enum):
    """What happens to a unit."""

    LEND = "lend"
    USE_NONE = "use none"
    USE_SOME = "use some"
    USE_ALL = "use all"
    TAKE_BACK = "take back"
    UPLOAD = "upload"


_IN_KV = (KV_FREE, KV_AVAIL, KV_FULL)

TRANSITIONS: Mapping[Event, Mapping[Condition, Condition]] = {
    Event.LEND: {HOME_BACKED: KV_FREE, HOME_FREE: KV_FREE},
    Event.USE_NONE: dict.fromkeys(_IN_KV, KV_FREE),
    Event.USE_SOME: dict.fromkeys(_IN_KV, KV_AVAIL),
    Event.USE_ALL: dict.fromkeys(_IN_KV, KV_FULL),
    Event.TAKE_BACK: {KV_FREE: HOME_FREE},
    Event.UPLOAD: {HOME_FREE: HOME_BACKED},
}
"""Event -> condition before -> condition after. What is not here is not allowed: in particular,
memory with a KV page in use can't be taken back, so its mapping never moves."""

_ALLOCATION_ORDER = (KV_AVAIL, KV_FREE, HOME_FREE, HOME_BACKED)


class UnitError(ValueError):
    """A unit can't do that now; nothing has changed."""


class PageCount(NamedTuple):
    """How many of the pages that touch a unit are in use."""

    used: int
    pages: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit `index` at this moment; home is the `index`-th unit of the residual range."""

    index: int
    condition: Condition
    slot: int | None
    """Slot of the KV range, None at home."""


class UnitTable:
    """Conditions and slots of `count` units. Every method changes all units named, or none.

    All start at home without a residual. `on_free(index)` is called when a unit is FREE in the
    KV range and its residual is wanted, after everything else has been done.
    """

    def __init__(self, count: int, on_free: Callable[[int], None] | None = None) -> None:
        self._units = [Unit(index, HOME_FREE, None) for index in range(count)]
        self._at_slot: dict[int, int] = {}
        self._wanted: set[int] = set()
        self._on_free = on_free

    def __len__(self) -> int:
        return len(self._units)

    def __getitem__(self, index: int) -> Unit:
        if not 0 <= index < len(self._units):
            raise UnitError(f"there is no unit {index}: they are 0 to {len(self._units) - 1}")
        return self._units[index]

    def check(self, event: Event, units: Sequence[int]) -> None:
        """Raise `UnitError` unless `event` may happen to each of `units` (distinct) now."""
        if len(set(units)) != len(units):
            raise UnitError(f"{event.value}: a unit is named twice in {list(units)}")
        for index in units:
            memory, home = self[index].condition
            if (memory, home) not in TRANSITIONS[event]:
                raise UnitError(
                    f"{event.value}: not possible for unit {index}, whose memory is "
                    f"{memory.value} and whose home mapping is {home.value}"
                )

    def lend(self, units: Sequence[int]) -> None:
        """Put units at the slots `next_slots(len(units))`, in the order given; pages all free."""
        self.check(Event.LEND, units)
        for index, slot in zip(units, self.next_slots(len(units)), strict=True):
            self._change(Event.LEND, index, slot)
            self._at_slot[slot] = index

    def next_slots(self, count: int) -> list[int]:
        """The lowest unused slots, ascending: the lent slots stay one run from slot 0."""
        unused = (slot for slot in range(len(self)) if slot not in self._at_slot)
        return list(islice(unused, count))

    def use(self, counts: Mapping[int, PageCount]) -> None:
        """Bring the states of lent units (the keys) up to date with the use of their pages."""
        events = {index: _event_of_use(count) for index, count in counts.items()}
        for index, event in events.items():
            self.check(event, [index])
        for index, event in events.items():
            self._change(event, index, self._units[index].slot)
        self._tell(events)

    def take_back(self, units: Sequence[int]) -> None:
        """Back home, content undefined; only units without a page in use."""
        self.check(Event.TAKE_BACK, units)
        for index in units:
            self._change(Event.TAKE_BACK, index, None)
        self._at_slot = {s: i for s, i in self._at_slot.items() if i not in units}
        self._wanted.difference_update(units)

    def uploaded(self, units: Sequence[int]) -> None:
        """The residuals of units at home are complete."""
        self.check(Event.UPLOAD, units)
        for index in units:
            self._change(Event.UPLOAD, index, None)

    def want(self, units: Sequence[int]) -> None:
        """The residuals of these units are wanted: `on_free` tells of each that is lent, once
        it is FREE, and again whenever it becomes so, until it is taken back or not wanted."""
        self._wanted.update(u for u in units if self[u].slot is not None)
        self._tell(units)

    def unwant(self, units: Sequence[int]) -> None:
        """The residuals of these units are not wanted any more."""
        self._wanted.difference_update(units)

    def at_slots(self, slots: Sequence[int]) -> list[int]:
        """The units at `slots`. Raises `UnitError` for an empty slot."""
        empty = [slot for slot in slots if slot not in self._at_slot]
        if empty:
            raise UnitError(f"no unit is at slots {empty}")
        return [self._at_slot[slot] for slot in slots]

    def lent_slots(self) -> list[int]:
        """Slots with a unit, ascending."""
        return sorted(self._at_slot)

    def allocation_order(self) -> list[int]:
        """Units that can take KV, in the order in which they should: those with pages free
        already by slot (AVAIL, then FREE), then those at home by index (FREE, then BACKED)."""
        usable = [unit for unit in self._units if unit.condition in _ALLOCATION_ORDER]
        usable.sort(key=lambda u: (_ALLOCATION_ORDER.index(u.condition), u.slot or 0))
        return [unit.index for unit in usable]

    def counts(self) -> dict[UnitState, int]:
        """Units by the state of their memory, and the number of STALE home mappings."""
        result = dict.fromkeys(UnitState, 0)
        for unit in self._units:
            result[unit.condition.memory] += 1
        result[UnitState.STALE] = len(self._at_slot)
        return result

    def _change(self, event: Event, index: int, slot: int | None) -> None:
        after = TRANSITIONS[event][self._units[index].condition]
        self._units[index] = Unit(index, after, slot)

    def _tell(self, units: Iterable[int]) -> None:
        """Tell of those that are wanted and FREE; a listener may take units back meanwhile."""
        for index in units:
            wanted = index in self._wanted and self._units[index].condition == KV_FREE
            if wanted and self._on_free is not None:
                self._on_free(index)


def _event_of_use(count: PageCount) -> Event:
    if not 0 <= count.used <= count.pages:
        raise UnitError(f"{count.used} of {count.pages} pages can't be in use")
    if count.used == 0:
        return Event.USE_NONE
    return Event.USE_SOME if count.used < count.pages else Event.USE_ALL
