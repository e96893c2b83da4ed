"""Writes quantized checkpoints in the formats of other tools, from the formats' definitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import save_file

from sglang_morph.precision.quantizers.integer_zeros import IntegerZeros, quantize_integer_zeros
from sglang_morph.precision.variants.fp8 import quantize_rows

Tensors = dict[str, torch.Tensor]
LinearWriter = Callable[[torch.Tensor], Tensors]
"""A weight `[N, K]` to the tensors that stand for it."""


def write_checkpoint(
    folder: Path,
    model: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    quantization: Mapping[str, Any],
    linear: LinearWriter,
) -> Path:
    """`model`: an unquantized checkpoint's tensors; all `*_proj.weight` are quantized."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    for name, tensor in model.items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix("weight")
            tensors |= {module + part: t.contiguous() for part, t in linear(tensor).items()}
        else:
            tensors[name] = tensor.half().contiguous()
    names = sorted(tensors)
    for shard, chosen in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in chosen}, folder / f"model-{shard}.safetensors")
    document = {**config, "quantization_config": dict(quantization)}
    (folder / "config.json").write_bytes(orjson.dumps(document))
    return folder


def awq_config(group_size: int, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
    } | changes


def awq_linear(group_size: int) -> LinearWriter:
    """AutoAWQ's gemm: `[K, N / 8]` words; nibble i of a word is column order[i] of its eight."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def words(values: torch.Tensor) -> torch.Tensor:
        packed = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
        for nibble, column in enumerate(order):
            packed |= values[:, column::8].long() << (4 * nibble)
        return signed(packed)

    def write(weight: torch.Tensor) -> Tensors:
        quantized = quantized_half(weight, group_size)
        return {
            "qweight": words(quantized.codes.t()),
            "qzeros": words(quantized.zeros.t()),
            "scales": quantized.scales.t(),
        }

    return write


def compressed_config(
    form: str, kind: str, bits: int, strategy: str, **weights: Any
) -> dict[str, Any]:
    described = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": described}},
        "ignore": ["lm_head"],
    }


def packed_linear(group_size: int, zeros: str) -> LinearWriter:
    """compressed-tensors' pack-quantized, by its own packer. `zeros`: none, packed or plain."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    def write(weight: torch.Tensor) -> Tensors:
        quantized = quantized_half(weight, group_size)
        if zeros == "none":
            quantized = symmetric(weight, group_size)
        codes, points = (
            (values.to(torch.int16) - 8).to(torch.int8)
            for values in (quantized.codes, quantized.zeros)
        )
        tensors = {
            "weight_packed": pack_to_int32(codes, 4),
            "weight_scale": quantized.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if zeros == "packed":
            tensors["weight_zero_point"] = pack_to_int32(points, 4, packed_dim=0)
        elif zeros == "plain":
            tensors["weight_zero_point"] = points
        return tensors

    return write


def fp8_linear(strategy: str) -> LinearWriter:
    """compressed-tensors' float-quantized."""

    def write(weight: torch.Tensor) -> Tensors:
        if strategy == "channel":
            codes, scales = quantize_rows(weight)
            return {"weight": codes, "weight_scale": scales.unsqueeze(-1).bfloat16()}
        codes, scale = quantize_rows(weight.reshape(1, -1))
        return {"weight": codes.view(weight.shape), "weight_scale": scale.bfloat16()}

    return write


def quantized_half(weight: torch.Tensor, group_size: int) -> IntegerZeros:
    return quantize_integer_zeros(weight.half(), 4, group_size)


def symmetric(weight: torch.Tensor, group_size: int) -> IntegerZeros:
    """Zero point 8 everywhere."""
    grouped = weight.float().view(weight.shape[0], -1, group_size)
    scales = (grouped.abs().amax(-1) / 7.5).half()
    codes = (grouped / scales.float().unsqueeze(-1)).round().clamp(-8, 7) + 8
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    return IntegerZeros(codes.to(torch.uint8).view(weight.shape), scales, zeros)


def signed(words: torch.Tensor) -> torch.Tensor:
    """Unsigned 32-bit words in int64 as int32."""
    return (words - ((words >> 31) << 32)).to(torch.int32)
