"""A driver that fails when told to, and what the system says of mappings."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from memory_backends.vmm import ByteRange, PhysicalMemory, VmmDriver, VmmError
from memory_backends.vmm.host import HostDriver


class FaultyDriver(VmmDriver):
    """Passes calls on; the calls whose numbers are in `failing` fail before they do anything.

    Calls are counted from 1 since the last `fail`.
    """

    def __init__(self, inner: HostDriver) -> None:
        self.inner = inner
        self.census = Census()
        self.device = inner.device
        self.aliases = inner.aliases
        self.failing: frozenset[int] = frozenset()
        self.calls = 0

    def fail(self, *calls: int) -> None:
        """Fail these calls from now on; none: fail no more."""
        self.failing, self.calls = frozenset(calls), 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls in self.failing:
            raise VmmError(f"call {self.calls} was made to fail")

    @property
    def granularity(self) -> int:
        return self.inner.granularity

    def reserve(self, nbytes: int) -> ByteRange:
        self._count()
        return self.inner.reserve(nbytes)

    def create(self, nbytes: int) -> PhysicalMemory:
        self._count()
        return self.inner.create(nbytes)

    def map(self, address: int, memory: PhysicalMemory) -> None:
        self._count()
        self.inner.map(address, memory)

    def set_access(self, address: int, nbytes: int) -> None:
        self._count()
        self.inner.set_access(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self._count()
        self.inner.unmap(address, nbytes)

    def release(self, memory: PhysicalMemory) -> None:
        self._count()
        self.inner.release(memory)

    def free(self, reserved: ByteRange) -> None:
        self._count()
        self.inner.free(reserved)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        self._count()
        return self.inner.tensor(address, nbytes)


def discard(driver: HostDriver) -> None:
    """Give back whatever a test left behind; its tensors must not be touched any more."""
    for address, mapping in list(driver._mappings.items()):
        driver.unmap(address, mapping.nbytes)
    for file, nbytes in list(driver._files.items()):
        driver.release(PhysicalMemory(file, nbytes))
    for reserved in list(driver._raw):
        driver.free(reserved)


class SystemMapping(NamedTuple):
    """A line of the system's list of mappings that shows a driver's memory."""

    start: int
    stop: int
    access: str
    offset: int
    file: int


class Census:
    """Host drivers' memory in this process, by the system's word, less what was there before."""

    def __init__(self) -> None:
        self._mappings_before = _mappings()
        self._files_before = _open_files()

    def mappings(self) -> set[SystemMapping]:
        return _mappings() - self._mappings_before

    def files(self) -> int:
        """Number of physical memories held."""
        return len(_open_files() - self._files_before)


def _mappings() -> set[SystemMapping]:
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, offset, _, inode, *name = line.split()
        if name and name[0] == "/memfd:vmm":
            start, stop = (int(part, 16) for part in addresses.split("-"))
            found.add(SystemMapping(start, stop, access, int(offset, 16), int(inode)))
    return found


def _open_files() -> set[int]:
    """Their inodes."""
    return {
        link.stat().st_ino
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink() and str(link.readlink()).startswith("/memfd:vmm")
    }
