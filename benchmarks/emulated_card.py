"""What the windows of an emulated 24 GiB card say of `layer_swap` beside static FP8.

They are workloads of `benchmarks/plans/h200_llama8b.toml`, 30 s each of the Azure conversation
trace of 2023 from its second 600 on: three times as fast (14.9 requests a second), where static
full precision can't keep up and static FP8 still can; five times (25.8); and 0.65 times (3.0).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_morph.demo.report import Measure

KNEE, OVERLOAD, QUIET = "card-knee", "card-overload", "card-quiet"
"""What the names of the workloads begin with; a number after it counts the turns."""
BF16, FP8, OURS = "static_bf16", "static_fp8", "layer_swap"
WIDE = "static_fp8_wide"
"""Static FP8 with decode graphs as far as ours; stock SGLang's end sooner on such a card."""
_WORKLOAD = re.compile(rf"({KNEE}|{OVERLOAD}|{QUIET})(-\d+)?")

Rows = Sequence[dict[str, Any]]


def is_card(workload: str) -> bool:
    return _WORKLOAD.fullmatch(workload) is not None


def card_measures(rows: Rows) -> Iterator[Measure]:
    """From the rows of `bench ab`, one for each workload of each arm."""
    yield from _knee(rows)
    yield from _overload(rows)
    for row in _of(rows, QUIET, OURS).values():
        yield from _quiet(row)


def _of(rows: Rows, load: str, arm: str) -> dict[str, dict[str, Any]]:
    """Rows of an arm by turn."""
    found = {}
    for row in rows:
        match = _WORKLOAD.fullmatch(row["dataset_name"])
        if match and match[1] == load and row["arm"] == arm:
            found[f"{row['dataset_name']}/{row['block']}"] = row
    return found


def _knee(rows: Rows) -> Iterator[Measure]:
    ours, fp8, wide, full = (
        {turn: row["p95_ttft_ms"] / 1e3 for turn, row in _of(rows, KNEE, arm).items()}
        for arm in (OURS, FP8, WIDE, BF16)
    )
    for name, static in ((FP8, fp8), (WIDE, wide)):
        ratios = [ours[turn] / static[turn] for turn in sorted(ours.keys() & static.keys())]
        if not ratios:
            continue
        told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        seconds = " and ".join(f"{statistics.median(arm.values()):.2f} s" for arm in (ours, static))
        ratio = statistics.median(ratios)
        yield Measure(
            f"layer_swap.knee.p95_ttft_over_{name}",
            round(ratio, 4),
            f"median of {len(ratios)} turns ({told}); {seconds}",
            "<= 1.5 in 3 turns",
            ratio <= 1.5 and len(ratios) >= 3,
        )
    if full and ours:
        name = "layer_swap.knee.p95_ttft_static_bf16_over_ours"
        under = statistics.median(full.values()) / statistics.median(ours.values())
        unit = f"{statistics.median(full.values()):.2f} s of static bf16, {len(full)} turns"
        yield Measure(name, round(under, 4), unit)


def _overload(rows: Rows) -> Iterator[Measure]:
    ours, fp8 = (
        {turn: row["output_throughput"] for turn, row in _of(rows, OVERLOAD, arm).items()}
        for arm in (OURS, FP8)
    )
    ratios = [ours[turn] / fp8[turn] for turn in ours.keys() & fp8.keys()]
    if ratios:
        ratio = statistics.median(ratios)
        name = "layer_swap.overload.throughput_over_static_fp8"
        unit = f"output tokens/s, {len(ratios)} turns"
        yield Measure(name, round(ratio, 4), unit, ">= 0.95", ratio >= 0.95)


def _quiet(row: dict[str, Any]) -> Iterator[Measure]:
    moves, rate = row["transitions"], f"at {row['offered_rate']:.1f} requests/s"
    yield Measure("layer_swap.quiet.transitions", moves, rate, "0", moves == 0)
    computed = [row["tokens_by_level"], row["prefilled_by_level"]]
    full = sum(levels.get("0", 0) for levels in computed)
    total = sum(sum(levels.values()) for levels in computed)
    name, unit = "layer_swap.quiet.full_precision_share", f"of {total} tokens computed, {rate}"
    yield Measure(name, round(full / total, 4), unit, "1", full == total)
