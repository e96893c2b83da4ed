"""Sizes of the demo's model that the plot and the table need, read from its checkpoint."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import orjson

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Bytes as served in float32."""

    layer_weight_bytes: int
    """Of the linear weights of all decoder layers: what a memory backend may lend."""
    page_bytes: int
    """Of the KV cache of one token, all layers."""


def read_shape(checkpoint: Path) -> ModelShape:
    """The shape of a Llama checkpoint with one safetensors file."""
    config = orjson.loads((checkpoint / "config.json").read_bytes())
    kv_values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return ModelShape(
        layer_weight_bytes=_FLOAT32_BYTES * _linear_values(checkpoint / "model.safetensors"),
        page_bytes=_FLOAT32_BYTES * kv_values,
    )


def _linear_values(weights: Path) -> int:
    """Number of values in the decoder layers' matrices, from the file's header alone."""
    with weights.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = orjson.loads(file.read(length))
    return sum(
        math.prod(entry["shape"])
        for name, entry in header.items()
        if name.startswith("model.layers.") and len(entry["shape"]) == 2
    )
