"""What morphing costs at full precision, and what a transition costs: stock SGLang beside ours.

    python -m benchmarks.overhead --model DIR --flags "--load-format dummy ..." --out FILE

All servers run on one GPU at the same time and take turns, so the ratios are of one run. All get
the same flags; give `--max-total-tokens` among them, so that their KV caches are equal. Every part
is written as soon as it is measured, and one that fails does not keep the next from being tried.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.level_changes import lowered_speed, measure_changes, measure_levels
from benchmarks.served import Batch, equal_requests, save, send, serving
from sglang_morph.demo.provenance import provenance

INPUTS, OUTPUTS = 512, 128
STOCK = "stock"


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--flags", default="", help="flags of all servers")
    parser.add_argument("--morph-flags", default="", help="more flags of ours")
    parser.add_argument(
        "--backend",
        choices=("layer_swap", "semi_unified"),
        action="append",
        help="what is compared with stock; give it again for both (default layer_swap)",
    )
    parser.add_argument(
        "--batches",
        default="1:16,64:5,16:5,256:3",
        help="batch sizes and how many turns of each server, SIZE:TURNS, comma-separated",
    )
    parser.add_argument("--changes", type=int, default=200, help="random level changes under load")
    parser.add_argument("--pause", type=float, default=0.1, help="s between two of them")
    parser.add_argument("--level-rounds", type=int, default=8, help="walks through all levels")
    parser.add_argument(
        "--time-budget", type=float, default=3600.0, help="begin no part after so many s"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overhead.json"))
    arguments = parser.parse_args()
    backends: list[str] = arguments.backend or ["layer_swap"]
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    logs = {name: out.parent / f"{name}.events.jsonl" for name in backends}
    commands = _commands(arguments, logs)
    command = shlex.join(["python", "-m", "benchmarks.overhead", *sys.argv[1:]])
    results: dict[str, Any] = {
        "origin": provenance(command),
        "commands": commands,
        "ready_s": {},
        "level0": {},
        "backends": {name: {} for name in backends},
        "errors": [],
    }

    def part(where: dict[str, Any], name: str, measure: Callable[[], Any]) -> None:
        if time.monotonic() - began > arguments.time_budget:
            results["errors"].append(f"{name}: no time was left")
        else:
            try:
                where[name] = measure()
            except Exception:
                results["errors"].append(f"{name}: {traceback.format_exc()}")
                print(results["errors"][-1], flush=True)
        save(results, out)

    with serving(commands, out.parent) as served:
        results["ready_s"] = {name: server.ready_s for name, server in served.items()}
        urls = {name: server.url for name, server in served.items()}
        save(results, out)
        ours = [name for name in backends if name in urls]
        for name in ours:
            part(results["backends"][name], "levels", lambda name=name: measure_levels(urls[name]))
        for pair in arguments.batches.split(","):
            size, turns = (int(number) for number in pair.split(":"))
            if STOCK in urls:
                part(results["level0"], str(size), lambda s=size, t=turns: compare(urls, s, t))
        for name in ours:
            found = results["backends"][name]
            part(
                found,
                "changes",
                lambda name=name: measure_changes(
                    urls[name],
                    logs[name],
                    arguments.level_rounds,
                    arguments.changes,
                    arguments.pause,
                ),
            )
            part(found, "lowered_speed", lambda name=name: lowered_speed(urls[name], 4))


def _commands(arguments: argparse.Namespace, logs: dict[str, Path]) -> dict[str, str]:
    common = f"--model-path {arguments.model} {arguments.flags}"
    commands = {STOCK: f"python -m sglang.launch_server {common}"}
    for name, log in logs.items():
        commands[name] = (
            f"python -m sglang_morph.launch_server {common} --memory-backend {name} "
            f"--morph-policy manual --morph-event-log {log} {arguments.morph_flags}"
        )
    return commands


def compare(urls: dict[str, str], size: int, turns: int) -> dict[str, Any]:
    """By server what a batch of `size` measures at level 0, and its ratio to stock, paired by turn.

    The servers go in turn, every second time backwards.
    """
    for url in urls.values():  # warm-up
        send(url, equal_requests(size, INPUTS, 16, seed=0))
    batches: dict[str, list[Batch]] = {name: [] for name in urls}
    for turn in range(turns):
        workload = equal_requests(size, INPUTS, OUTPUTS, seed=1 + turn)
        for name in list(urls) if turn % 2 == 0 else reversed(urls):
            batches[name].append(send(urls[name], workload))
    stock = batches[STOCK]
    rows = {}
    for name, measured in batches.items():
        rows[name] = {
            "tokens_per_s": [batch.output_tokens_per_s for batch in measured],
            "tpot_ms": [batch.median_gap_s * 1e3 for batch in measured],
            "failed": sum(batch.failed for batch in measured),
        }
        for key in ("tokens_per_s", "tpot_ms") if name != STOCK else ():
            pairs = zip(rows[name][key], rows[STOCK][key], strict=True)
            rows[name][f"{key}_ratio"] = statistics.median(a / b for a, b in pairs)
    ratios = {
        name: [round(row["tokens_per_s_ratio"], 4), round(row["tpot_ms_ratio"], 4)]
        for name, row in rows.items()
        if name != STOCK
    }
    print(f"batch {size}, {len(stock)} turns: throughput and TPOT over stock {ratios}", flush=True)
    return rows


if __name__ == "__main__":
    main()
