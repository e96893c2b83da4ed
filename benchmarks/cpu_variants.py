"""What a decoder layer's linears cost on the CPU in every variant, over full precision.

    python -m benchmarks.cpu_variants [--out FILE]

SmolLM2-135M's shapes with made-up weights, one thread, full precision and variants in turn;
the fastest round counts, as others may use the machine. Under a minute. Writes JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from torch.nn.functional import linear

from benchmarks.acceptance import RESULTS
from sglang_morph.demo.provenance import provenance
from sglang_morph.precision.quantizers.layer import variants_for

SHAPES = {
    "self_attn.qkv_proj": (960, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_up_proj": (3072, 576),
    "mlp.down_proj": (576, 1536),
}
VARIANTS = ("nested_fp8", "fp8", "int8", "int4", "int3")
BATCHES = (1, 16, 256)
ROUNDS = 25

Forward = Callable[[], None]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_variants.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weights = {
        path: (torch.randn(shape, generator=generator) * 0.05).bfloat16()
        for path, shape in SHAPES.items()
    }
    rows = [row for batch in BATCHES for row in measure(weights, batch)]
    results = {"rows": rows, **asdict(provenance("python -m benchmarks.cpu_variants"))}
    arguments.out.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")
    for row in rows:
        print(*row.values(), sep="\t")
    return 0


def measure(weights: Mapping[str, torch.Tensor], batch: int) -> list[dict[str, Any]]:
    """Milliseconds of the four linears for `batch` tokens in bfloat16, and over `full`."""
    tokens = {path: torch.randn(batch, w.shape[1]).bfloat16() for path, w in weights.items()}
    forwards: dict[str, Forward] = {"full": partial(run_full, weights, tokens)}
    for name in VARIANTS:
        forwards[name] = forward_of(name, weights, tokens)
    seconds: dict[str, list[float]] = {name: [] for name in forwards}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, forward in forwards.items():
                began = time.perf_counter()
                forward()
                seconds[name].append(time.perf_counter() - began)
    full = min(seconds["full"])
    return [
        {
            "variant": name,
            "tokens": batch,
            "milliseconds": round(min(times) * 1e3, 3),
            "ratio_to_full": round(min(times) / full, 2),
        }
        for name, times in seconds.items()
    ]


def run_full(weights: Mapping[str, torch.Tensor], tokens: Mapping[str, torch.Tensor]) -> None:
    for path, weight in weights.items():
        linear(tokens[path], weight)


def forward_of(
    name: str, weights: Mapping[str, torch.Tensor], tokens: Mapping[str, torch.Tensor]
) -> Forward:
    variants = variants_for(name, "cpu", weights)
    parts = {path: variants[path].encode(weight) for path, weight in weights.items()}

    def run() -> None:
        for path, variant in variants.items():
            variant.linear(parts[path], tokens[path], None)

    return run


if __name__ == "__main__":
    sys.exit(main())
