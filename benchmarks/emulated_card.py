"""A smaller card, emulated by KV sizes: static full precision, static FP8 and layer_swap.

    python -m benchmarks.emulated_card --model DIR --trace FILE --flags "..." --out FILE

All servers run on one GPU at the same time and take turns with the same workloads, so every
comparison is of one run. Each gets the KV cache that the emulated card would leave it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.served import DRAIN_TIMEOUT_S, Morphing, serving
from sglang_morph.bench.prompts import default_text, text_tokens
from sglang_morph.bench.replay import replay, run_loop
from sglang_morph.bench.routes import make_route
from sglang_morph.bench.statistics import Slo, replay_row
from sglang_morph.bench.workload import Workload, WorkloadSpec, make_workload
from sglang_morph.demo.provenance import provenance

WINDOW_S = 30.0
KEYS = ("completed", "p50_ttft_ms", "p95_ttft_ms", "p50_tpot_ms", "p95_tpot_ms")


@dataclass(frozen=True, slots=True)
class Turn:
    """A workload that every arm gets, one after the other."""

    name: str
    rate: float
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--flags", default="", help="flags of every server")
    parser.add_argument("--full-tokens", type=int, default=45_000, help="KV of static bf16")
    parser.add_argument("--fp8-tokens", type=int, default=100_000, help="KV of static fp8")
    parser.add_argument("--base-tokens", type=int, default=41_500, help="base KV of layer_swap")
    parser.add_argument("--rates", default="3,14.9,25.8,14.9", help="requests a second, in turn")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/emulated_card.json"))
    arguments = parser.parse_args()
    common = f"--model-path {arguments.model} {arguments.flags}"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    log = arguments.out.parent / "layer_swap.events.jsonl"
    commands = {
        "static_bf16": f"python -m sglang.launch_server {common} "
        f"--max-total-tokens {arguments.full_tokens}",
        "static_fp8": f"python -m sglang.launch_server {common} --quantization fp8 "
        f"--max-total-tokens {arguments.fp8_tokens}",
        "layer_swap": f"python -m sglang_morph.launch_server {common} --memory-backend layer_swap "
        f"--max-total-tokens {arguments.base_tokens} --morph-event-log {log}",
    }
    rates = [float(rate) for rate in arguments.rates.split(",")]
    turns = [Turn(f"{rate:g} req/s, turn {i}", rate, seed=i) for i, rate in enumerate(rates)]
    results: dict[str, Any] = {
        "origin": provenance(
            shlex.join(["python", "-m", "benchmarks.emulated_card", *sys.argv[1:]])
        ),
        "commands": commands,
        "turns": [],
    }
    tokens = text_tokens(Path(arguments.model), default_text())
    with serving(commands, arguments.out.parent) as urls:
        for url in urls.values():
            _send(url, _workload(arguments.trace, Turn("warm-up", 4.0, 99), tokens, 5.0))
        for number, turn in enumerate(turns):
            workload = _workload(arguments.trace, turn, tokens, WINDOW_S)
            order = list(urls)[number % 3 :] + list(urls)[: number % 3]
            row = {"turn": turn.name, "rate": workload.rate, "origin": workload.origin}
            row |= {name: _measure(name, urls[name], workload) for name in order}
            results["turns"].append(row)
            print({name: {k: row[name].get(k) for k in KEYS} for name in order}, flush=True)
            arguments.out.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")


def _workload(trace: Path, turn: Turn, tokens: list[int], seconds: float) -> Workload:
    """A stretch of the trace at the turn's rate; token counts as traced, up to the context."""
    spec = WorkloadSpec(
        name="trace",
        trace=trace,
        start_s=300.0,
        duration_s=seconds * turn.rate / AZURE_RATE,
        rate=turn.rate,
        max_input_tokens=6000,
        max_output_tokens=1500,
    )
    return make_workload(spec, tokens, turn.seed)


AZURE_RATE = 5.53
"""Requests a second of the Azure conversation trace of 2023 over its hour."""


def _measure(name: str, url: str, workload: Workload) -> dict[str, Any]:
    row = _send(url, workload)
    if name == "layer_swap":
        status = Morphing(url).status()
        row["monitor"] = status["monitor"]
        row["level_after"] = status["level"]
    return row


def _send(url: str, workload: Workload) -> dict[str, Any]:
    done = run_loop(replay(url, make_route("sglang", "default"), workload, DRAIN_TIMEOUT_S))
    return replay_row(done, workload, Slo(ttft_s=2.0))


if __name__ == "__main__":
    main()
