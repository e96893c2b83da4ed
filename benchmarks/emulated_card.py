"""A smaller card, emulated by KV sizes: static full precision, static FP8 and layer_swap.

    python -m benchmarks.emulated_card --model DIR --trace FILE --flags "..." --out FILE

All servers run on one GPU at the same time and take turns with the same windows of a trace, so
every comparison is of one run. Each gets the KV cache that the emulated card would leave it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.served import Morphing, save, serving
from sglang_morph.bench.arm_run import RUN_ERRORS, describe
from sglang_morph.bench.measured_server import MeasuredServer
from sglang_morph.bench.prompts import default_text, text_tokens
from sglang_morph.bench.routes import make_route
from sglang_morph.bench.statistics import Slo
from sglang_morph.bench.workload import Workload, WorkloadSpec, make_workload, steady_workload
from sglang_morph.demo.provenance import provenance

WINDOW_S = 30.0
START_S = 600.0
"""Where the windows begin in the trace."""
SPEEDS = {"knee": 3.0, "overload": 5.0, "quiet": 0.65}
"""How much faster than the trace; of the Azure conversation trace of 2023 that makes 14.9, 25.8 and
3.0 requests a second."""
BF16, FP8, OURS = "static_bf16", "static_fp8", "layer_swap"
SETTLE_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 150.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A window that one arm gets; those of one load and number are compared."""

    load: str
    number: int
    arm: str


GROUPS = (
    [Turn("knee", 0, arm) for arm in (FP8, OURS)],
    [Turn("knee", 1, arm) for arm in (OURS, FP8)],
    [Turn("knee", 2, arm) for arm in (FP8, OURS)],
    [Turn("quiet", 0, OURS)],
    [Turn("overload", 0, arm) for arm in (FP8, OURS)],
    [Turn("knee", 0, BF16)],
    [Turn("quiet", 0, arm) for arm in (BF16, FP8)],
    [Turn("overload", 0, BF16)],
)
"""What is compared stands together, and what counts most comes first, since time may run out."""


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--flags", default="", help="flags of every server")
    parser.add_argument("--morph-flags", default="", help="more flags of ours")
    parser.add_argument("--full-tokens", type=int, default=45_000, help="KV of static bf16")
    parser.add_argument("--fp8-tokens", type=int, default=100_000, help="KV of static fp8")
    parser.add_argument("--base-tokens", type=int, default=38_500, help="base KV of layer_swap")
    parser.add_argument(
        "--time-budget", type=float, default=3600.0, help="begin no group of turns after so many s"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/emulated_card.json"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    log = arguments.out.parent / "layer_swap.events.jsonl"
    commands = _commands(arguments, log)
    command = shlex.join(["python", "-m", "benchmarks.emulated_card", *sys.argv[1:]])
    results: dict[str, Any] = {
        "origin": provenance(command),
        "commands": commands,
        "turns": [],
    }
    tokens = text_tokens(Path(arguments.model), default_text())
    workloads = {
        load: _workload(arguments.trace, load, speed, tokens) for load, speed in SPEEDS.items()
    }
    warm_up = steady_workload(
        "warm-up", tokens, requests=24, rate=12.0, input_tokens=1000, output_tokens=100, seed=9
    )
    with serving(commands, arguments.out.parent) as found:
        servers = {
            name: MeasuredServer(
                served.url,
                make_route("sglang", "default"),
                Path(arguments.model),
                log if name == OURS else None,
                SETTLE_TIMEOUT_S,
                DRAIN_TIMEOUT_S,
                alone=False,
            )
            for name, served in found.items()
        }
        for server in servers.values():
            server.send(warm_up)
        for turn in _in_time(began, arguments.time_budget):
            if turn.arm not in servers:
                continue
            try:
                row = _measure(turn, servers[turn.arm], workloads[turn.load])
            except RUN_ERRORS as error:
                row = {"load": turn.load, "turn": turn.number, "arm": turn.arm}
                row["error"] = describe(error)
                print(row, flush=True)
            results["turns"].append(row)
            save(results, arguments.out)


def _in_time(began: float, budget_s: float) -> Iterator[Turn]:
    """The turns of all groups that begin before the time is up."""
    for group in GROUPS:
        if time.monotonic() - began > budget_s:
            return
        yield from group


def _commands(arguments: argparse.Namespace, log: Path) -> dict[str, str]:
    common = f"--model-path {arguments.model} --enable-metrics {arguments.flags}"
    return {
        BF16: f"python -m sglang.launch_server {common} --max-total-tokens {arguments.full_tokens}",
        FP8: f"python -m sglang.launch_server {common} --quantization fp8 "
        f"--max-total-tokens {arguments.fp8_tokens}",
        OURS: f"python -m sglang_morph.launch_server {common} --memory-backend layer_swap "
        f"--max-total-tokens {arguments.base_tokens} --morph-event-log {log} "
        f"{arguments.morph_flags}",
    }


def _workload(trace: Path, load: str, speed: float, tokens: list[int]) -> Workload:
    """A window of the trace, sped up; token counts as traced, up to the context."""
    spec = WorkloadSpec(
        name=load,
        trace=trace,
        start_s=START_S,
        duration_s=WINDOW_S * speed,
        factor=speed,
        max_input_tokens=6000,
        max_output_tokens=1500,
    )
    return make_workload(spec, tokens, seed=0)


def _measure(turn: Turn, server: MeasuredServer, workload: Workload) -> dict[str, Any]:
    """The row of one turn, from a server at rest at full precision."""
    server.settle()
    record = server.measure(workload, Slo(ttft_s=2.0), turn.arm)
    row = {key: value for key, value in record.row.items() if key != "server_info"}
    row |= {"load": turn.load, "turn": turn.number, "arm": turn.arm, "rate": workload.rate}
    row["retracted"] = record.observed.retracted
    if turn.arm == OURS:
        row["level_changes"] = record.observed.transitions
        row["monitor"] = Morphing(server.url).status()["monitor"]
    shown = {key: row[key] for key in ("p95_ttft_ms", "output_throughput", "tokens_by_level")}
    print(turn, f"{workload.rate:.1f} req/s", shown, flush=True)
    return row


if __name__ == "__main__":
    main()
