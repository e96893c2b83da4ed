"""A layer that fails once, for the tests of what a backend does then."""

from __future__ import annotations

from memory_backends.base import TensorMap


class FailsOnce:
    """Mixed into a layer: fails when asked to take `fail_on`, after everything was switched."""

    fail_on: str | None = None

    def bind(self, variant: str, tensors: TensorMap) -> None:
        super().bind(variant, tensors)  # type: ignore[misc]
        if variant == self.fail_on:
            self.fail_on = None
            raise RuntimeError("no luck")
