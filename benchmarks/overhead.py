"""What morphing costs at full precision: stock SGLang beside ours, at level 0.

    python -m benchmarks.overhead --model DIR --flags "--load-format dummy ..." --out FILE

All servers run on one GPU at the same time and take turns, so the ratios are of one run. All get
the same flags; give `--max-total-tokens` among them, so that their KV caches are equal.
"""

from __future__ import annotations

import functools
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.served import (
    Batch,
    Parts,
    elastic_command,
    equal_requests,
    send,
    server_arguments,
    serving,
)
from sglang_morph.demo.provenance import provenance

INPUTS, OUTPUTS = 512, 128
STOCK = "stock"


def main() -> None:
    parser = server_arguments(
        __doc__.splitlines()[0],
        "what is compared with stock; give it again for both",
        "overhead.json",
    )
    parser.add_argument(
        "--batches",
        default="1:16,64:5,16:5,256:3",
        help="batch sizes and how many turns of each server, SIZE:TURNS, comma-separated",
    )
    arguments = parser.parse_args()
    backends: list[str] = arguments.backend or ["layer_swap"]
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    commands = {
        STOCK: f"python -m sglang.launch_server --model-path {arguments.model} {arguments.flags}",
        **{name: elastic_command(arguments, name) for name in backends},
    }
    command = shlex.join(["python", "-m", "benchmarks.overhead", *sys.argv[1:]])
    results: dict[str, Any] = {
        "origin": provenance(command),
        "commands": commands,
        "ready_s": {},
        "level0": {},
        "errors": [],
    }
    parts = Parts(results, out, arguments.time_budget)
    with serving(commands, out.parent) as served:
        results["ready_s"] = {name: server.ready_s for name, server in served.items()}
        urls = {name: server.url for name, server in served.items()}
        for pair in arguments.batches.split(","):
            size, turns = (int(number) for number in pair.split(":"))
            measure = functools.partial(compare, urls, size, turns)
            parts.measure(results["level0"], str(size), measure)


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
