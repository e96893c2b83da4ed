"""What morphing costs at full precision, and what a transition costs: stock SGLang beside ours.

    python -m benchmarks.overhead --model DIR --flags "--load-format dummy ..." --out FILE

Both servers run on one GPU at the same time and take turns, so the ratios are of one run. Both get
the same flags, and `--max-total-tokens`, so that their KV caches are equal.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import orjson

from benchmarks.served import Batch, Morphing, equal_requests, send, serving
from sglang_morph.demo.provenance import provenance

INPUTS, OUTPUTS = 512, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--flags", default="", help="flags of both servers")
    parser.add_argument("--batches", default="1,16,64", help="batch sizes, comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server")
    parser.add_argument("--changes", type=int, default=100, help="random level changes under load")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overhead.json"))
    arguments = parser.parse_args()
    common = f"--model-path {arguments.model} {arguments.flags}"
    commands = {
        "stock": f"python -m sglang.launch_server {common}",
        "morph": f"python -m sglang_morph.launch_server {common} "
        "--memory-backend layer_swap --morph-policy manual",
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "origin": provenance(shlex.join(["python", "-m", "benchmarks.overhead", *sys.argv[1:]]))
    }
    with serving(commands, arguments.out.parent) as urls:
        batches = [int(size) for size in arguments.batches.split(",")]
        results["level0"] = compare(urls, batches, arguments.rounds)
        save(results, arguments.out)
        results["transitions"] = transitions(urls["morph"], arguments.changes)
    save(results, arguments.out)


def compare(urls: dict[str, str], sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Per batch size the ratios morph / stock, paired by round."""
    rows = []
    for size in sizes:
        for url in urls.values():  # warm-up
            send(url, equal_requests(size, INPUTS, 16, seed=0))
        turns: dict[str, list[Batch]] = {name: [] for name in urls}
        for turn in range(rounds):
            order = list(urls) if turn % 2 == 0 else list(reversed(urls))
            for name in order:
                workload = equal_requests(size, INPUTS, OUTPUTS, seed=1 + turn)
                turns[name].append(send(urls[name], workload))
        rows.append(
            {
                "batch": size,
                "throughput_ratio": _ratio(turns, "output_tokens_per_s"),
                "tpot_ratio": _ratio(turns, "median_gap_s"),
                "stock_tokens_per_s": [b.output_tokens_per_s for b in turns["stock"]],
                "morph_tokens_per_s": [b.output_tokens_per_s for b in turns["morph"]],
                "stock_tpot_ms": [b.median_gap_s * 1e3 for b in turns["stock"]],
                "morph_tpot_ms": [b.median_gap_s * 1e3 for b in turns["morph"]],
            }
        )
        print(rows[-1], flush=True)
    return rows


def _ratio(turns: dict[str, list[Batch]], name: str) -> float:
    pairs = zip(turns["morph"], turns["stock"], strict=True)
    return statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs)


def transitions(url: str, changes: int) -> dict[str, Any]:
    """Levels one by one, then random changes, while 64 requests decode."""
    morphing, done = Morphing(url), threading.Event()
    digest = morphing.verify()
    batches: list[Batch] = []

    def load() -> None:
        while not done.is_set():
            batches.append(send(url, equal_requests(64, INPUTS, 1024, seed=len(batches))))

    marks: list[tuple[float, int, int]] = []
    thread = threading.Thread(target=load)
    thread.start()
    time.sleep(4.0)
    top = len(morphing.status()["levels"]) - 1
    rng, level = random.Random(5), 0
    wanted = [*range(1, top + 1), 0, top, 0]
    while len(wanted) < changes:
        wanted.append(rng.choice([k for k in range(top + 1) if k != wanted[-1]]))
    for target in wanted[:changes]:
        marks.append((time.time(), level, target))
        morphing.go_to(target)
        level = target
        time.sleep(0.15)
    done.set()
    thread.join()
    morphing.go_to(0)
    status = morphing.status()
    rows = [e for e in status["events"] if e["kind"] == "transition"]
    return {
        "changes": len(marks),
        "failed_requests": sum(batch.failed for batch in batches),
        "weights_equal": morphing.verify() == digest,
        "median_gap_ms": statistics.median(b.median_gap_s for b in batches) * 1e3,
        "bytes": status["bytes"],
        "capacity": [status["base_tokens"], status["capacity_tokens"]],
        "counts": status["monitor"]["transitions"],
        "last_transitions": rows,
        "marks": marks,
    }


def save(results: dict[str, Any], path: Path) -> None:
    path.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    main()
