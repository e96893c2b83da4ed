"""Kernels of the precision variants on this GPU: are they right, and how fast are they?

    python -m benchmarks.kernels [--no-marlin] [--out FILE]

Checks and times splitting and merging of nested weights, and the quantized GEMMs against cuBLAS,
on the linears of Llama-3.1-8B with made-up weights. Writes JSON. Ends with 1 if a check failed.
Under a minute, but for Marlin, which takes minutes to compile on a cold machine.

Times are medians of CUDA graphs, the arms in turn; each graph goes through enough copies of the
weight that none is found in the L2 cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from torch.nn.functional import linear

from benchmarks.acceptance import RESULTS
from sglang_morph.precision.nested import encoding
from sglang_morph.precision.nested.encoding import E4M3_BOUND, E5M2_BOUND, Nesting
from sglang_morph.precision.nested.ops import merge_into, split_into
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.base import DerivedVariant, NestedVariant, Variant
from sglang_morph.precision.variants.preflight import WrongKernel, preflight
from sglang_morph.precision.variants.registry import create_variant

LLAMA_8B = {
    "qkv_proj": (6144, 4096),
    "o_proj": (4096, 4096),
    "gate_up_proj": (28672, 4096),
    "down_proj": (4096, 14336),
}
"""Weights `[N, K]` of one decoder layer."""
BATCHES = (1, 16, 64, 256, 1024, 4096)
DTYPES = (torch.bfloat16, torch.float16)
NESTINGS = (Nesting.E4M3, Nesting.E5M2)
L2_BYTES = 256 << 20
"""What a graph goes through at least; several times the L2 cache of any GPU."""
ROUNDS = 15

Call = Callable[[], object]


def gaussian(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator, device="cuda").mul_(0.02).to(dtype)


def weight_for(nesting: Nesting, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Gaussian, with one weight that only the nesting named takes."""
    weight = gaussian(*shape, dtype)
    if nesting is Nesting.E5M2:
        weight[0, 0] = -5.0
    return weight


def variant_for(name: str, weight: torch.Tensor) -> Variant:
    return create_variant(name, "cuda", create_quantizer("rtn")).for_weight(weight)


def check_every_code(dtype: torch.dtype, nesting: Nesting) -> str | None:
    """What is wrong with split or merge on any 16-bit code within the bound; None if nothing."""
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    magnitude = weight.float().abs()
    inside = magnitude <= E4M3_BOUND if nesting is Nesting.E4M3 else magnitude < E5M2_BOUND
    return check_round_trip(torch.where(inside, weight, 0).cuda(), nesting)


def check_round_trip(weight: torch.Tensor, nesting: Nesting) -> str | None:
    """What is wrong with split or merge of `weight`; None if nothing."""
    upper, lower, alone = (torch.empty_like(weight, dtype=torch.uint8) for _ in range(3))
    split_into(weight, upper, lower, nesting)
    split_into(weight, alone, None, nesting)
    expected = encoding.split(weight.to(torch.float16), nesting)
    if not (torch.equal(upper, expected[0]) and torch.equal(alone, upper)):
        return "upper halves differ from the reference"
    if not torch.equal(lower, expected[1]):
        return "lower halves differ from the reference"
    back = torch.full_like(weight, torch.nan)
    merge_into(upper, lower, back, nesting)
    encoding.patch_exceptions(back, encoding.find_exceptions(weight))
    if not torch.equal(back.view(torch.int16), weight.view(torch.int16)):
        return "the merged weight is not the original"
    return None


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def milliseconds(arms: Mapping[str, Sequence[Call]]) -> dict[str, float]:
    """Median time of one call of every arm."""
    graphs = {name: capture(calls) for name, calls in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / len(arms[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def enqueue_microseconds(call: Call, repeats: int = 50) -> float:
    """Time the calling thread spends on `call`, which it does not wait for."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / repeats * 1e6


def copies_of(weight: torch.Tensor) -> list[torch.Tensor]:
    return [weight.clone() for _ in range(max(2, -(-L2_BYTES // weight.nbytes)))]


def empty_parts(variant: DerivedVariant, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    return variant.empty_parts(rows, columns, weight.device)


def time_transitions(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Per linear: deriving nested_fp8 and fp8, splitting in both halves, merging."""
    rows = []
    for name, shape in LLAMA_8B.items():
        weights = copies_of(weight_for(Nesting.E4M3, shape, dtype))
        nested, scaled = variant_for("nested_fp8", weights[0]), variant_for("fp8", weights[0])
        assert isinstance(nested, NestedVariant) and isinstance(scaled, DerivedVariant)
        parts = [empty_parts(nested, w) for w in weights]
        upper = [p["codes"].view(torch.uint8) for p in parts]
        lower = [torch.empty_like(u) for u in upper]
        sets = list(zip(weights, parts, upper, lower, strict=True))
        arms: dict[str, list[Call]] = {
            "derive_nested_fp8": [partial(nested.derive, w, p) for w, p, _, _ in sets],
            "derive_fp8": [partial(scaled.derive, w, p) for w, p, _, _ in sets],
            "split": [partial(split_into, w, up, low, Nesting.E4M3) for w, _, up, low in sets],
            "merge": [partial(merge_into, up, low, w, Nesting.E4M3) for w, _, up, low in sets],
        }
        bytes_per_weight = {"derive_nested_fp8": 3, "derive_fp8": 3, "split": 4, "merge": 4}
        enqueue = {arm: enqueue_microseconds(calls[0]) for arm, calls in arms.items()}
        for arm, ms in milliseconds(arms).items():
            moved = weights[0].numel() * bytes_per_weight[arm]
            rows.append(
                {
                    "linear": name,
                    "dtype": str(dtype),
                    "operation": arm,
                    "ms": round(ms, 4),
                    "gb_per_s": round(moved / ms / 1e6),
                    "enqueue_us": round(enqueue[arm], 1),
                }
            )
    return rows


def time_gemms(names: Sequence[str]) -> list[dict[str, Any]]:
    """bf16 activations: every variant, quantization of activations included, against cuBLAS."""
    rows = []
    for linear_name, shape in LLAMA_8B.items():
        weights = copies_of(gaussian(*shape, torch.bfloat16))
        weights += [weights[0].clone() for _ in weights]  # FP8 takes half: keep it out of L2 too
        variants = {name: variant_for(name, weights[0]) for name in names}
        parts = {name: copies_of_parts(v, weights[0], len(weights)) for name, v in variants.items()}
        for batch in BATCHES:
            x = torch.randn(batch, shape[1], device="cuda").bfloat16()
            arms: dict[str, list[Call]] = {"cublas": [partial(linear, x, w) for w in weights]}
            for name, variant in variants.items():
                arms[name] = [partial(variant.linear, p, x, None) for p in parts[name]]
            ms = milliseconds(arms)
            rows += [
                {
                    "linear": linear_name,
                    "m": batch,
                    "variant": name,
                    "ms": round(ms[name], 4),
                    "cublas_ms": round(ms["cublas"], 4),
                    "ratio": round(ms[name] / ms["cublas"], 3),
                }
                for name in names
            ]
    return rows


def copies_of_parts(
    variant: Variant, weight: torch.Tensor, count: int
) -> list[dict[str, torch.Tensor]]:
    parts = {name: part.cuda() for name, part in variant.encode(weight).items()}
    return [{name: part.clone() for name, part in parts.items()} for _ in range(count)]


def run_checks(marlin: bool) -> list[dict[str, Any]]:
    checks = [
        {"check": f"every code, {dtype}, {n.value}", "wrong": check_every_code(dtype, n)}
        for dtype in DTYPES
        for n in NESTINGS
    ]
    for linear_name, shape in LLAMA_8B.items():
        for dtype in DTYPES:
            for nesting in NESTINGS:
                weight = weight_for(nesting, shape, dtype)
                where = f"{linear_name}, {dtype}, {nesting.value}"
                wrong = check_round_trip(weight, nesting)
                checks.append({"check": f"round trip, {where}", "wrong": wrong})
                checks.append(check_kernel("nested_fp8", weight, where))
            plain = gaussian(*shape, dtype)
            names = ["fp8"] + ["int4"] * marlin + ["int8"] * (linear_name == "o_proj")
            checks += [check_kernel(name, plain, f"{linear_name}, {dtype}") for name in names]
    return checks


def check_kernel(name: str, weight: torch.Tensor, where: str) -> dict[str, Any]:
    variant = variant_for(name, weight)
    row: dict[str, Any] = {
        "check": f"{name}, {where}",
        "kernel": variant.kernel,
        "wrong": None,
    }
    try:
        row["relative_error"] = round(preflight(variant, weight, where), 5)
    except WrongKernel as error:
        row["wrong"] = str(error)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--no-marlin", action="store_true", help="leave int4 out")
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.json")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA GPU; there is none here", file=sys.stderr)
        return 2
    marlin = not arguments.no_marlin
    started = time.perf_counter()
    checks = run_checks(marlin)
    gemm_names = ["nested_fp8", "fp8"] + ["int4"] * marlin
    results = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "checks": checks,
        "transitions": [row for dtype in DTYPES for row in time_transitions(dtype)],
        "gemms": time_gemms(gemm_names),
    }
    results["seconds"] = round(time.perf_counter() - started, 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")
    failed = [row for row in checks if row["wrong"]]
    for section in ("transitions", "gemms"):
        for row in results[section]:
            print(*row.values(), sep="\t")
    for row in failed:
        print(f"WRONG: {row['check']}: {row['wrong']}")
    print(f"{len(checks) - len(failed)} of {len(checks)} checks hold; written to {arguments.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
