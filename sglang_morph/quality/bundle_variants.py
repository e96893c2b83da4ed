"""The variants of a morph bundle as floating weights, out of the very tensors it holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from sglang_morph.bundle.bundle import Bundle, Served
from sglang_morph.bundle.checkpoint import checkpoint_digest
from sglang_morph.bundle.layer_file import read_layer
from sglang_morph.precision.names import MORPHABLE_LINEARS
from sglang_morph.precision.plan import ModelIdentity
from sglang_morph.precision.quantizers.layer import AsTheyAre, variants_for
from sglang_morph.precision.variants.base import Parts, Variant
from sglang_morph.precision.variants.int4_cpu import Int4Cpu
from sglang_morph.precision.variants.int8_cpu import Int8Cpu
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.variants import MadeVariant, make_variants


def open_bundle(folder: Path, checkpoint: Path, model: LayeredModel) -> Bundle:
    """A whole bundle made for `model`, which `checkpoint` holds. Raises `BundleError`."""
    bundle = Bundle.open(folder)
    bundle.check_served(
        Served(
            ModelIdentity.from_hf_config(model.config),
            checkpoint_digest(checkpoint),
            model.device.type,
            str(model.served_dtype).removeprefix("torch."),
        )
    )
    bundle.check_layouts()
    bundle.check_files()
    return bundle


def bundle_variants(bundle: Bundle, model: LayeredModel) -> Iterator[MadeVariant]:
    """Every layer in every variant of the bundle; those it doesn't hold are made as the server
    makes them."""
    held = {name: stored for name, stored in bundle.manifest.variants.items() if stored.layers}
    derived = [name for name in bundle.manifest.variants if name not in held]
    if derived:
        yield from make_variants(model, derived, AsTheyAre(), torch.zeros(1, 1, dtype=torch.long))
    for name, stored in held.items():
        for layer, file in enumerate(stored.layers):
            yield _read(model, layer, name, bundle.folder / file.path, stored.layouts)


def _read(
    model: LayeredModel, layer: int, name: str, path: Path, layouts: dict[str, str]
) -> MadeVariant:
    full = model.weights(layer)
    variants = variants_for(name, model.device.type, full)
    tensors = read_layer(path)
    weights = {
        path: decode(variants[path], _parts_of(path, tensors), full[path].shape[1])
        for path in MORPHABLE_LINEARS
    }
    for tensor_name, tensor in tensors.items():
        owner, _, kind = tensor_name.rpartition(".")
        if owner not in MORPHABLE_LINEARS and kind == "weight":
            weights[owner] = tensor.float()
    placed = {path: weight.to(model.device, model.dtype) for path, weight in weights.items()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return MadeVariant(layer, name, placed, tensors, nbytes, layouts)


def _parts_of(path: str, tensors: Parts) -> dict[str, torch.Tensor]:
    prefix = f"{path}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def decode(variant: Variant, parts: Parts, columns: int) -> torch.Tensor:
    """float32 `[N, columns]`: the weight that `parts` on the host stand for.

    What `Variant.linear` makes of the identity is its weight; but the kernels for the CPU round
    their results to bfloat16, so of those only the codes are taken, which that holds exactly.
    """
    identity = torch.eye(columns)
    if isinstance(variant, Int8Cpu):
        codes, scales, offsets = parts["codes"].float(), parts["scales"].float(), parts["offsets"]
        return codes * scales.unsqueeze(-1) + offsets.unsqueeze(-1)
    if isinstance(variant, Int4Cpu):
        pairs = parts["scales_and_zeros"]
        units = torch.ones_like(pairs)
        units[..., 1] = 0
        codes = variant.linear({**parts, "scales_and_zeros": units}, identity, None).t()
        scales, zeros = pairs.float().permute(2, 1, 0)  # [N, K / group] each
        grouped = codes.reshape(codes.shape[0], scales.shape[1], -1)
        return (grouped * scales.unsqueeze(-1) + zeros.unsqueeze(-1)).view(-1, columns)
    return variant.linear(parts, identity, None).t().contiguous()
