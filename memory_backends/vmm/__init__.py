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
    "check_support",
    "create_driver",
]


def check_support(device: torch.device) -> None:
    """Raise `VmmError` where `device` can have no driver. Takes no device memory."""
    if device.type == "cuda":
        from memory_backends.vmm.cuda import check_support as check_gpu

        check_gpu(device)
    elif device.type != "cpu":
        raise VmmError(
            f"virtual memory of {device.type!r} devices is not supported: use --memory-backend "
            "layer_swap"
        )


def create_driver(device: torch.device) -> VmmDriver:
    """The driver for `device`. Raises `VmmError` where it has no virtual memory management."""
    check_support(device)
    if device.type == "cpu":
        from memory_backends.vmm.host import HostDriver

        return HostDriver()
    from memory_backends.vmm.cuda import CudaDriver

    return CudaDriver(device)
