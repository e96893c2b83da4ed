"""One decoder layer in one variant, as a safetensors file."""

from __future__ import annotations

from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from memory_backends.base import TensorMap

_ORDER = "order"
"""In the metadata: the tensors' names in slab order, which the format does not keep."""


def layer_path(variant: str, layer: int) -> str:
    """From the bundle's folder."""
    return f"{variant}/layer_{layer:03d}.safetensors"


def write_layer(path: Path, tensors: TensorMap) -> None:
    """The file is whole whenever it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    # Tensors that share memory are refused by the format.
    owned = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(owned, scratch, {_ORDER: orjson.dumps(list(tensors)).decode()})
    scratch.replace(path)


def read_layer(path: Path) -> dict[str, torch.Tensor]:
    """In slab order. Raises OSError or ValueError."""
    try:
        with safe_open(path, framework="pt") as file:
            names = orjson.loads(file.metadata()[_ORDER])
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"not a layer of a bundle ({error})") from error
