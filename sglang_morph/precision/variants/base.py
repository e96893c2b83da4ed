"""The variant interface: a smaller representation of a linear's weight, and computing with it.

A variant has no state of its own. What it computes with are *parts*: named, kernel-ready tensors
that `encode` makes on the host, and that later lie wherever a memory backend has put them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_morph.precision.names import NOMINAL_BITS
from sglang_morph.precision.quantizers.base import QuantizedWeight, Quantizer, check_weight
from sglang_morph.precision.quantizers.integer_zeros import IntegerZeros

Parts = Mapping[str, torch.Tensor]

Loaded = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""`(x, bias)` -> a linear's result by the method it was loaded with."""


@dataclass(frozen=True, slots=True)
class Halves:
    """A full weight `[N, K]` in two halves, and memory in which rows of it are put together."""

    parts: Parts
    residual: Parts
    scratch: torch.Tensor
    """`[R, K]`, contiguous, of the weight's dtype, shared: R is `NestedVariant.merged_rows`."""


class Variant(ABC):
    """One representation of a linear's weight `[N, K]`, for one kind of device."""

    name: ClassVar[str]
    """Key of `NOMINAL_BITS`; the same name on every device."""
    tolerance: ClassVar[float] = 0.01
    """Relative error (Frobenius) of `linear` against `reference` that arithmetic may cause."""
    layout_version: ClassVar[int] = 1
    """Goes up when the parts change, because parts may be stored in files."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer

    @property
    @abstractmethod
    def kernel(self) -> str:
        """What `linear` runs, for logs and the status."""

    @property
    def layout(self) -> str:
        """Names what the parts look like; stored parts are of use only where it is the same."""
        return f"{type(self).__name__}-{self.layout_version}"

    @property
    def nominal_bits(self) -> int:
        return NOMINAL_BITS[self.name]

    @abstractmethod
    def supports(self, rows: int, columns: int) -> str | None:
        """Why a `[rows, columns]` weight can't take this variant; None if it can."""

    def group_size(self, columns: int) -> int:
        """Weights that share one scale in a row of `columns`."""
        return columns

    def for_weight(self, weight: torch.Tensor) -> Variant:
        """What is to be used for this weight: itself, or a stand-in where its values need one.

        Waits for the device; meant for start-up. Raises ValueError for a damaged weight, at the
        latest in `encode`.
        """
        return self

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a floating `[N, K]` weight, contiguous, on the host, in slab order.

        Raises ValueError for a shape that `supports` refuses, or for a damaged weight.
        """

    @abstractmethod
    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x [..., K] @ weight.T + bias`, in the dtype of `x`, `[..., N]`. M may be 0."""

    @abstractmethod
    def reference(self, weight: torch.Tensor) -> torch.Tensor:
        """float32 `[N, K]`: the weight that `linear` on `encode(weight)` stands for."""


class DerivedVariant(Variant):
    """A variant that the device makes from the full weight by itself, without host traffic.

    Every part has one entry per row of the weight, `[N, ...]`, and rows do not depend on each
    other: so a weight may be derived in blocks of rows, of the weight and of every part alike.
    """

    @abstractmethod
    def empty_parts(
        self, rows: int, columns: int, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Parts without content, contiguous, in slab order. On `meta` they are just the layout."""

    @abstractmethod
    def derive(self, full: torch.Tensor, out: Parts) -> None:
        """Write the parts of `full` (contiguous `[N, K]`, or a block of its rows) into `out`.

        `out` lies on the device of `full` and must not overlap it. On a GPU this only enqueues, on
        the current stream; nothing is checked.
        """

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        check_weight(weight, self.nominal_bits, weight.shape[-1])
        rows, columns = weight.shape
        if reason := self.supports(rows, columns):
            raise ValueError(reason)
        parts = self.empty_parts(rows, columns, weight.device)
        self.derive(weight.contiguous(), parts)
        return {name: part.cpu() for name, part in parts.items()}


class NestedVariant(DerivedVariant):
    """A derived variant whose parts and a *residual* together are the full weight, bit for bit."""

    @abstractmethod
    def residual(self, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the parts lack, on the weight's device, contiguous: `lower`, uint8 `[N, K]`.

        Where bf16 weights need it, also `exception_index` (int32 `[E]`, into the flattened
        weight, ascending) and `exception_bits` (int16 `[E]`). Raises ValueError for a weight that
        `for_weight` would not nest this way.
        """

    @abstractmethod
    def rebuild(self, parts: Parts, residual: Parts, out: torch.Tensor) -> None:
        """Write the full weight into `out` (contiguous `[N, K]`, the dtype it had).

        All on one device and disjoint. On a GPU this only enqueues, on the current stream. For a
        block of rows leave the exceptions out of `residual`, and call `patch` after the last.
        """

    @abstractmethod
    def patch(self, residual: Parts, out: torch.Tensor) -> None:
        """Write the residual's exceptions, if it has any, into a weight `[N, K]` rebuilt."""

    def merged_obstacle(self, rows: int, columns: int) -> str | None:
        """Why `merged_linear` can't take a `[rows, columns]` weight; None if it can."""
        return None

    def prepare_merged(self, weight: torch.Tensor) -> None:
        """Make ready what `merged_linear` runs for `weight`, `[N, K]`, where it lies now.

        Raises RuntimeError, one line with the remedy, where that cannot be had.
        """

    def merged_rows(self, rows: int, columns: int, itemsize: int) -> int:
        """Rows of a `[rows, columns]` weight that `merged_linear` has in scratch at a time."""
        return rows

    def merged_linear(
        self, halves: Halves, x: torch.Tensor, bias: torch.Tensor | None, loaded: Loaded
    ) -> torch.Tensor:
        """The linear at full precision: `linear` of the full weight.

        `loaded` computes with `halves.scratch` as the weight, where that holds all of it. On a GPU
        this only enqueues, and what it runs depends on the shape of `x` alone.
        """
        self.rebuild(halves.parts, halves.residual, halves.scratch)
        return loaded(x, bias)


class QuantizedVariant(Variant):
    """A variant made from integer codes: a quantizer chooses them, the subclass lays them out."""

    parameter_dtype: ClassVar[torch.dtype]
    """Precision of scales and zeros."""

    @abstractmethod
    def pack(self, quantized: QuantizedWeight) -> dict[str, torch.Tensor]:
        """Lay codes on the host out as the kernel wants them."""

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.pack(self._quantize(weight.cpu()))

    def reference(self, weight: torch.Tensor) -> torch.Tensor:
        return self._quantize(weight).dequantize()

    def _quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        if weight.ndim == 2 and (reason := self.supports(*weight.shape)):
            raise ValueError(reason)
        columns = weight.shape[-1]
        return self._quantizer.quantize(
            weight, self.nominal_bits, self.group_size(columns), self.parameter_dtype
        )


class IntegerZerosVariant(Variant):
    """A variant that can also take 4-bit codes with integer zero points from elsewhere."""

    integer_group_sizes: ClassVar[tuple[int, ...]]
    """The sizes of groups that the kernel takes then."""

    @abstractmethod
    def pack_integer_zeros(self, quantized: IntegerZeros) -> dict[str, torch.Tensor]:
        """Lay codes on the host out as the kernel wants them: codes and zero points as they are,
        scales as exactly as the kernel holds them."""


def parts_on_device(variant: Variant, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of `weight`, on its device, and made there where that is possible."""
    if isinstance(variant, DerivedVariant):
        rows, columns = weight.shape
        parts = variant.empty_parts(rows, columns, weight.device)
        variant.derive(weight, parts)
        return parts
    return {name: part.to(weight.device) for name, part in variant.encode(weight).items()}


def rebuild_in_blocks(
    variant: NestedVariant, parts: Parts, residual: Parts, out: torch.Tensor, spare: torch.Tensor
) -> None:
    """`variant.rebuild` where `out` may overwrite rows of `lower` that were read already.

    Of the block of rows at hand `lower` is read from a copy in `spare`, uint8, which holds at least
    one row. The exceptions lie outside `out`.
    """
    rows, columns = out.shape
    step = min(rows, spare.numel() // columns)
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        lower = spare[: (block.stop - start) * columns].view(-1, columns)
        lower.copy_(residual["lower"][block])
        inside = {name: part[block] for name, part in parts.items()}
        variant.rebuild(inside, {"lower": lower}, out[block])
    variant.patch(residual, out)


def rows_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x [..., K]` as a `[M, K]` matrix of `dtype`, as the kernels take it."""
    return x.reshape(-1, x.shape[-1]).to(dtype)


def finish(y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A kernel's `y [M, N]` in the dtype and the leading shape of its input `x`, bias added.

    May write into `y`.
    """
    y = y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y.add_(bias)
