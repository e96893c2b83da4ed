"""Memory backends: who owns which bytes, and how they move between weights and KV cache."""

from memory_backends.base import BackendError, MemoryBackend
from memory_backends.registry import BACKENDS, backend_class, create_backend, register_backend

__all__ = [
    "BACKENDS",
    "BackendError",
    "MemoryBackend",
    "backend_class",
    "create_backend",
    "register_backend",
]
