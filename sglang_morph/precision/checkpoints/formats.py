"""The formats of quantized checkpoints that can be read, told by their `config.json`.

All of them keep q, k, v, gate and up apart; a format deals with one such linear, `[N, K]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch

from sglang_morph.precision.checkpoints.files import CheckpointFiles
from sglang_morph.precision.quantizers.integer_zeros import IntegerZeros
from sglang_morph.precision.sources import SourceError
from sglang_morph.precision.variants.base import IntegerZerosVariant, Variant
from sglang_morph.precision.variants.fp8 import Fp8, ScaledFp8
from sglang_morph.precision.variants.int4_marlin import AWQ_ORDER

FLOATS = ("F16", "BF16", "F32")
_NIBBLES = 8
"""4-bit codes in an int32."""

_W = TypeVar("_W", IntegerZeros, ScaledFp8)


class CheckpointFormat(ABC, Generic[_W]):
    """How the linears of a checkpoint are stored, and which variant they can become."""

    variant: ClassVar[str]

    @abstractmethod
    def check(self, files: CheckpointFiles, name: str, rows: int, columns: int, where: str) -> None:
        """Raises `SourceError`, beginning with `where`, unless linear `name` is stored as it
        should be. Reads headers only."""

    @abstractmethod
    def obstacle(self, variant: Variant, columns: int) -> str | None:
        """Why the kernel of `variant` cannot take weights stored like this; None if it can."""

    @abstractmethod
    def read(self, files: CheckpointFiles, name: str) -> _W:
        """Linear `name`, with the codes, scales and zero points that are stored."""

    @abstractmethod
    def join(self, weights: list[_W]) -> _W:
        """One weight with the rows of all."""

    @abstractmethod
    def pack(self, variant: Variant, weight: _W, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The parts that `variant` computes with; `dtype` is that of the activations."""


class _Int4(CheckpointFormat[IntegerZeros]):
    variant = "int4"

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def obstacle(self, variant: Variant, columns: int) -> str | None:
        if not isinstance(variant, IntegerZerosVariant):
            return f"{variant.kernel} takes no integer zero points"
        if self.group_size not in variant.integer_group_sizes:
            sizes = ", ".join(map(str, variant.integer_group_sizes))
            return f"its groups are of {self.group_size}, {variant.kernel} takes {sizes}"
        if columns % self.group_size:
            return f"its groups of {self.group_size} do not divide K = {columns}"
        return None

    def join(self, weights: list[IntegerZeros]) -> IntegerZeros:
        return IntegerZeros(
            torch.cat([w.codes for w in weights]),
            torch.cat([w.scales for w in weights]),
            torch.cat([w.zeros for w in weights]),
        )

    def pack(
        self, variant: Variant, weight: IntegerZeros, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        assert isinstance(variant, IntegerZerosVariant)
        return variant.pack_integer_zeros(
            IntegerZeros(weight.codes, weight.scales.to(dtype), weight.zeros)
        )


class AwqGemm(_Int4):
    """AutoAWQ, version `gemm`: words of eight neighbouring rows' codes, in AWQ's order."""

    def check(self, files: CheckpointFiles, name: str, rows: int, columns: int, where: str) -> None:
        groups = columns // self.group_size
        files.check(f"{name}.qweight", (columns, rows // _NIBBLES), ("I32",), where)
        files.check(f"{name}.qzeros", (groups, rows // _NIBBLES), ("I32",), where)
        files.check(f"{name}.scales", (groups, rows), FLOATS, where)

    def read(self, files: CheckpointFiles, name: str) -> IntegerZeros:
        codes, zeros = (
            _unpack_words(files.read(f"{name}.{part}"))[..., _AWQ_NIBBLE_OF_ROW].flatten(1)
            for part in ("qweight", "qzeros")
        )
        scales = files.read(f"{name}.scales")
        return IntegerZeros(*(t.t().contiguous() for t in (codes, scales, zeros)))


class PackQuantized(_Int4):
    """compressed-tensors, `pack-quantized`: words of eight neighbouring columns' codes, in order.

    Zero points are packed along the rows, or plain int8 as older versions wrote them; symmetric
    ones are not stored.
    """

    def __init__(self, group_size: int, symmetric: bool) -> None:
        super().__init__(group_size)
        self.symmetric = symmetric

    def check(self, files: CheckpointFiles, name: str, rows: int, columns: int, where: str) -> None:
        groups = columns // self.group_size
        files.check(f"{name}.weight_packed", (rows, columns // _NIBBLES), ("I32",), where)
        files.check(f"{name}.weight_scale", (rows, groups), FLOATS, where)
        if files.header(f"{name}.weight_g_idx"):
            raise SourceError(
                f"{where}: its columns are grouped out of order (weight_g_idx), which the kernel "
                "does not take; give a checkpoint made without activation reordering by group"
            )
        if not self.symmetric:
            zeros = files.header(f"{name}.weight_zero_point")
            packed = zeros is not None and zeros.dtype == "I32"
            shape = (rows // _NIBBLES if packed else rows, groups)
            files.check(f"{name}.weight_zero_point", shape, ("I32", "I8"), where)

    def read(self, files: CheckpointFiles, name: str) -> IntegerZeros:
        codes = _unpack_words(files.read(f"{name}.weight_packed")).flatten(1)
        scales = files.read(f"{name}.weight_scale")
        return IntegerZeros(codes, scales, self._zeros(files, name, scales))

    def _zeros(self, files: CheckpointFiles, name: str, scales: torch.Tensor) -> torch.Tensor:
        if self.symmetric:
            return torch.full(scales.shape, 8, dtype=torch.uint8)
        stored = files.read(f"{name}.weight_zero_point")
        if stored.dtype == torch.int8:
            return (stored + 8).to(torch.uint8)
        return _unpack_words(stored.t()).flatten(1).t().contiguous()


class FloatQuantized(CheckpointFormat[ScaledFp8]):
    """compressed-tensors, `float-quantized`: E4M3 codes, one scale for a row or for all."""

    variant = "fp8"

    def check(self, files: CheckpointFiles, name: str, rows: int, columns: int, where: str) -> None:
        files.check(f"{name}.weight", (rows, columns), ("F8_E4M3",), where)
        scale = files.header(f"{name}.weight_scale")
        shape = (1,) if scale is not None and scale.shape in ((), (1,), (1, 1)) else (rows, 1)
        if shape == (rows, 1) or scale is None:
            files.check(f"{name}.weight_scale", shape, FLOATS, where)

    def obstacle(self, variant: Variant, columns: int) -> str | None:
        return None if isinstance(variant, Fp8) else f"{variant.kernel} takes no scaled fp8"

    def read(self, files: CheckpointFiles, name: str) -> ScaledFp8:
        codes = files.read(f"{name}.weight")
        scales = files.read(f"{name}.weight_scale").float().flatten()
        return ScaledFp8(codes, scales.expand(codes.shape[0]))

    def join(self, weights: list[ScaledFp8]) -> ScaledFp8:
        # Concatenation of 8-bit floats is not implemented; of their bytes it is.
        codes = torch.cat([w.codes.view(torch.uint8) for w in weights])
        return ScaledFp8(codes.view(torch.float8_e4m3fn), torch.cat([w.scales for w in weights]))

    def pack(
        self, variant: Variant, weight: ScaledFp8, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        return {"codes": weight.codes.contiguous(), "scales": weight.scales.contiguous()}


_AWQ_NIBBLE_OF_ROW = [AWQ_ORDER.index(row) for row in range(_NIBBLES)]


def _unpack_words(words: torch.Tensor) -> torch.Tensor:
    """int32 `[..., M]` to uint8 `[..., M, 8]`, the lowest nibble first."""
    shifts = torch.arange(0, 4 * _NIBBLES, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)


def format_of(files: CheckpointFiles) -> CheckpointFormat[Any]:
    """Raises `SourceError`, saying what it found, for a checkpoint of any other format."""
    config = files.config.get("quantization_config")
    if not isinstance(config, dict):
        raise _refusal(files, "it is not quantized")
    method = config.get("quant_method")
    if method == "awq":
        return _awq(files, config)
    if method == "compressed-tensors":
        return _compressed_tensors(files, config)
    raise _refusal(files, f"it is quantized by {method}")


def _awq(files: CheckpointFiles, config: dict[str, Any]) -> AwqGemm:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refusal(files, f"its AWQ version is {version}, not gemm")
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise _refusal(files, f"it has {bits} bits, not 4")
    if not config.get("zero_point", True):
        raise _refusal(files, "it has no zero points")
    return AwqGemm(_group_size(files, config.get("group_size", config.get("q_group_size"))))


def _compressed_tensors(
    files: CheckpointFiles, config: dict[str, Any]
) -> PackQuantized | FloatQuantized:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or not isinstance(groups[0].get("weights"), dict):
        raise _refusal(files, f"it quantizes linears in {len(groups)} ways, not in one")
    weights = groups[0]["weights"]
    stored = config.get("format"), weights.get("type"), weights.get("num_bits")
    strategy = weights.get("strategy")
    if stored == ("pack-quantized", "int", 4) and strategy == "group":
        return PackQuantized(
            _group_size(files, weights.get("group_size")), weights.get("symmetric", True)
        )
    if stored == ("float-quantized", "float", 8) and strategy in ("channel", "tensor"):
        return FloatQuantized()
    kind = " ".join(str(part) for part in (*stored, strategy))
    raise _refusal(files, f"its weights are {kind}")


def _group_size(files: CheckpointFiles, size: Any) -> int:
    if not isinstance(size, int) or size < 1:
        raise _refusal(files, f"its group size is {size}")
    return size


def _refusal(files: CheckpointFiles, what: str) -> SourceError:
    return SourceError(
        f"{files.folder} cannot be a source of variants: {what}; give an AutoAWQ checkpoint "
        "(4 bits, gemm, zero points, groups), or one of compressed-tensors, pack-quantized (4 bits "
        "in groups) or float-quantized (fp8 with scales by channel or tensor)"
    )
