"""The shared region: units of physical memory that are weights' residuals or KV pages.

    residual range   | home 0 | home 1 | ... | home N-1 |
    KV range         | base bytes, rounded up | slot 0 | slot 1 | ... | slot N-1 |

Both ranges keep their addresses for good, so tensors over them are made once. Lending unmaps a
unit at home and maps it at the next slot; taking back is the reverse. Nothing is copied: content
goes with the memory, and is undefined where it has just arrived.

The device must have finished with a range before it is unmapped: lend after the last forward that
reads the residuals, take back after the last one that touches the pages.

With a driver that `aliases`, unit `n` is mapped at home and at slot `n` from the beginning. Then
lending and taking back change nothing but whose the bytes are, and it is enough that what the
device does next is ordered after those forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memory_backends.base import PageRange
from memory_backends.slab import align
from memory_backends.units import Event, PageCount, UnitError, UnitTable
from memory_backends.vmm.base import MIB, ByteRange, VmmDriver
from memory_backends.vmm.transaction import Transaction

UNIT_STEP = 2 * MIB
DEFAULT_UNIT_BYTES = 64 * MIB


def check_unit_bytes(unit_bytes: int, granularity: int) -> None:
    """Raise ValueError (one line) unless a multiple of 2 MiB and of the driver's granularity."""
    for step, of in ((UNIT_STEP, "2 MiB"), (granularity, "the device's mapping granularity")):
        if unit_bytes <= 0 or unit_bytes % step:
            raise ValueError(
                f"a unit of {unit_bytes} bytes is no multiple of {of} ({step} bytes); "
                f"take {max(1, round(unit_bytes / step)) * step}"
            )


class SharedRegion:
    """`units` units of `unit_bytes` at home, content undefined, and `base_bytes` of KV memory.

    Raises ValueError for a bad size and `VmmError` if the driver refuses; then nothing is left
    behind. `lend` and `take_back` raise `UnitError` or `VmmError` and change nothing, or
    `VmmFatalError` if that could not be brought about. With aliases units are lent to the slots of
    their own numbers only.
    """

    def __init__(
        self,
        driver: VmmDriver,
        *,
        base_bytes: int,
        units: int,
        unit_bytes: int = DEFAULT_UNIT_BYTES,
        on_free: Callable[[int], None] | None = None,
    ) -> None:
        check_unit_bytes(unit_bytes, driver.granularity)
        if base_bytes <= 0 or units <= 0:
            raise ValueError(
                f"a shared region needs base KV bytes and units: {base_bytes} bytes, {units} units"
            )
        self._driver = driver
        self.remaps = not driver.aliases
        """Whether lending and taking back change mappings: the host must wait for the device."""
        self.unit_bytes = unit_bytes
        self.units = UnitTable(units, on_free)
        """States; read it, `want` and `unwant`, but lend and take back through the region."""
        self._base_bytes = align(base_bytes, driver.granularity)
        with Transaction(driver) as calls:
            self._residual_range = calls.reserve(units * unit_bytes)
            self._kv_range = calls.reserve(self._base_bytes + units * unit_bytes)
            self._base = calls.create(self._base_bytes)
            calls.map(self._kv_range.start, self._base)
            calls.set_access(self._kv_range.start, self._base_bytes)
            self._memory = [calls.create(unit_bytes) for _ in range(units)]
            for index, memory in enumerate(self._memory):
                calls.map(self._home_address(index), memory)
            calls.set_access(self._residual_range.start, len(self._residual_range))
            if not self.remaps:
                for index, memory in enumerate(self._memory):
                    calls.map(self._slot_address(index), memory)
                calls.set_access(self._slot_address(0), units * unit_bytes)
            self.kv_tensor = driver.tensor(self._kv_range.start, len(self._kv_range))
            """uint8 over the whole KV range; only `kv_ranges` may be touched."""
            self.residual_tensor = driver.tensor(
                self._residual_range.start, len(self._residual_range)
            )
            """uint8 over all homes; those of lent units must not be touched."""

    def home(self, unit: int) -> ByteRange:
        """Bytes of `residual_tensor` that belong to `unit`."""
        return ByteRange(unit * self.unit_bytes, (unit + 1) * self.unit_bytes)

    def slot(self, slot: int) -> ByteRange:
        """Bytes of `kv_tensor` that make up `slot`; `slot(0).start` is where the base part ends."""
        start = self._base_bytes + slot * self.unit_bytes
        return ByteRange(start, start + self.unit_bytes)

    def kv_ranges(self) -> list[ByteRange]:
        """Bytes of `kv_tensor` with memory behind them, ascending, neighbours joined.

        Units lent and taken back in stack order make it one range from 0.
        """
        lent = (self.slot(slot) for slot in self.units.lent_slots())
        return join([ByteRange(0, self._base_bytes), *lent])

    def lend(self, units: Sequence[int]) -> list[ByteRange]:
        """Move units to the next slots, in the order given; the bytes of `kv_tensor` gained."""
        self.units.check(Event.LEND, units)
        slots = self.units.next_slots(len(units))
        gained = [self.slot(slot) for slot in slots]
        if not self.remaps:
            if slots != list(units):
                raise UnitError(f"units {list(units)} are not mapped at the next slots, {slots}")
            self.units.lend(units)
            return join(gained)
        with Transaction(self._driver) as calls:
            for index, slot in zip(units, gained, strict=True):
                calls.unmap(self._home_address(index), self._memory[index])
                calls.map(self._kv_range.start + slot.start, self._memory[index])
            self._open(calls, self._kv_range.start, gained)
        self.units.lend(units)
        return join(gained)

    def take_back(self, units: Sequence[int]) -> None:
        """Move lent units home. Their pages must be out of use and out of the allocator."""
        self.units.check(Event.TAKE_BACK, units)
        if not self.remaps:
            self.units.take_back(units)
            return
        with Transaction(self._driver) as calls:
            for index in units:
                calls.unmap(self._kv_address(index), self._memory[index])
                calls.map(self._home_address(index), self._memory[index])
            self._open(calls, self._residual_range.start, [self.home(u) for u in sorted(units)])
        self.units.take_back(units)

    def uploaded(self, units: Sequence[int]) -> None:
        """The residuals of units at home are complete."""
        self.units.uploaded(units)

    def observe(self, used: Sequence[PageRange], page_bytes: int) -> None:
        """Bring the lent units' states up to date with the pages in use (ascending, disjoint).

        Page `i` is bytes `[i, i + 1) * page_bytes` of `kv_tensor`; a page counts in every unit it
        touches, if all of it has memory behind it.
        """
        pages = [
            PageRange(-(-r.start // page_bytes), r.stop // page_bytes) for r in self.kv_ranges()
        ]
        counts = {}
        for slot in self.units.lent_slots():
            place = self.slot(slot)
            touching = PageRange(place.start // page_bytes, -(-place.stop // page_bytes))
            [index] = self.units.at_slots([slot])
            counts[index] = PageCount(_overlap(used, touching), _overlap(pages, touching))
        self.units.use(counts)

    def close(self) -> None:
        """Give all memory and addresses back. The tensors must not be touched any more."""
        for index, memory in enumerate(self._memory):
            for address in self._addresses(index):
                self._driver.unmap(address, self.unit_bytes)
            self._driver.release(memory)
        self._driver.unmap(self._kv_range.start, self._base_bytes)
        self._driver.release(self._base)
        self._driver.free(self._kv_range)
        self._driver.free(self._residual_range)

    def _addresses(self, unit: int) -> list[int]:
        """Where the unit is mapped."""
        if not self.remaps:
            return [self._home_address(unit), self._slot_address(unit)]
        at_home = self.units[unit].slot is None
        return [self._home_address(unit) if at_home else self._kv_address(unit)]

    def _home_address(self, unit: int) -> int:
        return self._residual_range.start + self.home(unit).start

    def _slot_address(self, slot: int) -> int:
        return self._kv_range.start + self.slot(slot).start

    def _kv_address(self, unit: int) -> int:
        slot = self.units[unit].slot
        assert slot is not None, f"unit {unit} is not lent"
        return self._slot_address(slot)

    @staticmethod
    def _open(calls: Transaction, origin: int, ranges: Iterable[ByteRange]) -> None:
        """Make new mappings accessible, neighbours in one call."""
        for run in join(ranges):
            calls.set_access(origin + run.start, len(run))


def join(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Ascending ranges with neighbours made one."""
    joined: list[ByteRange] = []
    for r in ranges:
        if joined and joined[-1].stop == r.start:
            joined[-1] = ByteRange(joined[-1].start, r.stop)
        else:
            joined.append(r)
    return joined


def _overlap(ranges: Sequence[PageRange], other: PageRange) -> int:
    """How many pages of `ranges` lie in `other`."""
    return sum(len(PageRange(max(r.start, other.start), min(r.stop, other.stop))) for r in ranges)
