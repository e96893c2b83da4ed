"""Slabs and their images: one layer's tensors packed into contiguous bytes, and views of them."""

from __future__ import annotations

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


def pin(data: torch.Tensor) -> None:
    """Page-lock the memory of `data` for as long as the process lives.

    Not through torch, which rounds page-locked memory up to powers of two.
    """
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0)
    if error != torch.cuda.cudart().cudaError.success:
        raise BackendError(
            f"{data.nbytes} bytes of host memory cannot be page-locked ({error}); "
            "raise the memory limit of this process or container"
        )


@dataclass(frozen=True, slots=True)
class Image:
    """The bytes of one layer in one variant, in host memory, ready to be copied over its slab."""

    layout: Layout
    data: torch.Tensor

    @classmethod
    def pack(cls, tensors: TensorMap, *, pinned: bool) -> Image:
        """Copy `tensors` (any device) into new host memory, page-locked where `pinned`."""
        layout = Layout.of(tensors)
        data = torch.zeros(layout.nbytes, dtype=torch.uint8)
        if pinned:
            pin(data)
        for name, view in layout.views(data).items():
            view.copy_(tensors[name])
        return cls(layout, data)


def placeholders(full: TensorMap, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the right shape and next to no memory, until there is a place for the weights."""
    return {
        name: torch.zeros(1, dtype=tensor.dtype, device=device).expand(tensor.shape)
        for name, tensor in full.items()
    }
