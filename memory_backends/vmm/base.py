"""What a virtual memory driver does: address ranges on one side, physical memory on the other.

An address range is reserved once and keeps its addresses; physical memory is created once and
keeps its content. Mapping joins the two, and can be changed without copying a byte. The calls and
their rules are those of CUDA's driver API, which the host driver keeps as well, so that what works
on a CPU works on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

MIB = 1 << 20


class VmmError(RuntimeError):
    """A driver call failed and changed nothing. One line: the call, the cause, the remedy."""


class VmmFatalError(RuntimeError):
    """Undoing calls failed too: what is mapped where is unknown, and the process must end."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `[start, stop)`: addresses, or offsets into a tensor."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PhysicalMemory:
    """A handle to `nbytes` of physical memory; `handle` means something to its driver only."""

    handle: int
    nbytes: int


class VmmDriver(ABC):
    """Virtual memory of one device.

    Addresses and sizes are multiples of `granularity`. A call either succeeds or raises `VmmError`
    and changes nothing. No call waits for the device: whoever unmaps sees to it that no kernel in
    flight touches the range.
    """

    device: torch.device
    aliases: bool = False
    """Whether memory is to be mapped at all its addresses at once and for good, in place of being
    unmapped here to be mapped there. Every address then shows the same bytes, to work that begins
    after the write has ended; nothing catches an access that should not be."""

    @property
    @abstractmethod
    def granularity(self) -> int:
        """Bytes; what addresses and sizes must be multiples of."""

    def check_size(self, nbytes: int) -> None:
        """Raise `VmmError` unless `nbytes` is a positive multiple of the granularity."""
        if nbytes <= 0 or nbytes % self.granularity:
            raise VmmError(
                f"{nbytes} bytes can't be mapped: the size must be a positive multiple of the "
                f"granularity of {self.device}, {self.granularity} bytes"
            )

    @abstractmethod
    def reserve(self, nbytes: int) -> ByteRange:
        """Addresses without memory behind them: touching them is a fault."""

    @abstractmethod
    def create(self, nbytes: int) -> PhysicalMemory:
        """Physical memory of undefined content, mapped nowhere."""

    @abstractmethod
    def map(self, address: int, memory: PhysicalMemory) -> None:
        """Put all of `memory` at `address`, in reserved addresses where nothing is mapped.

        It can't be touched before `set_access`.
        """

    @abstractmethod
    def set_access(self, address: int, nbytes: int) -> None:
        """Let the device read and write a range that consists of whole mappings."""

    @abstractmethod
    def unmap(self, address: int, nbytes: int) -> None:
        """Take the memory away from a range of whole mappings; the memory keeps its content."""

    @abstractmethod
    def release(self, memory: PhysicalMemory) -> None:
        """Give physical memory back. Where it is still mapped it lives until it is unmapped."""

    @abstractmethod
    def free(self, reserved: ByteRange) -> None:
        """Give up a whole reservation in which nothing is mapped."""

    @abstractmethod
    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """uint8 `(nbytes,)` over reserved addresses, valid until their reservation is freed.

        Something must be mapped and accessible at `address`. What is mapped behind it may change:
        the tensor always shows what is there now.
        """
