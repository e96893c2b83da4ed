"""Names of memory backends. A third party registers its own with `register_backend`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from memory_backends.base import MemoryBackend

BACKENDS: dict[str, str] = {
    "static": "",  # stock SGLang: no backend is ever created
    "layer_swap": "memory_backends.layer_swap:LayerSwapBackend",
    "semi_unified": "memory_backends.semi_unified:SemiUnifiedBackend",
}
"""Backend name -> `module:class`, imported when first used."""


def register_backend(name: str, target: str) -> None:
    """Register `target` (`module:class`, a `MemoryBackend`) as `--memory-backend name`."""
    if name in BACKENDS:
        raise ValueError(f"memory backend {name!r} is registered already")
    BACKENDS[name] = target


def backend_class(name: str) -> type[MemoryBackend]:
    """Raises KeyError for an unknown name, ValueError for `static`."""
    target = BACKENDS[name]
    if not target:
        raise ValueError(f"memory backend {name!r} moves no memory; there is nothing to create")
    module, _, attribute = target.partition(":")
    found: type[MemoryBackend] = getattr(import_module(module), attribute)
    return found


def create_backend(name: str, **settings: Any) -> MemoryBackend:
    """A new backend; `settings` are its class's own. Raises as `backend_class` does."""
    return backend_class(name)(**settings)
