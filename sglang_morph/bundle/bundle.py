"""Opening a bundle, and refusing one that is damaged or made for something else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_morph.bundle.errors import BundleError
from sglang_morph.bundle.manifest import PLAN, Manifest
from sglang_morph.precision.plan import ModelIdentity, PrecisionPlan
from sglang_morph.precision.quantizers.rtn import RoundToNearest
from sglang_morph.precision.variants.registry import create_variant


@dataclass(frozen=True, slots=True)
class Served:
    """What a server needs a bundle to be made for."""

    model: ModelIdentity
    checkpoint_digest: str
    device: str
    """Device type."""
    dtype: str
    """Of the weights as served."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder with a readable manifest and plan."""

    folder: Path
    manifest: Manifest
    plan: PrecisionPlan

    @classmethod
    def open(cls, folder: Path) -> Bundle:
        """Reads manifest and plan only. Raises `BundleError`, or `PlanError` for a bad plan."""
        manifest = Manifest.load(folder)
        manifest.plan.check(folder)
        return cls(folder, manifest, PrecisionPlan.load(folder / PLAN))

    def check_files(self) -> None:
        """Reads every file. Raises `BundleError` for the first that is not as it was written."""
        if self.manifest.scores is not None:
            self.manifest.scores.check(self.folder)
        for variant in self.manifest.variants.values():
            for file in variant.layers:
                file.check(self.folder)

    def check_layouts(self) -> None:
        """Raises `BundleError` where tensors are not laid out as the kernels here read them."""
        for name, stored in self.manifest.variants.items():
            if not stored.layers:
                continue
            variant = create_variant(name, self.manifest.device, RoundToNearest())
            for path, layout in stored.layouts.items():
                if layout != variant.layout:
                    raise BundleError(
                        f"bundle {self.folder} holds {path} of {name} as {layout}, the kernel "
                        f"here reads {variant.layout}; make the bundle again on this machine"
                    )

    def check_served(self, served: Served) -> None:
        """Raises `BundleError`, naming all that differs, unless it was made for `served`."""
        found = self.manifest
        differences = []
        if found.model != served.model:
            differences.append("a model of another shape")
        elif found.checkpoint_digest != served.checkpoint_digest:
            differences.append("other weights than this checkpoint's")
        if found.device != served.device:
            differences.append(f"device {found.device}, not {served.device}")
        if not _same_weights(found.dtype, served.dtype, served.device):
            differences.append(f"weights in {found.dtype}, not {served.dtype}")
        if differences:
            raise BundleError(
                f"bundle {self.folder} was made for {' and for '.join(differences)}; "
                "give this model's bundle, or make one with `sglang-morph profile`"
            )


def _same_weights(made: str, served: str, device: str) -> bool:
    """A CPU serves in float32, which holds every 16-bit weight as it is."""
    return made == served or (device == "cpu" and served == "float32")
