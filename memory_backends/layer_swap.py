"""`layer_swap`: decoder layers overwritten in place by smaller variants (MorphServe, section 4).

Every layer has a slab in the arena. At full precision the slab holds the weights. A step of the
plan puts a variant into the slab's head; the tail becomes KV pages. What comes back is bit for bit
what was loaded. A variant comes and goes in one of two ways:

- **image**: its bytes, and those of the variant before, lie in host memory and are copied over the
  slab's head.
- **derived**: it is computed on the device from the full weights, so a downshift uploads nothing.
  If it is also *lossless*, the full weights are rebuilt from it and a residual; only the residual
  lies in host memory and is uploaded, ahead of time, into the slab's own tail. They are written
  from front to back over the variant, which is copied aside, and the residual, which need not be
  (`residual_room.py`).

Work is enqueued on the current stream of the arena's device: the caller chooses one that is ordered
with the forwards that read the slab. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
from memory_backends.residual_room import residual_start, spare_bytes
from memory_backends.slab import Image, Layout, placeholders
from memory_backends.upload import UploadQueue


class LayerSwapBackend(MemoryBackend):
    name = "layer_swap"

    def __init__(self) -> None:
        self._depth = 0

    def adopt_weights(
        self, layers: Sequence[MorphableLayer], steps: Sequence[LayerStep], device: torch.device
    ) -> None:
        self._layers = list(layers)
        self._device = device
        self._uploads = UploadQueue(device)
        self._history: list[list[str]] = [[FULL] for _ in layers]
        """Per layer the variants it passes through in plan order, `full` first."""
        self._changes: list[_Change] = []
        """Every step of the plan with the variant its layer had before."""
        for step in steps:
            history = self._history[step.layer]
            self._changes.append(_Change(step.layer, history[-1], step.variant))
            history.append(step.variant)
        self._images: list[dict[str, Image]] = []
        self._residuals: list[Image | None] = []
        self._layouts: list[dict[str, Layout]] = []
        for index in range(len(layers)):
            self._adopt(index)

    def _adopt(self, index: int) -> None:
        """Make the layer's layouts, images and residual, and release its device memory."""
        layer, history = self._layers[index], self._history[index]
        pinned = self._device.type == "cuda"
        full = layer.full_tensors()
        lossless = len(history) > 1 and layer.is_lossless(history[1])
        # The image of the full weights is needed once in any case, to fill the slab.
        images = {FULL: Image.pack(full, pinned=pinned and not lossless)}
        layouts = {FULL: images[FULL].layout}
        host = images[FULL].layout.views(images[FULL].data)
        for position, variant in enumerate(history[1:], start=1):
            if position == 1 and layer.is_derived(variant):
                layouts[variant] = Layout.of(layer.derived_like(variant))
            if variant not in layouts or len(history) > position + 1:
                images[variant] = Image.pack(layer.variant_tensors(variant, host), pinned=pinned)
                layouts[variant] = images[variant].layout
        self._check_shrinking(index, layouts)
        residual = layer.residual_tensors(history[1], full) if lossless else None
        self._residuals.append(None if residual is None else Image.pack(residual, pinned=pinned))
        self._images.append(images)
        self._layouts.append(layouts)
        layer.bind(FULL, placeholders(full, self._device))

    def _check_shrinking(self, index: int, layouts: dict[str, Layout]) -> None:
        """Lending relies on it: a tail only grows from step to step."""
        for before, variant in pairwise(self._history[index]):
            if layouts[variant].nbytes >= layouts[before].nbytes:
                raise BackendError(
                    f"layer {index} is no smaller in {variant} than in {before}; "
                    "leave that step out of the plan"
                )

    def kv_budget(self, available_bytes: int) -> int:
        slabs = sum(self._slab_bytes(index) for index in range(len(self._layers)))
        return available_bytes - slabs - self._scratch_bytes()

    def _slab_bytes(self, index: int) -> int:
        """The full weights, or a lossless variant and its residual if they need more."""
        full, residual = self._layouts[index][FULL], self._residuals[index]
        if residual is None:
            return full.nbytes
        lossless = self._layouts[index][self._history[index][1]]
        end = residual_start(full, lossless, residual.layout) + residual.layout.nbytes
        return max(full.nbytes, end)

    def _scratch_bytes(self) -> int:
        """A derived variant is made beside the slab it goes into, and rebuilt from beside it."""
        derived = [
            self._layouts[index][history[1]].nbytes
            for index, history in enumerate(self._history)
            if len(history) > 1 and self._layers[index].is_derived(history[1])
        ]
        spare = [spare_bytes(r.layout) for r in self._residuals if r is not None]
        return max(derived, default=0) + max(spare, default=0)

    def allocate(self, base_pages: int, page_bytes: int) -> None:
        slabs = [self._slab_bytes(index) for index in range(len(self._layers))]
        self._arena = Arena(base_pages, page_bytes, slabs, self._device)
        self._scratch = torch.empty(self._scratch_bytes(), dtype=torch.uint8, device=self._device)
        self._views = [
            {variant: layout.views(self._arena.slab(i)) for variant, layout in layouts.items()}
            for i, layouts in enumerate(self._layouts)
        ]
        for index, residual in enumerate(self._residuals):
            self._copy_image(index, FULL)
            if residual is not None:
                del self._images[index][FULL]

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
            self._arena.tail_pages(index, self._layouts[index][variant].nbytes)
            for index, variant in enumerate(self._variants_at(depth))
            if variant != FULL
        )
        return [r for r in ranges if len(r)]

    def lower(self, depth: int) -> None:
        self._uploads.cancel()  # a restore under way is over; its tails are lent again
        began = self._depth
        try:
            while self._depth < depth:
                self._apply(self._changes[self._depth])
                self._depth += 1
        except Exception as error:
            failed = self._changes[self._depth]
            self._write_again(failed.layer, failed.before)
            self._undo_to(began)
            raise BackendError(f"lowering layer {failed.layer} failed: {error}") from error

    def prepare(self, depth: int) -> None:
        """Queue the residuals that a restore to `depth` needs, into the withdrawn tails."""
        self._uploads.cancel()
        self._uploads.begin()
        for change in reversed(self._changes[depth : self._depth]):
            if self._is_rebuilt(change):
                self._queue_residual(change.layer)
        self._uploads.pump()

    def ready(self, depth: int) -> bool:
        self._uploads.pump()
        return all(
            self._uploads.has(change.layer)
            for change in self._changes[depth : self._depth]
            if self._is_rebuilt(change)
        )

    def restore(self, depth: int) -> None:
        while self._depth > depth:
            self._undo(self._changes[self._depth - 1])
            self._depth -= 1

    def limit_uploads(self, bytes_per_s: float | None) -> None:
        self._uploads.limit(bytes_per_s)

    @property
    def layers_lowered(self) -> int:
        return len({change.layer for change in self._changes[: self._depth]})

    @cached_property
    def host_bytes(self) -> int:
        """Read only once the arena exists; constant from then on."""
        return sum(self._host_bytes())

    def report(self) -> MemoryReport:
        now = [
            (variant, self._layouts[i][variant].nbytes)
            for i, variant in enumerate(self._variants_at(self._depth))
        ]
        full = sum(nbytes for variant, nbytes in now if variant == FULL)
        lowered = sum(nbytes for variant, nbytes in now if variant != FULL)
        base = self._arena.base_pages * self._arena.page_bytes
        lent = sum(len(r) for r in self.lendable(self._depth)) * self._arena.page_bytes
        host_backup, host_variants = self._host_bytes()
        return MemoryReport(
            full_weights=full,
            variant_weights=lowered,
            kv_base=base,
            kv_lent=lent,
            unused=self._arena.storage.nbytes - full - lowered - base - lent,
            host_backup=host_backup,
            host_variants=host_variants,
            detail={"scratch": self._scratch.nbytes},
        )

    def _host_bytes(self) -> tuple[int, int]:
        """(what brings the full weights back, images of variants)."""
        images = [(v, im.data.nbytes) for per_layer in self._images for v, im in per_layer.items()]
        residuals = sum(r.data.nbytes for r in self._residuals if r is not None)
        full = sum(nbytes for variant, nbytes in images if variant == FULL)
        return full + residuals, sum(nbytes for _, nbytes in images) - full

    def _variants_at(self, depth: int) -> list[str]:
        """Every layer's variant when `depth` steps are applied."""
        applied = [0] * len(self._layers)
        for change in self._changes[:depth]:
            applied[change.layer] += 1
        return [history[n] for history, n in zip(self._history, applied, strict=True)]

    def _apply(self, change: _Change) -> None:
        """Bring the smaller variant into the slab's head and compute with it from now on."""
        if change.before == FULL and self._layers[change.layer].is_derived(change.after):
            self._derive(change.layer, change.after)
        else:
            self._copy_image(change.layer, change.after)

    def _undo(self, change: _Change) -> None:
        """Bring the variant before back. On `BackendError` the smaller one is in place.

        Any other exception means that neither could be written: the scheduler must not go on.
        """
        if self._is_rebuilt(change):
            self._rebuild(change.layer, change.after)
            return
        try:
            self._copy_image(change.layer, change.before)
        except Exception as error:
            if change.after not in self._images[change.layer]:
                raise
            self._copy_image(change.layer, change.after)
            raise BackendError(f"restoring layer {change.layer} failed: {error}") from error

    def _undo_to(self, depth: int) -> None:
        """Take back what a downshift has done so far; the tails are not lent yet."""
        self.prepare(depth)
        self.restore(depth)

    def _write_again(self, index: int, variant: str) -> None:
        """Undo a write that may have been cut short. A derived variant never gets that far."""
        if variant in self._images[index]:
            self._copy_image(index, variant)

    def _is_rebuilt(self, change: _Change) -> bool:
        return change.before == FULL and self._residuals[change.layer] is not None

    def _derive(self, index: int, variant: str) -> None:
        layout = self._layouts[index][variant]
        self._layers[index].derive(variant, self._views[index][FULL], layout.views(self._scratch))
        self._arena.slab(index)[: layout.nbytes].copy_(self._scratch[: layout.nbytes])
        self._layers[index].bind(variant, self._views[index][variant])

    def _rebuild(self, index: int, variant: str) -> None:
        layout = self._layouts[index][variant]
        head = self._arena.slab(index)[: layout.nbytes]
        parts, spare = self._scratch[: layout.nbytes], self._scratch[layout.nbytes :]
        self._uploads.wait(index)
        parts.copy_(head)
        try:
            self._layers[index].rebuild(
                variant,
                layout.views(parts),
                self._residual(index).layout.views(self._tail_for(index)),
                self._views[index][FULL],
                spare,
            )
        except Exception as error:
            head.copy_(parts)
            self._uploads.begin()
            self._queue_residual(index)  # some of it may be overwritten
            raise BackendError(f"rebuilding layer {index} failed: {error}") from error
        self._layers[index].bind(FULL, self._views[index][FULL])

    def _copy_image(self, index: int, variant: str) -> None:
        image = self._images[index][variant]
        self._arena.slab(index)[: image.data.numel()].copy_(image.data, non_blocking=True)
        self._layers[index].bind(variant, self._views[index][variant])

    def _queue_residual(self, index: int) -> None:
        self._uploads.add(index, self._residual(index).data, self._tail_for(index))

    def _tail_for(self, index: int) -> torch.Tensor:
        """The slab's end, as long as the residual: free from the withdrawal to the rebuild."""
        return self._arena.slab(index)[-self._residual(index).layout.nbytes :]

    def _residual(self, index: int) -> Image:
        residual = self._residuals[index]
        assert residual is not None
        return residual


@dataclass(frozen=True, slots=True)
class _Change:
    """A step of the plan: `layer` goes from variant `before` to `after`."""

    layer: int
    before: str
    after: str
