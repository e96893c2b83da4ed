"""Several driver calls as one: all of them happen, or none."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from memory_backends.vmm.base import ByteRange, PhysicalMemory, VmmDriver, VmmFatalError


class Transaction:
    """Driver calls in a `with` block; an exception that leaves it undoes them in reverse.

    Undoing a call needs nothing but the driver, and the memory kept its content, so afterwards
    mappings and content are as they were before the block. Raises `VmmFatalError` if a call
    fails during that.
    """

    def __init__(self, driver: VmmDriver) -> None:
        self._driver = driver
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if cause is None:
            return
        try:
            while self._undo:
                self._undo.pop()()
        except Exception as error:
            raise VmmFatalError(
                f"memory can't be put back ({error}) after a failed change ({cause}): what is "
                "mapped where is unknown; restart the server"
            ) from cause

    def reserve(self, nbytes: int) -> ByteRange:
        reserved = self._driver.reserve(nbytes)
        self._undo.append(lambda: self._driver.free(reserved))
        return reserved

    def create(self, nbytes: int) -> PhysicalMemory:
        memory = self._driver.create(nbytes)
        self._undo.append(lambda: self._driver.release(memory))
        return memory

    def map(self, address: int, memory: PhysicalMemory) -> None:
        self._driver.map(address, memory)
        self._undo.append(lambda: self._driver.unmap(address, memory.nbytes))

    def set_access(self, address: int, nbytes: int) -> None:
        """For mappings made in this block: undoing those takes the access away as well."""
        self._driver.set_access(address, nbytes)

    def unmap(self, address: int, memory: PhysicalMemory) -> None:
        """Unmap `memory`, which is all that is mapped from `address` on and is accessible."""
        self._driver.unmap(address, memory.nbytes)
        self._undo.append(lambda: self._map_again(address, memory))

    def _map_again(self, address: int, memory: PhysicalMemory) -> None:
        self._driver.map(address, memory)
        self._driver.set_access(address, memory.nbytes)
