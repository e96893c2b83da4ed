"""The merge GEMM against cuBLAS on plain weights, by the shapes of a decode step.

    python -m benchmarks.merge_gemm --out benchmarks/results/merge_gemm_h200.json

Every shape's weights are so many copies that they do not stay in the L2 cache. A and B take turns;
each is replayed from a CUDA graph, so launches do not count. The ratio of a batch size is the sum
of its four shapes' times, merged over plain.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import torch
from torch.nn.functional import linear

from benchmarks.kernels import capture
from sglang_morph.demo.provenance import provenance
from sglang_morph.precision.nested import merge_gemm
from sglang_morph.precision.nested.encoding import Nesting
from sglang_morph.precision.nested.ops import split_into

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""`[N, K]` of Llama-3.1-8B."""
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
COLD_BYTES = 256 << 20
"""Of one shape's copies together; several times the L2 cache."""
WAYS = ("plain", "fused", "scratch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/merge_gemm_h200.json"))
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    began = time.perf_counter()
    merge_gemm.prepare(torch.device("cuda"), dtype)
    results: dict[str, Any] = {
        "origin": provenance(shlex.join(["python", "-m", "benchmarks.merge_gemm", *sys.argv[1:]])),
        "build_s": round(time.perf_counter() - began, 1),
        "dtype": arguments.dtype,
        "rows": [],
    }
    print(f"built in {results['build_s']} s", flush=True)
    for tokens in (int(t) for t in arguments.tokens.split(",")):
        shapes = [time_shape(name, tokens, dtype, arguments.rounds) for name in SHAPES]
        plain = sum(s["plain_us"] for s in shapes)
        best = sum(min(s[f"{way}_us"] or 1e9 for way in WAYS[1:]) for s in shapes)
        row: dict[str, Any] = {"m": tokens, "ratio_weighted": best / plain}
        for way in WAYS[1:]:
            times = [s[f"{way}_us"] for s in shapes]
            row[f"{way}_ratio"] = sum(times) / plain if all(times) else None
        results["rows"].append(row | {"shapes": shapes})
        ratios = " ".join(f"{way} {row[f'{way}_ratio'] or 0:.3f}" for way in WAYS[1:])
        report = " ".join(
            f"{s['shape']} " + "/".join(f"{s[f'{way}_us'] or 0:.1f}" for way in WAYS)
            for s in shapes
        )
        print(f"M {tokens}: {ratios}; us: {report}", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")


def time_shape(name: str, tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Medians, in microseconds, of one linear on plain weights and on halves, two ways."""
    rows, columns = SHAPES[name]
    copies = max(2, -(-COLD_BYTES // (rows * columns * 2)))
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    weights = [
        (torch.randn(rows, columns, device="cuda", generator=generator) * 0.02)
        .half().to(dtype)
        for _ in range(copies)
    ]  # fmt: skip
    halves = [_halves(weight) for weight in weights]
    x = torch.randn(tokens, columns, device="cuda", generator=generator).to(dtype)
    scratch = torch.empty_like(weights[0])
    y = linear(x, weights[0])

    def plain() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=y)

    def fused() -> None:
        for upper, lower in halves:
            merge_gemm.merge_gemm(upper, lower, x, Nesting.E4M3)

    def by_scratch() -> None:
        for upper, lower in halves:
            merge_gemm.merge_rows(upper, {"lower": lower}, scratch, 0, Nesting.E4M3)
            torch.mm(x, scratch.t(), out=y)

    ways: dict[str, Callable[[], None]] = {"plain": plain}
    if tokens <= 4096:
        ways["fused"] = fused
    if tokens >= 512:
        ways["scratch"] = by_scratch
    times = _interleaved(ways, rounds)
    return {"shape": name, "n": rows, "k": columns} | {
        f"{way}_us": times[way] / copies if way in times else None for way in WAYS
    }


def _halves(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    upper, lower = (torch.empty_like(weight, dtype=torch.uint8) for _ in range(2))
    split_into(weight, upper, lower, Nesting.E4M3)
    return upper, lower


def _interleaved(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Microseconds of each, the median over rounds in which all take turns."""
    graphs = {name: capture([way]) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(3):
                graph.replay()
            ended.record()
            ended.synchronize()
            if turn:  # the first is a warm-up
                times[name].append(began.elapsed_time(ended) * 1e3 / 3)
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    main()
