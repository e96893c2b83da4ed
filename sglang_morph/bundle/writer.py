"""Writing a bundle. It appears by a rename, so it is whole whenever it exists."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from memory_backends.base import TensorMap
from sglang_morph import __version__
from sglang_morph.bundle.bundle import Bundle, Served
from sglang_morph.bundle.checkpoint import METHOD
from sglang_morph.bundle.errors import BundleError
from sglang_morph.bundle.layer_file import layer_path, write_layer
from sglang_morph.bundle.manifest import PLAN, SCORES, Manifest, StoredFile, StoredVariant
from sglang_morph.precision.plan import PrecisionPlan

_FINGERPRINT = "fingerprint"
"""A file that says what the unfinished bundle will be; not part of the finished one."""


class BundleWriter:
    """Collects a bundle in a folder beside `target`. What is there of a killed run is kept.

    A context manager: one process at a time. Raises `BundleError` where that cannot be written, or
    another process is at it and `wait` is false. Ask `finished` before anything else.
    """

    def __init__(self, target: Path, fingerprint: str, *, wait: bool = False) -> None:
        self.target = target
        self.work = target.with_name(f".{target.name}.partial")
        self._fingerprint = fingerprint
        self._wait = wait
        self._layouts: dict[str, dict[str, str]] = {}
        self._layers: dict[str, int] = {}
        self._variants: dict[str, StoredVariant] = {}

    def __enter__(self) -> BundleWriter:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self.target.with_name(f".{self.target.name}.lock").open("a")
        except OSError as error:
            raise BundleError(
                f"{self.target} cannot be written: {error.strerror}; give another folder with --out"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | (0 if self._wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self._lock.close()
            raise BundleError(
                f"another process is writing {self.target}; wait for it, or give another --out"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.close()

    def finished(self) -> Bundle | None:
        """The bundle, if `target` holds it already; None: it may be written now.

        Raises `BundleError` if `target` holds something else.
        """
        if not self.target.exists() or not any(self.target.iterdir()):
            self._prepare()
            return None
        bundle = Bundle.open(self.target)
        if bundle.manifest.fingerprint != self._fingerprint:
            raise BundleError(
                f"{self.target} holds a bundle of another model, text or setting; "
                "remove it, or give another folder with --out"
            )
        return bundle

    def add(self, layer: int, variant: str, tensors: TensorMap, layouts: Mapping[str, str]) -> None:
        """Store `layer` in `variant`, the layers in order. `layouts`: linear's path -> layout."""
        write_layer(self.work / layer_path(variant, layer), tensors)
        self._layouts[variant] = dict(layouts)
        self._layers[variant] = layer + 1

    def describe(self, variant: str, quantizer: str) -> None:
        """Say how `variant` was made; without tensors it is one that servers derive."""
        count = self._layers.get(variant, 0)
        files = tuple(StoredFile.of(self.work, layer_path(variant, i)) for i in range(count))
        layouts = self._layouts.get(variant, {})
        self._variants[variant] = StoredVariant(quantizer, layouts, files)

    def publish(
        self,
        plan: PrecisionPlan,
        served: Served,
        calibration: Mapping[str, Any],
        scores: bytes | None = None,
    ) -> Bundle:
        """Complete the bundle and move it to `target`."""
        plan.save(self.work / PLAN)
        if scores is not None:
            (self.work / SCORES).write_bytes(scores)
        Manifest(
            tool_version=__version__,
            fingerprint=self._fingerprint,
            model=served.model,
            checkpoint_digest=served.checkpoint_digest,
            checkpoint_digest_of=METHOD,
            device=served.device,
            dtype=served.dtype,
            calibration=dict(calibration),
            plan=StoredFile.of(self.work, PLAN),
            scores=None if scores is None else StoredFile.of(self.work, SCORES),
            variants=self._variants,
        ).save(self.work)
        (self.work / _FINGERPRINT).unlink()
        if self.target.exists():
            self.target.rmdir()  # it is empty, see `finished`
        self.work.rename(self.target)
        return Bundle.open(self.target)

    def _prepare(self) -> None:
        """Make the work folder, or empty it if a run for something else has left it."""
        mark = self.work / _FINGERPRINT
        if mark.exists() and mark.read_text() == self._fingerprint:
            return
        if self.work.exists():
            shutil.rmtree(self.work)
        self.work.mkdir()
        mark.write_text(self._fingerprint)
