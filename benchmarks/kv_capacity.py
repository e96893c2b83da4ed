"""What a static FP8 server gets as its KV cache out of the bytes that an elastic server has.

Both run alone on the GPU with the same --mem-fraction-static, which bounds weights, KV cache and
staging together. Decode graphs lie outside of it, so what they take is told beside.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx

from benchmarks.served import serving

FP8 = "static_fp8"
_GRAPHS = re.compile(r"decode CUDA graph end.*?mem usage=([\d.]+) GB")


def static_fp8(model: str, flags: str, logs: Path) -> dict[str, Any]:
    """Start stock SGLang with FP8 weights alone on the GPU, and ask it."""
    command = f"python -m sglang.launch_server --model-path {model} --quantization fp8 {flags}"
    with serving({FP8: command}, logs) as served:
        info = httpx.get(f"{served[FP8].url}/server_info", timeout=30.0).raise_for_status().json()
    memory = info["internal_states"][0]["memory_usage"]
    return {
        "command": command,
        "tokens": memory["token_capacity"],
        "memory": memory,
        "graphs_gib": graphs_gib(logs / f"{FP8}.log"),
    }


def graphs_gib(log: Path) -> float | None:
    """What a server's log says that its decode graphs took; None where it captured none."""
    found = _GRAPHS.findall(log.read_text(errors="replace"))
    return float(found[-1]) if found else None
