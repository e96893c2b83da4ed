"""Lets SGLang run on a CPU where its CUDA kernels cannot be loaded.

SGLang decides at import, in every process, whether it runs on a CPU. So the decision is put into
the environment, which child processes inherit, before `sglang` is imported for the first time.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import yaml

STAND_IN = str(Path(__file__).parent / "standin")
"""Folder of the stand-in package `sgl_kernel`."""

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
_DRIVERS = ("libcuda.so.1", "libamdhip64.so", "libze_loader.so.1", "libascendcl.so")
"""Drivers of the accelerators that SGLang supports on Linux."""
_CORES_PER_TORCH_THREAD = 4
"""Scheduler, detokenizer and HTTP server need cores too: torch must not take them all."""


def prepare_process(argv: Sequence[str] = ()) -> bool:
    """Prepare this process and its children for the device that `argv` chooses.

    Returns whether that is the CPU. Changes nothing on another device. Raises RuntimeError if
    `sglang` has been imported without the preparation.
    """
    if not wants_cpu(argv):
        return False
    changes = cpu_environment(os.environ)
    if CPU_ENGINE in changes and "sglang" in sys.modules:
        raise RuntimeError(
            "sglang was imported before this process was prepared for the CPU; import "
            "sglang_morph first, or start it with `sglang-morph exec -- COMMAND`"
        )
    if STAND_IN not in sys.path and _needs_stand_in():
        sys.path.insert(0, STAND_IN)
    os.environ.update(changes)
    return True


def wants_cpu(argv: Sequence[str]) -> bool:
    """Whether `--device cpu` is given, or no device and there is no accelerator's driver."""
    device = _flag(argv, "--device") or _device_in_config(_flag(argv, "--config"))
    if device is not None:
        return device == "cpu"
    return sys.platform == "linux" and not any(map(_loadable, _DRIVERS))


def is_prepared() -> bool:
    """Whether this process runs SGLang on the CPU."""
    return os.environ.get(CPU_ENGINE) == "1"


def cpu_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set in `environ`; those the user has set already are left out."""
    changes: dict[str, str] = {}
    if environ.get(CPU_ENGINE) != "1":
        changes[CPU_ENGINE] = "1"
    if "OMP_NUM_THREADS" not in environ:
        cores = len(os.sched_getaffinity(0))
        changes["OMP_NUM_THREADS"] = str(max(1, cores // _CORES_PER_TORCH_THREAD))
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if STAND_IN not in paths and _needs_stand_in():
        changes["PYTHONPATH"] = os.pathsep.join([STAND_IN, *paths])
    return changes


def _needs_stand_in() -> bool:
    """Whether the installed `sgl_kernel` is no build for the CPU. Imports neither it nor torch.

    A CPU build has its library at the top of the package; the CUDA builds have one a GPU
    generation, need the driver, and lack the names that SGLang imports on a CPU.
    """
    spec = PathFinder.find_spec("sgl_kernel", [path for path in sys.path if path != STAND_IN])
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return not any(any(Path(folder).glob("common_ops.*")) for folder in folders)


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _flag(argv: Sequence[str], name: str) -> str | None:
    """The last value of `name`, as argparse reads `name VALUE` and `name=VALUE`."""
    value = None
    for position, argument in enumerate(argv):
        if argument == name and position + 1 < len(argv):
            value = argv[position + 1]
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value


def _device_in_config(path: str | None) -> str | None:
    """`device` in SGLang's YAML file; a bad file is left for SGLang to report."""
    if path is None:
        return None
    try:
        settings = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, yaml.YAMLError):
        return None
    return settings.get("device") if isinstance(settings, dict) else None
