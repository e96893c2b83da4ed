"""Which kernel computes which linear of which layer, in few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

Kernels = Mapping[str, Mapping[str, str]]
"""Of one layer: variant -> linear's path -> kernel."""


def kernels_of_layers(layers: Sequence[Kernels]) -> dict[str, dict[str, dict[str, str]]]:
    """Variant -> linear's path -> kernel -> the layers that it computes, as `0-5, 7`."""
    found: dict[str, dict[str, dict[str, list[int]]]] = {}
    for index, kernels in enumerate(layers):
        for variant, per_linear in kernels.items():
            for path, kernel in per_linear.items():
                at = found.setdefault(variant, {}).setdefault(path, {})
                at.setdefault(kernel, []).append(index)
    return {
        variant: {
            path: {kernel: _ranges(indices) for kernel, indices in by_kernel.items()}
            for path, by_kernel in per_linear.items()
        }
        for variant, per_linear in found.items()
    }


def describe_kernels(layers: Sequence[Kernels]) -> list[str]:
    """One line a variant, for the log; kernels that only some layers have are told by layer."""
    lines = []
    for variant, per_linear in kernels_of_layers(layers).items():
        counts = Counter(
            kernel for kernels in layers for kernel in kernels.get(variant, {}).values()
        )
        (usual, _), *others = counts.most_common()
        exceptions = [
            f"{kernel} in {path} of layers {indices}"
            for kernel, _ in others
            for path, by_kernel in per_linear.items()
            if (indices := by_kernel.get(kernel))
        ]
        lines.append("; ".join([f"{variant}: {usual} in {counts[usual]} linears", *exceptions]))
    return lines


def _ranges(ascending: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in ascending:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(str(end) for end in run) for run in runs)
