"""`semi_unified`: two precisions in one set of bytes, and memory that moves by remapping (DPS).

A layer of the plan is kept as the two halves of a lossless variant. The *upper* halves, the variant
itself, stay where they are for good. The *lower* halves, the residual, lie in a region of units of
physical memory that is shared with the KV cache, in the order of the plan:

    residual range   | step 0    | step 1      | step 2 | step 3 ...
    units            |   0   |   1   |   2   |   3   | ...

At full precision a layer computes from both halves of its weights. A step of the plan makes it
compute with the upper half alone; then depth `d` lends the units that lie wholly in the residuals
of the first `d` steps. So lending copies nothing, and the last unit of a depth may stay at home
because the next layer still reads from it. Coming back, units return home and the residuals are
uploaded from their copies in host memory.

A layer without a step of its own stays as it was loaded and is none of this backend's business.

Where the driver remaps, a forward in flight must have ended, because unmapping does not wait for it
as a copy would. Where it aliases memory, as on a GPU, order on the device is enough: the caller's
current stream comes after the forwards that read the residuals and the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memory_backends.base import (
    FULL,
    BackendError,
    LayerStep,
    MemoryBackend,
    MemoryReport,
    MorphableLayer,
    PageRange,
    TensorMap,
    is_lower,
)
from memory_backends.shared_region import DEFAULT_UNIT_BYTES, SharedRegion
from memory_backends.slab import Image, Layout, placeholders
from memory_backends.units import UnitError, UnitState
from memory_backends.upload import UploadQueue
from memory_backends.vmm import MIB, VmmDriver, VmmError, VmmFatalError, create_driver

HOST_UNIT_BYTES = 2 * MIB
"""Default on a CPU, whose models are small."""


def default_unit_bytes(device_type: str) -> int:
    """Bytes of a unit where none is asked for."""
    return HOST_UNIT_BYTES if device_type == "cpu" else DEFAULT_UNIT_BYTES


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the plan: the layer's halves, and where its residual lies."""

    layer: MorphableLayer
    variant: str
    upper: TensorMap
    kept: TensorMap
    """What else the residual has; never lent."""
    resident_bytes: int
    """Of `upper` and `kept`."""
    image: Image
    """The lower halves, in host memory."""
    start: int
    """Byte of the residual range where the lower halves begin."""

    @property
    def stop(self) -> int:
        return self.start + self.image.layout.nbytes


class SemiUnifiedBackend(MemoryBackend):
    name = "semi_unified"
    lossless_only = True

    def __init__(
        self,
        unit_bytes: int | None = None,
        driver: Callable[[torch.device], VmmDriver] = create_driver,
    ) -> None:
        """`unit_bytes`: a multiple of 2 MiB; None: `default_unit_bytes`."""
        self._asked_unit_bytes = unit_bytes
        self._driver = driver
        self._depth = 0
        self._queued: set[int] = set()
        """Steps whose residual is in the upload queue, or has come through it."""

    def adopt_weights(
        self, layers: Sequence[MorphableLayer], steps: Sequence[LayerStep], device: torch.device
    ) -> None:
        self._device = device
        self._unit_bytes = self._asked_unit_bytes or default_unit_bytes(device.type)
        self._uploads = UploadQueue(device)
        self._check_steps(layers, steps)
        self._scratch_bytes = max(layers[s.layer].prepare_merged(s.variant) for s in steps)
        self._plain_bytes = sum(
            tensor.nbytes
            for index in set(range(len(layers))) - {step.layer for step in steps}
            for tensor in layers[index].full_tensors().values()
        )
        self._steps: list[_Step] = []
        for step in steps:
            self._steps.append(self._adopt(layers[step.layer], step.variant))
        self._release_cached()
        self._units = -(-self._steps[-1].stop // self._unit_bytes)

    @staticmethod
    def _check_steps(layers: Sequence[MorphableLayer], steps: Sequence[LayerStep]) -> None:
        if not steps:
            raise BackendError("no layer is in the plan: there is nothing to lend")
        if len({step.layer for step in steps}) < len(steps):
            raise BackendError("a layer has two steps in the plan: it has one lower precision here")
        for step in steps:
            if not layers[step.layer].is_lossless(step.variant):
                raise BackendError(
                    f"layer {step.layer} is not nested in {step.variant}; "
                    "leave that step out of the plan"
                )

    def _adopt(self, layer: MorphableLayer, variant: str) -> _Step:
        """Split the layer's weights: residual to the host, upper halves on the device."""
        full = layer.full_tensors()
        residual = layer.residual_tensors(variant, full)
        lower = {name: t for name, t in residual.items() if is_lower(name)}
        other = {name: t for name, t in residual.items() if name not in lower}
        image = Image.pack(lower, pinned=self._device.type == "cuda")
        layout = Layout.of({**layer.derived_like(variant), **other})
        del residual, lower
        self._release_cached()
        resident = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device))
        kept = {name: resident.pop(name).copy_(tensor) for name, tensor in other.items()}
        layer.derive(variant, full, resident)
        layer.bind(FULL, placeholders(full, self._device))
        start = self._steps[-1].stop if self._steps else 0
        return _Step(layer, variant, resident, kept, layout.nbytes, image, start)

    def _release_cached(self) -> None:
        """Give memory that torch keeps for reuse back to the device.

        Upper halves, which stay for good, would otherwise pin what is left of blocks that weights
        were in; and units are not allocated through torch.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def kv_budget(self, available_bytes: int) -> int:
        """The shared region comes off; the upper halves are on the device already."""
        rounding = 2 * MIB  # the base part of the KV range ends at the granularity
        return available_bytes - self._units * self._unit_bytes - self._scratch_bytes - rounding

    def allocate(self, base_pages: int, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._base_bytes = base_pages * page_bytes
        self._scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._device)
        try:
            self._region = SharedRegion(
                self._driver(self._device),
                base_bytes=self._base_bytes,
                units=self._units,
                unit_bytes=self._unit_bytes,
            )
        except (VmmError, ValueError) as error:
            raise BackendError(f"the region shared by weights and KV cache: {error}") from error
        self.kv_storage[: self._base_bytes].zero_()
        for step in self._steps:
            self._home_of(step).copy_(step.image.data)
            self._bind_merged(step)
        self._region.uploaded(range(self._units))

    @property
    def maximum_pages(self) -> int:
        return self._region.kv_tensor.numel() // self._page_bytes

    @property
    def kv_storage(self) -> torch.Tensor:
        return self._region.kv_tensor[: self.maximum_pages * self._page_bytes]

    @property
    def depth(self) -> int:
        return self._depth

    def lendable(self, depth: int) -> list[PageRange]:
        units = self._units_at(depth)
        if not units:
            return []
        first = -(-self._region.slot(0).start // self._page_bytes)
        pages = PageRange(first, self._region.slot(units - 1).stop // self._page_bytes)
        return [pages] if len(pages) else []

    def lower(self, depth: int) -> None:
        self._drop_uploads()  # a restore under way is over
        began = self._depth
        try:
            while self._depth < depth:
                step = self._steps[self._depth]
                step.layer.bind(step.variant, step.upper)
                self._depth += 1
            self._lend(self._units_at(depth))
        except VmmFatalError:
            raise
        except Exception as error:
            # Lending comes last and changes nothing where it fails: all residuals are at home.
            for step in self._steps[began : self._depth + 1]:
                self._bind_merged(step)
            self._depth = began
            raise BackendError(f"lowering to {depth} plan steps failed: {error}") from error

    def prepare(self, depth: int) -> None:
        """Bring units home, or lend them again, and queue the residuals that are to come back.

        Units that cannot be brought home now stay where they are; `restore` tries again.
        """
        self._drop_uploads()
        if self._units_at(depth) > self._lent:
            self._lend(self._units_at(depth))
        try:
            self._fetch(depth)
        except BackendError:
            return
        self._uploads.pump()

    def ready(self, depth: int) -> bool:
        """Also where units are not back home, for `restore` to try again and to tell why not."""
        self._uploads.pump()
        return all(
            step not in self._queued or self._uploads.has(step)
            for step in range(depth, self._depth)
        )

    def restore(self, depth: int) -> None:
        self._fetch(depth)
        while self._depth > depth:
            number = self._depth - 1
            step = self._steps[number]
            if number in self._queued:
                self._uploads.wait(number)
            try:
                self._bind_merged(step)
            except Exception as error:
                step.layer.bind(step.variant, step.upper)
                raise BackendError(f"restoring layer {step.layer.index} failed: {error}") from error
            self._depth = number
            self._mark_backed(step.start)

    def limit_uploads(self, bytes_per_s: float | None) -> None:
        self._uploads.limit(bytes_per_s)

    @property
    def layers_lowered(self) -> int:
        return self._depth

    @property
    def host_bytes(self) -> int:
        return sum(step.image.data.nbytes for step in self._steps)

    def report(self) -> MemoryReport:
        lower = sum(step.image.data.nbytes for step in self._steps[self._depth :])
        lowered = sum(step.resident_bytes for step in self._steps[: self._depth])
        resident = sum(step.resident_bytes for step in self._steps)
        lent = sum(len(r) for r in self.lendable(self._depth)) * self._page_bytes
        region = self._region.kv_tensor.nbytes  # base bytes, and as much as all units
        return MemoryReport(
            full_weights=self._plain_bytes + resident - lowered + lower,
            variant_weights=lowered,
            kv_base=self._base_bytes,
            kv_lent=lent,
            unused=region - self._base_bytes - lower - lent,
            host_backup=self.host_bytes,
            host_variants=0,
            detail={
                "scratch": self._scratch.nbytes,
                "units": self._units * self._unit_bytes,
                "units_lent": self._lent * self._unit_bytes,
            },
        )

    # Units

    @property
    def _lent(self) -> int:
        """Units in the KV range: always the first so many, at slots of the same number."""
        return self._region.units.counts()[UnitState.STALE]

    def _units_at(self, depth: int) -> int:
        """Units that lie wholly in the residuals of the first `depth` steps.

        All steps together have all units: what follows in the last one is no one's.
        """
        if depth == len(self._steps):
            return self._units
        return self._steps[depth].start // self._unit_bytes

    def _lend(self, units: int) -> None:
        """Have the first `units` units, or more, in the KV range. Raises `BackendError`."""
        missing = range(self._lent, units)
        if missing:
            self._finish_forwards()
            try:
                self._region.lend(missing)
            except (VmmError, UnitError) as error:
                raise BackendError(f"lending {len(missing)} units failed: {error}") from error

    def _fetch(self, depth: int) -> None:
        """Bring the units of `depth` and above home and queue what is missing there.

        Raises `BackendError`; then all units are where they were.
        """
        surplus = range(self._units_at(depth), self._lent)
        if surplus:
            self._finish_forwards()
            try:
                self._region.take_back(surplus)
            except (VmmError, UnitError) as error:
                raise BackendError(f"taking {len(surplus)} units back failed: {error}") from error
        self._uploads.begin()
        for number in reversed(range(depth, self._depth)):
            if number not in self._queued:
                self._queue(number)

    def _queue(self, number: int) -> None:
        """Upload the part of a residual that lies in units whose content was lost."""
        step = self._steps[number]
        missing = min(step.stop, self._first_backed() * self._unit_bytes) - step.start
        if missing > 0:
            self._uploads.add(number, step.image.data[:missing], self._home_of(step)[:missing])
            self._queued.add(number)

    def _first_backed(self) -> int:
        """Units from here on hold their residuals: lending goes from the first unit upwards, and
        coming back from the last one downwards."""
        units = self._region.units
        unbacked = (i for i in range(len(units)) if units[i].condition.memory != UnitState.BACKED)
        return max(unbacked, default=-1) + 1

    def _mark_backed(self, start: int) -> None:
        """All residuals from byte `start` on are back."""
        first = -(-start // self._unit_bytes)
        self._region.uploaded(range(first, self._first_backed()))

    def _drop_uploads(self) -> None:
        self._uploads.cancel()
        self._queued.clear()

    def _finish_forwards(self) -> None:
        """They may read what is about to be unmapped."""
        if self._region.remaps:
            torch.get_device_module(self._device).synchronize()

    # Layers

    def _home_of(self, step: _Step) -> torch.Tensor:
        return self._region.residual_tensor[step.start : step.stop]

    def _bind_merged(self, step: _Step) -> None:
        lower = step.image.layout.views(self._home_of(step))
        step.layer.bind_merged(step.variant, step.upper, {**lower, **step.kept}, self._scratch)
