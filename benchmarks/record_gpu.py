"""Put what the GPU benchmarks measured into `acceptance.json`, also where a bar is missed.

python -m benchmarks.record_gpu
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from benchmarks.acceptance import ACCEPTANCE, RESULTS, Row, upsert

LEVEL0 = ("overhead_h200.json", "overhead_bs256_h200.json")
CARD = "emulated_card_h200.json"


def main() -> None:
    rows = [row for name in LEVEL0 for row in _level0(name)]
    rows += _transitions(LEVEL0[0])
    rows += _card(CARD)
    upsert(rows, ACCEPTANCE)


def _level0(name: str) -> Iterator[Row]:
    content = _load(name)
    for row in content["level0"]:
        size = row["batch"]
        ratio, tpot = row["throughput_ratio"], row["tpot_ratio"]
        yield _row(name, f"level0.throughput_ratio.bs{size}", ratio, "", ">= 0.99", ratio >= 0.99)
        yield _row(name, f"level0.tpot_ratio.bs{size}", tpot, "", "<= 1.01", tpot <= 1.01)


def _transitions(name: str) -> Iterator[Row]:
    found = _load(name)["transitions"]
    events = found["last_transitions"]
    whole = max(e["duration_s"] for e in events if (e["from"], e["to"]) == (0, 3)) * 1e3
    back = max(e["duration_s"] for e in events if _is(e, 3, 2, "restore")) * 1e3
    all_back = max(e["duration_s"] for e in events if _is(e, 3, 0, "restore"))
    gbps = found["bytes"]["host_backup"] / all_back / 1e9
    failed, changes = found["failed_requests"], found["changes"]
    yield _row(name, "fp8_whole_model_ms", whole, "ms of the scheduler", "<= 15", whole <= 15)
    yield _row(name, "restore.16_layers_ms", back, "ms", "<= 300", back <= 300)
    yield _row(name, "restore.gbps", gbps, "GB/s, 32 layers, rebuild included", ">= 40", gbps >= 40)
    yield _row(
        name,
        "random_changes.failed_requests",
        failed,
        f"of {changes} changes at batch 64, weights equal: {found['weights_equal']}",
        "0 in 200 changes",
        failed == 0 and found["weights_equal"] and changes >= 200,
    )


def _card(name: str) -> Iterator[Row]:
    turns = {round(turn["rate"], 1): turn for turn in _load(name)["turns"]}
    quiet, knee = turns[3.0]["layer_swap"]["monitor"], turns[14.9]
    moves = sum(quiet["transitions"].values())
    yield _row(
        name,
        "quiet.transitions",
        moves,
        "at 3 req/s: all tokens at full precision",
        "0",
        moves == 0,
    )
    p95 = {arm: knee[arm]["p95_ttft_ms"] for arm in ("static_bf16", "static_fp8", "layer_swap")}
    over = p95["layer_swap"] / p95["static_fp8"]
    under = p95["static_bf16"] / p95["layer_swap"]
    yield _row(name, "knee.p95_ttft_over_static_fp8", over, "", "<= 1.5", over <= 1.5)
    yield _row(name, "knee.p95_ttft_static_bf16_over_ours", under, "", "reported", True)


def _is(event: dict[str, Any], source: int, target: int, phase: str) -> bool:
    return (event["from"], event["to"], event["phase"]) == (source, target, phase)


def _row(raw: str, name: str, value: float, unit: str, bar: str, holds: bool) -> Row:
    origin = _load(raw)["origin"]
    where = str((RESULTS / raw).relative_to(RESULTS.parents[1]))
    shown = round(value, 4) if isinstance(value, float) else value
    return Row(f"layer_swap.{name}", shown, unit, bar, holds, **origin, raw=where)


def _load(name: str) -> dict[str, Any]:
    return orjson.loads(Path(RESULTS / name).read_bytes())


if __name__ == "__main__":
    main()
