"""Argument defaults for a machine without a GPU. Each gives way to what the user set."""

from __future__ import annotations

from typing import Any

from sglang_morph.cpu.environment import is_prepared

MAX_TOTAL_TOKENS = 8192
"""KV tokens. SGLang would size the KV cache from all of the host's memory."""


def fill_cpu_defaults(server_args: Any) -> None:
    """Fill in, on the CPU, what the user left open in unresolved `ServerArgs`."""
    device = server_args.device
    if device != "cpu" and not (device is None and is_prepared()):
        return
    if server_args.attention_backend is None:
        server_args.attention_backend = "torch_native"
    if server_args.sampling_backend is None:
        server_args.sampling_backend = "pytorch"
    if server_args.dtype == "auto":
        # 16-bit floats are several times slower than float32 on CPUs without matrix units.
        server_args.dtype = "float32"
    if server_args.max_total_tokens is None:
        server_args.max_total_tokens = MAX_TOTAL_TOKENS
