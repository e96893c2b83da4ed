"""Slabs and their images: one layer's tensors packed into contiguous bytes, and views of them."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import torch

from memory_backends.base import BackendError, TensorMap

ALIGNMENT = 256
"""Every tensor starts at a multiple of this; below it GEMM libraries pick other kernels."""


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor lies in a slab or image."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, places and sizes of a layer's tensors in one variant."""

    parts: dict[str, Part]
    nbytes: int

    @classmethod
    def of(cls, tensors: TensorMap) -> Layout:
        """Pack `tensors` in their order, each aligned."""
        parts: dict[str, Part] = {}
        end = 0
        for name, tensor in tensors.items():
            parts[name] = Part(align(end), tensor.shape, tensor.dtype)
            end = parts[name].offset + parts[name].nbytes
        return cls(parts, align(end))

    def views(self, raw: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors as views of `raw` (uint8, at least `nbytes` long)."""
        return {
            name: raw[p.offset : p.offset + p.nbytes].view(p.dtype).view(p.shape)
            for name, p in self.parts.items()
        }


def page_locked(nbytes: int) -> torch.Tensor:
    """Zeros, uint8 `(nbytes,)` in host memory, page-locked for as long as a tensor is over them.

    Not through torch, which rounds page-locked memory up to powers of two. Raises `BackendError`.
    """
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(memory.data_ptr(), nbytes, 0)
    if error != cudart.cudaError.success:
        raise BackendError(
            f"{nbytes} bytes of host memory cannot be page-locked ({error}); "
            "raise the memory limit of this process or container"
        )
    # Tensors hold `locked`, and its end unlocks before `memory` goes. Else the GPU would keep the
    # pages mapped at addresses that the process has given up, and an allocation that is given these
    # addresses fails with cudaErrorAlreadyMapped.
    locked = (ctypes.c_uint8 * nbytes).from_address(memory.data_ptr())
    weakref.finalize(locked, _unlock, memory).atexit = False
    return torch.frombuffer(locked, dtype=torch.uint8)


def _unlock(memory: torch.Tensor) -> None:
    torch.cuda.synchronize()  # copies in flight read it
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


@dataclass(frozen=True, slots=True)
class Image:
    """The bytes of one layer in one variant, in host memory, ready to be copied over its slab."""

    layout: Layout
    data: torch.Tensor

    @classmethod
    def pack(cls, tensors: TensorMap, *, pinned: bool) -> Image:
        """Copy `tensors` (any device) into new host memory, page-locked where `pinned`."""
        layout = Layout.of(tensors)
        nbytes = layout.nbytes
        data = page_locked(nbytes) if pinned else torch.zeros(nbytes, dtype=torch.uint8)
        for name, view in layout.views(data).items():
            view.copy_(tensors[name])
        return cls(layout, data)


def placeholders(full: TensorMap, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the right shape and next to no memory, until there is a place for the weights."""
    return {
        name: torch.zeros(1, dtype=tensor.dtype, device=device).expand(tensor.shape)
        for name, tensor in full.items()
    }
