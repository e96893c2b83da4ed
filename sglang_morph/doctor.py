"""What the server would find on this machine."""

from __future__ import annotations

import os
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from patches.upstream import installed_version, pinned
from sglang_morph import __version__
from sglang_morph.cpu.environment import STAND_IN
from sglang_morph.host_memory import available_bytes


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
