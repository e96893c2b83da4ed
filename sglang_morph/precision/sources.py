"""Where variants come from, if they are not to be quantized as the server starts."""

from __future__ import annotations

from typing import Protocol

from memory_backends.base import TensorMap


class SourceError(ValueError):
    """A source of variants can't be used. One line with cause, remedy and, if known, the layer."""


class VariantSource(Protocol):
    """Variants made beforehand, such as a bundle or a quantized checkpoint of the same model.

    Tensors lie on the host, ready for the kernels of the device that serves: a linear's parts are
    named `<path>.<part>`, as `Variant.encode` makes them; every other name is a parameter of the
    decoder layer that is replaced while the variant is in use, such as `input_layernorm.weight`.
    """

    def provides(self, layer: int, variant: str) -> bool:
        """Whether `tensors` has it. A derived variant that is provided is no longer derived."""

    def tensors(self, layer: int, variant: str) -> TensorMap | None:
        """All tensors of decoder layer `layer` in `variant`, in slab order; None: not from here.

        Raises `SourceError` where they are damaged or cannot be used.
        """
