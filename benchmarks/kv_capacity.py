"""KV tokens at the deepest 8-bit level beside those of a static FP8 server in the same GPU bytes.

    python -m benchmarks.kv_capacity --model DIR --flags "..." --fraction 0.147 --out FILE

The servers run one after the other on an otherwise empty GPU, with the same --mem-fraction-static,
which bounds weights, KV cache and staging together. Decode graphs lie outside of it, so what they
take is counted against each server.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx

from benchmarks.level_changes import deepest_level
from benchmarks.served import Morphing, save, serving
from sglang_morph.demo.provenance import provenance

_GRAPHS = re.compile(r"decode CUDA graph end.*?mem usage=([\d.]+) GB")
FP8 = "static_fp8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--flags", default="", help="flags of all servers")
    parser.add_argument("--morph-flags", default="", help="more flags of ours")
    parser.add_argument("--fraction", type=float, required=True, help="--mem-fraction-static")
    parser.add_argument("--backend", action="append", help="as often as wanted (layer_swap)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kv_capacity.json"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    common = (
        f"--model-path {arguments.model} {arguments.flags} "
        f"--mem-fraction-static {arguments.fraction}"
    )
    commands = {FP8: f"python -m sglang.launch_server {common} --quantization fp8"}
    for name in arguments.backend or ["layer_swap"]:
        commands[name] = (
            f"python -m sglang_morph.launch_server {common} --memory-backend {name} "
            f"--morph-policy manual {arguments.morph_flags}"
        )
    command = shlex.join(["python", "-m", "benchmarks.kv_capacity", *sys.argv[1:]])
    results: dict[str, Any] = {
        "origin": provenance(command),
        "fraction": arguments.fraction,
        "servers": {},
    }
    for name, command in commands.items():
        logs = arguments.out.parent / "kv_capacity"
        with serving({name: command}, logs) as served:
            row = _static(served[name].url) if name == FP8 else _morphing(served[name].url)
        row |= {"command": command, "graphs_gib": _graphs_gib(logs / f"{name}.log")}
        results["servers"][name] = row
        print(name, row, flush=True)
        save(results, arguments.out)


def _static(url: str) -> dict[str, Any]:
    info = httpx.get(f"{url}/server_info", timeout=30.0).raise_for_status().json()
    memory = info["internal_states"][0]["memory_usage"]
    return {"tokens": memory["token_capacity"], "memory": memory}


def _morphing(url: str) -> dict[str, Any]:
    morphing = Morphing(url)
    level = deepest_level(morphing.status()["levels"])
    status = morphing.go_to(level)
    page_bytes = status["bytes"]["kv_base"] / (status["base_tokens"] + 1)
    return {
        "tokens": status["capacity_tokens"],
        "base_tokens": status["base_tokens"],
        "level": level,
        "page_bytes": page_bytes,
        "bytes": status["bytes"],
    }


def _graphs_gib(log: Path) -> float | None:
    """What SGLang says that its decode graphs took; None where it captured none."""
    found = _GRAPHS.findall(log.read_text(errors="replace"))
    return float(found[-1]) if found else None


if __name__ == "__main__":
    main()
