"""Which variants a kind of device has. Imports no torch until one is created."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sglang_morph.precision.names import NOMINAL_BITS

if TYPE_CHECKING:
    from sglang_morph.precision.quantizers.base import Quantizer
    from sglang_morph.precision.variants.base import Variant

_PACKAGE = "sglang_morph.precision.variants"

VARIANTS: dict[tuple[str, str], str] = {
    ("int8", "cpu"): f"{_PACKAGE}.int8_cpu:Int8Cpu",
    ("int4", "cpu"): f"{_PACKAGE}.int4_cpu:Int4Cpu",
    ("int3", "cpu"): f"{_PACKAGE}.int3_cpu:Int3Cpu",
    ("nested_fp8", "cpu"): f"{_PACKAGE}.nested_fp8:NestedFp8",
    ("fp8", "cpu"): f"{_PACKAGE}.fp8:Fp8",
    ("nested_fp8", "cuda"): f"{_PACKAGE}.fp8_cuda:NestedFp8Cuda",
    ("fp8", "cuda"): f"{_PACKAGE}.fp8_cuda:Fp8Cuda",
    ("int8", "cuda"): f"{_PACKAGE}.torch_reference:Int8Torch",
    ("int4", "cuda"): f"{_PACKAGE}.int4_autoawq:create_int4",
}
"""(variant, device type) -> `module:class`, or a function that makes one; imported when first
used."""

LOSSLESS_VARIANTS = ("nested_fp8",)
"""Variants that become the full weights again with a residual. Where a weight's values do not
allow it, they take a stand-in that does not."""

FP8_VARIANTS = ("nested_fp8", "fp8")
"""Variants that a GPU needs FP8 tensor cores for."""

FP8_CAPABILITY = (8, 9)
"""The first compute capability with FP8 tensor cores."""


def default_variants(device_type: str) -> tuple[str, ...]:
    """The variants a layer passes through by default. Raises ValueError for an unknown device.

    Asks the GPU, where there is one, what it can do. A server goes by what its kernels cost where
    that is known (`kernel_times`).
    """
    if device_type == "cpu":
        return ("int8", "int4")
    if device_type == "cuda":
        return ("nested_fp8",) if has_fp8() else ("int8",)
    raise ValueError(f"there are no variants for device {device_type!r}; use cpu or cuda")


def has_fp8() -> bool:
    """Whether there is a GPU with FP8 tensor cores."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY


def check_variant(name: str, device_type: str) -> None:
    """Raises ValueError, naming the known ones, unless `device_type` has variant `name`."""
    if (name, device_type) not in VARIANTS:
        known = ", ".join(variant for variant, device in VARIANTS if device == device_type)
        raise ValueError(
            f"variant {name!r} does not exist on device {device_type!r}; "
            f"known there: {known or 'none'}"
        )


def create_variant(name: str, device_type: str, quantizer: Quantizer) -> Variant:
    """Raises ValueError as `check_variant` does."""
    check_variant(name, device_type)
    module, _, attribute = VARIANTS[name, device_type].partition(":")
    variant: Variant = getattr(import_module(module), attribute)(quantizer)
    return variant


def register_variant(name: str, device_type: str, target: str, bits: int) -> None:
    """Register `target` (`module:class`, a `Variant` built from a quantizer).

    Raises ValueError where it exists already, or has other bits on another device.
    """
    if (name, device_type) in VARIANTS:
        raise ValueError(f"variant {name!r} on device {device_type!r} is registered already")
    if NOMINAL_BITS.setdefault(name, bits) != bits:
        raise ValueError(f"variant {name!r} has {NOMINAL_BITS[name]} bits, not {bits}")
    VARIANTS[name, device_type] = target
