"""A bundle's tensors, for the layers of a server."""

from __future__ import annotations

from memory_backends.base import TensorMap
from sglang_morph.bundle.bundle import Bundle
from sglang_morph.bundle.layer_file import read_layer
from sglang_morph.precision.sources import SourceError


class BundleSource:
    """A `VariantSource` over a bundle that has been checked."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def provides(self, layer: int, variant: str) -> bool:
        stored = self._bundle.manifest.variants.get(variant)
        return stored is not None and layer < len(stored.layers)

    def tensors(self, layer: int, variant: str) -> TensorMap | None:
        if not self.provides(layer, variant):
            return None
        file = self._bundle.folder / self._bundle.manifest.variants[variant].layers[layer].path
        try:
            return read_layer(file)
        except (OSError, ValueError) as error:
            raise SourceError(
                f"layer {layer} in {variant} cannot be read from {file}: {error}; "
                "make the bundle again"
            ) from error
