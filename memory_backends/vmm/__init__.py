"""Virtual memory drivers: move physical memory between addresses without copying."""

from __future__ import annotations

import torch

from memory_backends.vmm.base import (
    MIB,
    ByteRange,
    PhysicalMemory,
    VmmDriver,
    VmmError,
    VmmFatalError,
)

__all__ = [
    "MIB",
    "ByteRange",
    "PhysicalMemory",
    "VmmDriver",
    "VmmError",
    "VmmFatalError",
    "create_driver",
]


def create_driver(device: torch.device) -> VmmDriver:
    """The driver for `device`. Raises `VmmError` where it has no virtual memory management."""
    if device.type == "cpu":
        from memory_backends.vmm.host import HostDriver

        return HostDriver()
    if device.type == "cuda":
        from memory_backends.vmm.cuda import CudaDriver

        return CudaDriver(device)
    raise VmmError(
        f"virtual memory of {device.type!r} devices is not supported: use --memory-backend "
        "layer_swap"
    )
