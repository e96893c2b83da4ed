"""Virtual memory of a CUDA device, through the driver API (cuda-python)."""

from __future__ import annotations

from typing import Any

import torch

from memory_backends.vmm.base import ByteRange, PhysicalMemory, VmmDriver, VmmError


def check_support(device: torch.device) -> None:
    """Raise `VmmError` unless the GPU has virtual memory management. Creates no context."""
    api = _driver_api()
    _call(api, "cuInit", 0)
    index = torch.cuda.current_device() if device.index is None else device.index
    supported = _call(
        api,
        "cuDeviceGetAttribute",
        api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        _call(api, "cuDeviceGet", index),
    )
    if not supported:
        raise VmmError(
            f"GPU {index} has no virtual memory management; use --memory-backend layer_swap"
        )


class CudaDriver(VmmDriver):
    """Memory of one GPU, for that GPU alone. Raises `VmmError` if the GPU or its driver can't.

    `aliases`: unmapping does not wait for kernels in flight, so without aliases the host would
    have to, for a whole forward. CUDA allows them where work is ordered by streams and events.
    """

    def __init__(self, device: torch.device, *, aliases: bool = True) -> None:
        check_support(device)
        self._api = _driver_api()
        self.aliases = aliases
        # Creates the device's primary context and makes it current: the driver's calls need one.
        torch.cuda.synchronize(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._properties = self._allocation_properties(index)
        self._access = self._access_descriptor(index)
        self._granularity = int(
            self._call(
                "cuMemGetAllocationGranularity",
                self._properties,
                self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, nbytes: int) -> ByteRange:
        self.check_size(nbytes)
        start = int(self._call("cuMemAddressReserve", nbytes, self._granularity, 0, 0))
        return ByteRange(start, start + nbytes)

    def create(self, nbytes: int) -> PhysicalMemory:
        self.check_size(nbytes)
        handle = self._call("cuMemCreate", nbytes, self._properties, 0)
        return PhysicalMemory(int(handle), nbytes)

    def map(self, address: int, memory: PhysicalMemory) -> None:
        self._call("cuMemMap", address, memory.nbytes, 0, memory.handle, 0)

    def set_access(self, address: int, nbytes: int) -> None:
        self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def release(self, memory: PhysicalMemory) -> None:
        self._call("cuMemRelease", memory.handle)

    def free(self, reserved: ByteRange) -> None:
        self._call("cuMemAddressFree", reserved.start, len(reserved))

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(_DeviceBytes(address, nbytes), device=self.device)

    def _allocation_properties(self, index: int) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = index
        return properties

    def _access_descriptor(self, index: int) -> Any:
        access = self._api.CUmemAccessDesc()
        access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _call(self, name: str, *arguments: Any) -> Any:
        return _call(self._api, name, *arguments)


def _call(api: Any, name: str, *arguments: Any) -> Any:
    """Call the driver; its result, if it has one."""
    error, *results = getattr(api, name)(*arguments)
    if error == api.CUresult.CUDA_SUCCESS:
        return results[0] if results else None
    if error == api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise VmmError(
            f"{name}: out of memory on the GPU; lower --mem-fraction-static, or end other "
            "processes on this GPU"
        )
    _, text = api.cuGetErrorString(error)
    numbers = [argument for argument in arguments if isinstance(argument, int)]
    raise VmmError(f"{name}, {numbers}: {error.name}, {text.decode() if text else 'unknown'}")


class _DeviceBytes:
    """What torch needs to see memory it does not own: the CUDA array interface, version 3."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _driver_api() -> Any:
    if not torch.cuda.is_available():
        raise VmmError("virtual memory of a CUDA device: no usable GPU or NVIDIA driver is here")
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise VmmError("virtual memory of a CUDA device needs `pip install cuda-python`") from error
    return driver
