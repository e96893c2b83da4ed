"""What transitions cost while requests decode, and what they gain.

    python -m benchmarks.transitions --model DIR --flags "--load-format dummy ..." --out FILE

A server of each backend, all on one GPU at the same time; they take turns. Every part is written as
soon as it is measured, and one that fails does not keep the next from being tried. With
`--static-fp8`, on an otherwise empty GPU and with one backend and --mem-fraction-static among the
flags, a static FP8 server is asked first for the KV cache that it gets out of the same bytes.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kv_capacity import FP8, graphs_gib, static_fp8
from benchmarks.level_changes import lowered_speed, measure_changes, measure_levels
from benchmarks.served import Parts, elastic_command, server_arguments, serving
from benchmarks.upload_rates import RATES, measure_upload_rates
from sglang_morph.demo.provenance import provenance

PARTS = ("levels", "upload_rates", "changes", "lowered_speed")


def main() -> None:
    parser = server_arguments(__doc__.splitlines()[0], "give it again for both", "transitions.json")
    parser.add_argument("--static-fp8", action="store_true", help="begin with a static FP8 server")
    parser.add_argument("--part", choices=PARTS, action="append", help="as often as wanted (all)")
    parser.add_argument("--changes", type=int, default=200, help="random level changes under load")
    parser.add_argument("--pause", type=float, default=0.1, help="s between two of them")
    parser.add_argument("--level-rounds", type=int, default=8, help="walks through all levels")
    parser.add_argument(
        "--rates",
        default=",".join(map(str, RATES)),
        help="limits on uploads in GB/s; after them none at all",
    )
    parser.add_argument("--batch", type=int, default=64, help="requests that decode meanwhile")
    arguments = parser.parse_args()
    backends: list[str] = arguments.backend or ["layer_swap"]
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    logs = {name: out.parent / f"{name}.events.jsonl" for name in backends}
    commands = {
        name: f"{elastic_command(arguments, name)} --morph-event-log {log}"
        for name, log in logs.items()
    }
    command = shlex.join(["python", "-m", "benchmarks.transitions", *sys.argv[1:]])
    results: dict[str, Any] = {
        "origin": provenance(command),
        "commands": commands,
        "backends": {name: {} for name in backends},
        "errors": [],
    }
    parts = Parts(results, out, arguments.time_budget)
    if arguments.static_fp8:
        ask = functools.partial(static_fp8, arguments.model, arguments.flags, out.parent)
        parts.measure(results, FP8, ask)
    with serving(commands, out.parent) as served:
        for name, server in served.items():
            found = results["backends"][name]
            found["graphs_gib"] = graphs_gib(out.parent / f"{name}.log")
            measures = _measures(arguments, server.url, logs[name])
            for part in arguments.part or PARTS:
                parts.measure(found, part, measures[part])


def _measures(
    arguments: argparse.Namespace, url: str, log: Path
) -> dict[str, Callable[[], dict[str, Any] | list[dict[str, Any]]]]:
    """By part, what a server of which `log` is the event log is asked for."""
    rates = [float(rate) for rate in arguments.rates.split(",")]
    rounds, changes, pause_s = arguments.level_rounds, arguments.changes, arguments.pause
    return {
        "levels": functools.partial(measure_levels, url),
        "upload_rates": functools.partial(measure_upload_rates, url, log, rates, arguments.batch),
        "changes": functools.partial(
            measure_changes, url, log, rounds, changes, pause_s, arguments.batch
        ),
        "lowered_speed": functools.partial(lowered_speed, url, 4, arguments.batch),
    }


if __name__ == "__main__":
    main()
