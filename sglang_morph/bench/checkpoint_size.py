"""How much memory a checkpoint's weights take once loaded, from its files' headers alone."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import orjson

_FLOATS = ("F32", "F16", "BF16")
"""Loaded as the type that is served; other tensors (codes, scales of 8 bits) stay as they are."""
_VALUE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


def checkpoint_bytes(folder: Path, dtype: str) -> int | None:
    """Bytes as served in `dtype`.

    None without safetensors files in `folder`, or for a type whose size isn't known (`auto`).
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files or dtype not in _VALUE_BYTES:
        return None
    return sum(size for file in files for size in _tensor_bytes(file, _VALUE_BYTES[dtype]))


def _tensor_bytes(file: Path, float_bytes: int) -> Iterator[int]:
    with file.open("rb") as data:
        (length,) = struct.unpack("<Q", data.read(8))
        header = orjson.loads(data.read(length))
    header.pop("__metadata__", None)
    for entry in header.values():
        if entry["dtype"] in _FLOATS:
            yield float_bytes * math.prod(entry["shape"])
        else:
            start, stop = entry["data_offsets"]
            yield stop - start
