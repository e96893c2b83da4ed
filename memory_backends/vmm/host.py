"""Virtual memory of a CPU (Linux): real remapping, so everything above it is tested without a GPU.

Physical memory is an anonymous file (`memfd_create`), reserved addresses are a `PROT_NONE` mapping,
and `mmap(MAP_FIXED)` joins the two. An access to addresses without memory ends the process with
SIGSEGV, which is what makes a wrong access visible.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass

import torch

from memory_backends.vmm.base import MIB, ByteRange, PhysicalMemory, VmmDriver, VmmError

GRANULARITY = 2 * MIB
"""That of CUDA devices, not the CPU's page size, so that sizes and alignments are tested too."""

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(slots=True)
class _Mapping:
    nbytes: int
    accessible: bool = False


class HostDriver(VmmDriver):
    """Keeps CUDA's rules where the system's calls are laxer: `MAP_FIXED` replaces silently.

    Tensors keep their driver alive, and with the last of both goes what was not given back.
    """

    def __init__(self, *, aliases: bool = False) -> None:
        self.device = torch.device("cpu")
        self.aliases = aliases
        self._raw: dict[ByteRange, ByteRange] = {}
        """Reservation -> the larger mapping in which it was aligned."""
        self._files: dict[int, int] = {}
        self._mappings: dict[int, _Mapping] = {}
        weakref.finalize(self, _give_back, self._raw, self._files).atexit = False

    @property
    def granularity(self) -> int:
        return GRANULARITY

    def reserve(self, nbytes: int) -> ByteRange:
        self.check_size(nbytes)
        whole = nbytes + GRANULARITY
        raw = _mmap(None, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        start = -(-raw // GRANULARITY) * GRANULARITY
        reserved = ByteRange(start, start + nbytes)
        self._raw[reserved] = ByteRange(raw, raw + whole)
        return reserved

    def create(self, nbytes: int) -> PhysicalMemory:
        self.check_size(nbytes)
        try:
            file = os.memfd_create("vmm")
        except OSError as error:
            raise VmmError(
                f"memfd_create: {error.strerror}; raise `ulimit -n` or take larger units"
            ) from error
        try:
            os.ftruncate(file, nbytes)
        except OSError as error:
            os.close(file)
            raise VmmError(f"no {nbytes} bytes of host memory: {error.strerror}") from error
        self._files[file] = nbytes
        return PhysicalMemory(file, nbytes)

    def map(self, address: int, memory: PhysicalMemory) -> None:
        stop = address + memory.nbytes
        if self._files.get(memory.handle) != memory.nbytes:
            raise VmmError(f"map: there is no physical memory with handle {memory.handle}")
        if address % GRANULARITY or not any(
            r.start <= address and stop <= r.stop for r in self._raw
        ):
            raise VmmError(f"map: {address:#x} is unaligned or its range is not reserved")
        if any(start < stop and address < start + m.nbytes for start, m in self._mappings.items()):
            raise VmmError(f"map: something is mapped at {address:#x} already")
        _mmap(address, memory.nbytes, mmap.MAP_SHARED | _MAP_FIXED, memory.handle)
        self._mappings[address] = _Mapping(memory.nbytes)

    def set_access(self, address: int, nbytes: int) -> None:
        starts = self._whole_mappings("set_access", address, nbytes)
        if _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE):
            raise _system_error("mprotect")
        for start in starts:
            self._mappings[start].accessible = True

    def unmap(self, address: int, nbytes: int) -> None:
        starts = self._whole_mappings("unmap", address, nbytes)
        _mmap(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)
        for start in starts:
            del self._mappings[start]

    def release(self, memory: PhysicalMemory) -> None:
        if self._files.pop(memory.handle, None) is None:
            raise VmmError(f"release: there is no physical memory with handle {memory.handle}")
        os.close(memory.handle)

    def free(self, reserved: ByteRange) -> None:
        if reserved not in self._raw:
            raise VmmError(f"free: {reserved.start:#x} is not the start of a whole reservation")
        if any(reserved.start <= start < reserved.stop for start in self._mappings):
            raise VmmError(f"free: memory is still mapped in the range at {reserved.start:#x}")
        raw = self._raw[reserved]
        if _libc.munmap(raw.start, len(raw)):
            raise _system_error("munmap")
        del self._raw[reserved]

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        if not any(r.start <= address and address + nbytes <= r.stop for r in self._raw):
            raise VmmError(f"tensor: {nbytes} bytes at {address:#x} are not reserved")
        if address not in self._mappings or not self._mappings[address].accessible:
            raise VmmError(f"tensor: nothing is mapped at its first byte, {address:#x}")
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        memory.driver = self  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _whole_mappings(self, call: str, address: int, nbytes: int) -> list[int]:
        """Starts of the mappings that make up the range exactly."""
        starts, at = [], address
        while at < address + nbytes and at in self._mappings:
            starts.append(at)
            at += self._mappings[at].nbytes
        if not starts or at != address + nbytes:
            raise VmmError(f"{call}: {nbytes} bytes at {address:#x} are not whole mappings")
        return starts


def _give_back(raw: dict[ByteRange, ByteRange], files: dict[int, int]) -> None:
    for addresses in raw.values():
        _libc.munmap(addresses.start, len(addresses))
    for file in files:
        os.close(file)


def _mmap(address: int | None, nbytes: int, flags: int, file: int) -> int:
    """Map without access; the address."""
    mapped: int | None = _libc.mmap(address, nbytes, _PROT_NONE, flags, file, 0)
    if mapped is None or mapped == _MAP_FAILED:
        raise _system_error("mmap")
    return mapped


def _system_error(call: str) -> VmmError:
    return VmmError(
        f"{call}: {os.strerror(ctypes.get_errno())}; if memory is not short, raise "
        "vm.max_map_count or take larger units"
    )
