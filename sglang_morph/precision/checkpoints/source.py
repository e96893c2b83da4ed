"""A quantized checkpoint of the served model as a source of variants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from memory_backends.base import TensorMap
from sglang_morph.precision.checkpoints.files import REMEDY, CheckpointFiles
from sglang_morph.precision.checkpoints.formats import FLOATS, CheckpointFormat, format_of
from sglang_morph.precision.checkpoints.likeness import check_alike
from sglang_morph.precision.names import FUSED, MORPHABLE_LINEARS, NORMS
from sglang_morph.precision.plan import ModelIdentity, PlanError
from sglang_morph.precision.quantizers.rtn import RoundToNearest
from sglang_morph.precision.sources import SourceError
from sglang_morph.precision.variants.registry import create_variant

Shapes = Mapping[str, tuple[int, int]]
"""Morphable linear's path -> its rows and columns, as SGLang fuses it."""

_QKV, _O = "self_attn.qkv_proj", "self_attn.o_proj"


class CheckpointSource:
    """A `VariantSource` of one variant, for every layer. The checkpoint's norms come with it."""

    def __init__(self, folder: str | Path, device_type: str, dtype: torch.dtype) -> None:
        """`dtype` is that of the activations. Reads headers only. Raises `SourceError`."""
        self._files = CheckpointFiles(folder)
        self._format: CheckpointFormat[Any] = format_of(self._files)
        self._encoder = create_variant(self._format.variant, device_type, RoundToNearest())
        self._dtype = dtype
        self._loaded: Callable[[int], TensorMap] | None = None

    @property
    def variant(self) -> str:
        """The one that comes from here."""
        return self._format.variant

    def check(self, identity: ModelIdentity, layers: Iterable[int], shapes: Shapes) -> None:
        """Raises `SourceError`, naming layer and linear, unless all `layers` can come from here.

        Reads headers only, so it can be called before the model is loaded.
        """
        self._check_identity(identity)
        for path, (rows, columns) in shapes.items():
            if reason := self._format.obstacle(self._encoder, columns):
                raise SourceError(f"every layer, {path}: {reason}; quantize it another way")
            if reason := self._encoder.supports(rows, columns):
                raise SourceError(f"every layer, {path}: {reason}; use another variant")
        for layer in layers:
            self._check_layer(layer, shapes)

    def compare_with(self, loaded: Callable[[int], TensorMap]) -> None:
        """Compare what is given out from now on with the weights that were loaded.

        `loaded(layer)`: the layer's morphable weights and norms, named as in a decoder layer of
        SGLang. `tensors` then raises `SourceError` for a layer of another model.
        """
        self._loaded = loaded

    def provides(self, layer: int, variant: str) -> bool:
        return variant == self.variant

    def tensors(self, layer: int, variant: str) -> TensorMap | None:
        if not self.provides(layer, variant):
            return None
        replaced = dict(self._replaced(layer))
        tensors: dict[str, torch.Tensor] = {}
        for path in MORPHABLE_LINEARS:
            weight = self._format.join(
                [self._format.read(self._files, name) for name in self._names(layer, path)]
            )
            if self._loaded is not None:
                check_alike(weight, replaced, self._loaded(layer), path, f"layer {layer}, {path}")
            parts = self._format.pack(self._encoder, weight, self._dtype)
            tensors |= {f"{path}.{part}": tensor for part, tensor in parts.items()}
        return tensors | replaced

    def _replaced(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        for norm in NORMS.values():
            yield f"{norm}.weight", self._files.read(f"{_prefix(layer)}.{norm}.weight")
        names = [f"{name}.bias" for name in self._names(layer, _QKV)]
        if all(self._files.header(name) for name in names):
            yield f"{_QKV}.bias", torch.cat([self._files.read(name) for name in names])

    def _check_identity(self, identity: ModelIdentity) -> None:
        folder = self._files.folder
        try:
            found = ModelIdentity.from_hf_config(SimpleNamespace(**self._files.config))
        except PlanError as error:
            raise SourceError(f"{folder}: {error}") from error
        differences = [
            f"{field.name} is {here!r}, not {served!r}"
            for field in fields(ModelIdentity)
            if (here := getattr(found, field.name)) != (served := getattr(identity, field.name))
        ]
        if differences:
            raise SourceError(f"{folder} is of another model: {', '.join(differences)}; {REMEDY}")

    def _check_layer(self, layer: int, shapes: Shapes) -> None:
        for path, (_, columns) in shapes.items():
            names = self._names(layer, path)
            for name, rows in zip(names, _rows(path, shapes), strict=True):
                self._format.check(self._files, name, rows, columns, f"layer {layer}, {path}")
        for path, norm in NORMS.items():
            name = f"{_prefix(layer)}.{norm}.weight"
            self._files.check(name, shapes[path][1:], FLOATS, f"layer {layer}, {norm}")

    def _names(self, layer: int, path: str) -> list[str]:
        """The checkpoint's linears that `path` consists of."""
        return [f"{_prefix(layer)}.{name}" for name in FUSED.get(path, (path,))]


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}"


def _rows(path: str, shapes: Shapes) -> tuple[int, ...]:
    """Rows of each of the checkpoint's linears that `path` consists of."""
    rows = shapes[path][0]
    if path == _QKV:
        queries = shapes[_O][1]
        return queries, (rows - queries) // 2, (rows - queries) // 2
    parts = len(FUSED.get(path, (path,)))
    return (rows // parts,) * parts
