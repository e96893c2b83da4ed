"""The interface every memory backend implements, and what it needs to know of a model's layers.

A backend owns the bytes that can move between weights and KV cache. It knows nothing of SGLang's
scheduler: the executor decides when to move, SGLang's allocator hands pages out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

FULL = "full"
"""Name of the variant that holds the weights as loaded."""

LOWER = "lower"
"""Last part of a residual tensor's name where it holds lower halves; other residuals are small."""

TensorMap = Mapping[str, torch.Tensor]


def is_lower(name: str) -> bool:
    """Whether the residual tensor of that name holds lower halves."""
    return name.rpartition(".")[2] == LOWER


class MorphableLayer(Protocol):
    """One decoder layer whose linear weights a backend may overwrite in place."""

    index: int

    def full_tensors(self) -> TensorMap:
        """The layer's morphable weights by name, in slab order."""

    def variant_tensors(self, variant: str, full: TensorMap) -> TensorMap:
        """Kernel-ready tensors of `variant`, made from `full` (host), by name, in slab order."""

    def is_derived(self, variant: str) -> bool:
        """Whether `derive` can make it on the device from the full weights."""

    def is_lossless(self, variant: str) -> bool:
        """Whether `rebuild` can make the full weights from it; only derived variants are."""

    def derived_like(self, variant: str) -> TensorMap:
        """Names, shapes and dtypes of a derived variant's tensors (meta), in slab order."""

    def derive(self, variant: str, full: TensorMap, out: TensorMap) -> None:
        """Compute the variant's tensors into `out`, on the device, on the current stream."""

    def residual_tensors(self, variant: str, full: TensorMap) -> TensorMap:
        """What `rebuild` needs besides a lossless variant's tensors, by name; on any device."""

    def rebuild(
        self,
        variant: str,
        tensors: TensorMap,
        residual: TensorMap,
        out: TensorMap,
        spare: torch.Tensor,
    ) -> None:
        """Compute the full weights, bit for bit, into `out`, on the current stream.

        `residual` lies over the end of `out`, placed by `residual_room.residual_start`: writing
        from front to back, in slab order, never reaches what has yet to be read, but for the rows
        at hand. Their lower halves are to be read from a copy in `spare` (uint8, on the device, as
        long as the longest tensor of lower halves or `residual_room.SPARE_BYTES`).
        """

    def bind(self, variant: str, tensors: TensorMap) -> None:
        """Compute with `variant`, reading `tensors` (views of the slab), from the next forward on.

        Must not fail and must not copy: it only switches references.
        """

    def prepare_merged(self, variant: str) -> int:
        """Make ready what `bind_merged` computes with; the bytes of scratch memory that it needs.

        May compile kernels, and raises where they cannot be had; no weight is touched.
        """

    def bind_merged(
        self, variant: str, tensors: TensorMap, residual: TensorMap, scratch: torch.Tensor
    ) -> None:
        """Compute at full precision from a lossless variant and its residual.

        `scratch` (uint8, on the device) is shared by all layers: it holds a weight, or some of its
        rows, from the moment they are rebuilt to the end of the operation that reads them. Only
        switches references, as `bind`.
        """


class LayerStep(Protocol):
    """One step of a precision plan: `layer` takes `variant`."""

    @property
    def layer(self) -> int: ...
    @property
    def variant(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PageRange:
    """KV page ids `[start, stop)`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes by owner. Device owners add up to the arena; `host_*` lie in host memory."""

    full_weights: int
    variant_weights: int
    kv_base: int
    kv_lent: int
    unused: int
    host_backup: int
    host_variants: int
    detail: dict[str, int] = field(default_factory=dict)


class BackendError(RuntimeError):
    """A transition could not be carried out; the backend is as it was before."""


class MemoryBackend(ABC):
    """Moves bytes between weights and KV pages. All calls come from the scheduler thread.

    Life: `adopt_weights` (after loading) -> `kv_budget` (while SGLang sizes its pools) ->
    `allocate` (base pages are known) -> any number of `lower`, or `prepare`, `ready`, `restore`.
    A *depth* is the number of plan steps applied; 0 is full precision.
    """

    name: ClassVar[str]
    lossless_only: ClassVar[bool] = False
    """Whether only lossless variants will do; then a layer can take one step at most."""

    @abstractmethod
    def adopt_weights(
        self, layers: Sequence[MorphableLayer], steps: Sequence[LayerStep], device: torch.device
    ) -> None:
        """Back the layers' weights up to the host and release their device memory.

        Raises `BackendError` for a step that would not free memory.
        """

    @abstractmethod
    def kv_budget(self, available_bytes: int) -> int:
        """Bytes of `available_bytes` that may hold base KV pages (the slabs come off)."""

    @abstractmethod
    def allocate(self, base_pages: int, page_bytes: int) -> None:
        """Lay out base pages and slabs, bring the weights back, at full precision.

        `base_pages` counts page 0, SGLang's padding sink.
        """

    @property
    @abstractmethod
    def maximum_pages(self) -> int:
        """One past the highest page id that can ever be lent; includes page 0."""

    @property
    @abstractmethod
    def kv_storage(self) -> torch.Tensor:
        """uint8, `maximum_pages * page_bytes`: page id `i` is bytes `[i, i + 1) * page_bytes`."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of plan steps applied now."""

    @abstractmethod
    def lendable(self, depth: int) -> list[PageRange]:
        """Pages that are lent when `depth` steps are applied. Pure; ascending and disjoint."""

    @abstractmethod
    def lower(self, depth: int) -> None:
        """Apply steps up to `depth` (deeper than now).

        On failure the weights are as before and `BackendError` is raised.
        """

    @abstractmethod
    def prepare(self, depth: int) -> None:
        """Start what can run in the background for a move to `depth`; no effect on results.

        Pages beyond `lendable(depth)` must have been withdrawn. Those within it may be lent again
        afterwards: raises `BackendError`, and changes nothing, where they cannot be had.
        """

    @abstractmethod
    def ready(self, depth: int) -> bool:
        """Whether `restore(depth)` would not wait. Never blocks."""

    @abstractmethod
    def restore(self, depth: int) -> None:
        """Undo steps down to `depth` (shallower than now).

        The pages `lendable(now) - lendable(depth)` must have been withdrawn from the allocator.
        On failure the depth is as before, or nearer to `depth` by whole steps, and consistent.
        """

    @abstractmethod
    def limit_uploads(self, bytes_per_s: float | None) -> None:
        """How fast `prepare` may upload, on average, from now on; None: as the link allows.

        After `adopt_weights`. What a downshift copies, and what `restore` copies itself, is not
        slowed down: the forwards wait for it.
        """

    @property
    @abstractmethod
    def layers_lowered(self) -> int:
        """Decoder layers that are not at full precision now."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Host memory kept for backups and variants."""

    @abstractmethod
    def report(self) -> MemoryReport:
        """Bytes by owner at this moment."""
