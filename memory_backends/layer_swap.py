"""`layer_swap`: decoder layers overwritten in place by smaller variants (MorphServe, section 4).

Every layer has a slab in the arena. At full precision the slab holds the weights. A step of the
plan copies a variant's image over the slab's head; the tail becomes KV pages. Restoring copies
the image of the variant before. All images, the full weights among them, stay in host memory, so
what comes back is bit for bit what was loaded.

Copies are enqueued on the current stream of the arena's device: the caller chooses one that is
ordered with the forwards that read the slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from memory_backends.arena import Arena
from memory_backends.base import (
    FULL,
    BackendError,
    LayerStep,
    MemoryBackend,
    MemoryReport,
    MorphableLayer,
    PageRange,
)
from memory_backends.slab import Image


class LayerSwapBackend(MemoryBackend):
    name = "layer_swap"

    def __init__(self) -> None:
        self._depth = 0

    def adopt_weights(
        self, layers: Sequence[MorphableLayer], steps: Sequence[LayerStep], device: torch.device
    ) -> None:
        self._layers = list(layers)
        self._steps = list(steps)
        self._device = device
        self._history: list[list[str]] = [[FULL] for _ in layers]
        """Per layer the variants it passes through in plan order, `full` first."""
        for step in steps:
            self._history[step.layer].append(step.variant)
        self._images = [self._make_images(i) for i in range(len(layers))]
        for layer in layers:
            layer.bind(FULL, _placeholders(layer, device))

    def _make_images(self, index: int) -> dict[str, Image]:
        layer, pinned = self._layers[index], self._device.type == "cuda"
        images = {FULL: Image.pack(layer.full_tensors(), pinned=pinned)}
        host = images[FULL].layout.views(images[FULL].data)
        for before, variant in pairwise(self._history[index]):
            images[variant] = Image.pack(layer.variant_tensors(variant, host), pinned=pinned)
            if images[variant].layout.nbytes >= images[before].layout.nbytes:
                # Lending relies on it: a tail only grows from step to step.
                raise BackendError(
                    f"layer {index} is no smaller in {variant} than in {before}; "
                    "leave that step out of the plan"
                )
        return images

    def kv_budget(self, available_bytes: int) -> int:
        return available_bytes - sum(images[FULL].layout.nbytes for images in self._images)

    def allocate(self, base_pages: int, page_bytes: int) -> None:
        slab_bytes = [images[FULL].layout.nbytes for images in self._images]
        self._arena = Arena(base_pages, page_bytes, slab_bytes, self._device)
        self._views = [
            {
                variant: image.layout.views(self._arena.slab(i))
                for variant, image in self._images[i].items()
            }
            for i in range(len(self._layers))
        ]
        for index in range(len(self._layers)):
            self._write(index, FULL)

    @property
    def maximum_pages(self) -> int:
        return self._arena.pages

    @property
    def kv_storage(self) -> torch.Tensor:
        return self._arena.storage

    @property
    def depth(self) -> int:
        return self._depth

    def lendable(self, depth: int) -> list[PageRange]:
        ranges = (
            self._arena.tail_pages(index, self._images[index][variant].layout.nbytes)
            for index, variant in enumerate(self._variants_at(depth))
            if variant != FULL
        )
        return [r for r in ranges if len(r)]

    def lower(self, depth: int) -> None:
        done: list[LayerStep] = []
        try:
            for step in self._steps[self._depth : depth]:
                done.append(step)
                self._write(step.layer, step.variant)
        except Exception as error:
            before = self._variants_at(self._depth)
            for index in {step.layer for step in done}:
                self._write(index, before[index])
            raise BackendError(f"lowering layer {done[-1].layer} failed: {error}") from error
        self._depth = depth

    def prepare(self, depth: int) -> None:
        """Nothing to do: every image lies in host memory from the start."""

    def ready(self, depth: int) -> bool:
        return True

    def restore(self, depth: int) -> None:
        while self._depth > depth:
            index = self._steps[self._depth - 1].layer
            before = self._variants_at(self._depth - 1)[index]
            try:
                self._write(index, before)
            except Exception as error:
                self._write(index, self._variants_at(self._depth)[index])
                raise BackendError(f"restoring layer {index} failed: {error}") from error
            self._depth -= 1

    @property
    def layers_lowered(self) -> int:
        return len({step.layer for step in self._steps[: self._depth]})

    @property
    def host_bytes(self) -> int:
        return sum(image.data.nbytes for images in self._images for image in images.values())

    def report(self) -> MemoryReport:
        now = self._variants_at(self._depth)
        sizes = [(variant, self._images[i][variant].layout.nbytes) for i, variant in enumerate(now)]
        full = sum(nbytes for variant, nbytes in sizes if variant == FULL)
        lowered = sum(nbytes for variant, nbytes in sizes if variant != FULL)
        base = self._arena.base_pages * self._arena.page_bytes
        lent = sum(len(r) for r in self.lendable(self._depth)) * self._arena.page_bytes
        images = [(v, im.data.nbytes) for per_layer in self._images for v, im in per_layer.items()]
        return MemoryReport(
            full_weights=full,
            variant_weights=lowered,
            kv_base=base,
            kv_lent=lent,
            unused=self._arena.storage.nbytes - full - lowered - base - lent,
            host_backup=sum(nbytes for variant, nbytes in images if variant == FULL),
            host_variants=sum(nbytes for variant, nbytes in images if variant != FULL),
        )

    def _variants_at(self, depth: int) -> list[str]:
        """Per layer the variant in effect when `depth` steps are applied."""
        applied = [0] * len(self._layers)
        for step in self._steps[:depth]:
            applied[step.layer] += 1
        return [history[n] for history, n in zip(self._history, applied, strict=True)]

    def _write(self, index: int, variant: str) -> None:
        """Overwrite the slab's head by `variant` and compute with it from the next forward on."""
        image = self._images[index][variant]
        self._arena.slab(index)[: image.data.numel()].copy_(image.data, non_blocking=True)
        self._layers[index].bind(variant, self._views[index][variant])


def _placeholders(layer: MorphableLayer, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the right shape and next to no memory, until the arena exists."""
    return {
        name: torch.zeros(1, dtype=tensor.dtype, device=device).expand(tensor.shape)
        for name, tensor in layer.full_tensors().items()
    }
