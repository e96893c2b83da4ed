"""What the server would find on this machine."""

from __future__ import annotations

import os
import time
from importlib.metadata import version

import torch
from rich.console import Console
from rich.table import Table

from patches.upstream import installed_version, pinned
from sglang_morph import __version__
from sglang_morph.cpu.environment import STAND_IN
from sglang_morph.host_memory import available_bytes
from sglang_morph.precision.nested.merge_gemm import MergeGemmError
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.base import NestedVariant
from sglang_morph.precision.variants.preflight import WrongKernel, preflight
from sglang_morph.precision.variants.registry import VARIANTS, create_variant

PREBUILD_SHAPE = (256, 512)
"""`[N, K]` that every variant takes; kernels are compiled per type, not per shape."""


def print_report(*, cpu: bool) -> None:
    """Print versions, device, kernels and memory. `cpu`: the process is prepared for the CPU."""
    stand_in = STAND_IN in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    table = Table(show_header=False, box=None)
    table.add_row("sglang_morph", __version__)
    table.add_row("sglang", f"{installed_version()} (patches fit {pinned().version})")
    table.add_row("torch", version("torch"))
    table.add_row("device", "cpu" if cpu else "as SGLang detects it")
    table.add_row("sgl_kernel", "stand-in" if stand_in else "as installed")
    table.add_row("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "not set"))
    table.add_row("host memory available", f"{available_bytes() / (1 << 30):.1f} GiB")
    Console(highlight=False).print(table)


def prebuild(device: str, dtype: torch.dtype) -> bool:
    """Run every variant's kernel of `device` once, which compiles those that need it.

    Prints a line for each. False if one is missing or computes something else.
    """
    console, fine = Console(highlight=False), True
    weight = torch.randn(*PREBUILD_SHAPE, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    weight = weight.to(device, dtype)
    for name in (name for name, kind in VARIANTS if kind == device):
        variant = create_variant(name, device, create_quantizer("rtn")).for_weight(weight)
        began = time.perf_counter()
        with console.status(f"{name}: {variant.kernel} (minutes, if it has to be compiled)"):
            try:
                error = preflight(variant, weight, name)
                result = f"error {error:.4f}"
            except WrongKernel as wrong:
                result, fine = str(wrong), False
        console.print(f"{name}: {variant.kernel}, {result}, {time.perf_counter() - began:.1f} s")
        if isinstance(variant, NestedVariant):
            console.print(f"{name}, both halves (semi_unified): {_try_merged(variant, weight)}")
    return fine


def _try_merged(variant: NestedVariant, weight: torch.Tensor) -> str:
    """Only `semi_unified` needs it, so a GPU without it is not at fault."""
    try:
        variant.prepare_merged(weight)
    except MergeGemmError as error:
        return str(error)
    return "ready"
