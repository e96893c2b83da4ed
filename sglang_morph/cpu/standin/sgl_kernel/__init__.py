"""Stands in for SGLang's CUDA kernels on a machine that cannot load them.

SGLang imports kernels by name on a CPU as well, and uses fallbacks in torch where it can. So every
name exists here, and raises when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing_kernel(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"sgl_kernel.{name} does not exist on this CPU (a stand-in takes the place of "
            "sgl_kernel); choose --attention-backend torch_native and --sampling-backend pytorch"
        )

    return missing_kernel
