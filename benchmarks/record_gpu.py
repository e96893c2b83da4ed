"""Put what the GPU benchmarks measured into `acceptance.json`, also where a bar is missed.

    python -m benchmarks.record_gpu

Files under `benchmarks/results` that are not there, and parts that a run had no time for, are left
out: their rows stay as they are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.acceptance import ACCEPTANCE, RESULTS, Row, upsert
from benchmarks.kv_capacity import FP8

LEVEL0 = ("overhead_h200.json", "overhead_bs16_h200.json")
"""Runs in which backends were compared with stock at level 0; what a later one measured again
counts."""
TRANSITIONS = {
    "layer_swap": ("overhead_h200.json", "transitions_h200.json"),
    "semi_unified": ("overhead_semi_unified_h200.json",),
}
"""Backend -> runs of its level changes; what a later one measured again counts."""
MERGE = "merge_gemm_h200.json"
_MERGE_BARS = {64: 1.10, 256: 1.15, 1024: 1.15, 4096: 1.08}
_LENT_BARS = {"layer_swap": 0.99, "semi_unified": 0.97}

Content = dict[str, Any]


class Recorder:
    """Makes rows out of one results file."""

    def __init__(self, folder: Path, file: str) -> None:
        path = folder / file
        self.content: Content = orjson.loads(path.read_bytes()) if path.exists() else {}
        self._raw = f"benchmarks/results/{file}"

    def row(
        self,
        name: str,
        value: float,
        unit: str,
        bar: str,
        holds: bool | Callable[[float], bool],
        origin: dict[str, str] | None = None,
    ) -> Row:
        """`origin`: where it is not that of the whole file."""
        shown = round(value, 4) if isinstance(value, float) else value
        met = holds if isinstance(holds, bool) else holds(value)
        return Row(name, shown, unit, bar, met, **(origin or self.content["origin"]), raw=self._raw)


def at_most(limit: float) -> Callable[[float], bool]:
    return lambda value: value <= limit


def at_least(limit: float) -> Callable[[float], bool]:
    return lambda value: value >= limit


def gpu_rows(folder: Path) -> list[Row]:
    """Everything that the files in `folder` tell."""
    rows: list[Row] = []
    for backend, files in TRANSITIONS.items():
        for file in LEVEL0:
            rows += level0_rows(Recorder(folder, file), backend)
        for file in files:
            rows += transition_rows(Recorder(folder, file), backend)
    rows += merge_rows(Recorder(folder, MERGE))
    return rows


def transition_rows(found: Recorder, backend: str) -> Iterator[Row]:
    parts = found.content.get("backends", {}).get(backend)
    if parts is None:
        return
    if "changes" in parts:
        yield from _changes(found, backend, parts["changes"])
    if "levels" in parts:
        yield from _lent(found, backend, parts["levels"])
    if "levels" in parts and FP8 in found.content:
        yield _kv(found, backend, parts)
    for rate in parts.get("upload_rates", []):
        yield from _upload_rate(found, backend, rate)
    if "lowered_speed" in parts:
        yield from _lowered_speed(found, backend, parts["lowered_speed"])


def level0_rows(found: Recorder, backend: str) -> Iterator[Row]:
    for size, servers in found.content.get("level0", {}).items():
        if backend not in servers:
            continue
        measured, name = servers[backend], f"{backend}.level0"
        turns = f"median of {len(measured['tpot_ms'])} turns"
        speed, tpot = measured["tokens_per_s_ratio"], measured["tpot_ms_ratio"]
        yield found.row(
            f"{name}.throughput_ratio.bs{size}", speed, turns, ">= 0.99", at_least(0.99)
        )
        yield found.row(f"{name}.tpot_ratio.bs{size}", tpot, turns, "<= 1.01", at_most(1.01))
    ready = found.content.get("ready_s", {})
    if backend in ready and "stock" in ready:
        unit = f"{ready[backend]:.0f} s over {ready['stock']:.0f} s, side by side"
        ratio = ready[backend] / ready["stock"]
        yield found.row(f"{backend}.start_ratio", ratio, unit, "<= 1.6", at_most(1.6))


def _changes(found: Recorder, backend: str, part: Content) -> Iterator[Row]:
    steps, events, top = part["steps_of_levels"], part["events"], part["top"]

    def taken(phase: str, fits: Callable[[int, int], bool]) -> list[float]:
        return [
            event["duration_s"]
            for event in events
            if (event["phase"], event["result"]) == (phase, "completed")
            and fits(event["from"], event["to"])
        ]

    def longest(phase: str, fits: Callable[[int, int], bool]) -> float | None:
        return max(taken(phase, fits), default=None)

    whole = longest("lower", lambda a, b: (a, b) == (0, top))
    if whole is not None:
        name = "to_fast_ms" if backend == "semi_unified" else "fp8_whole_model_ms"
        limit = 5 if backend == "semi_unified" else 15
        unit = "ms of the scheduler, the longest"
        yield found.row(f"{backend}.{name}", whole * 1e3, unit, f"<= {limit}", at_most(limit))
    half = longest("restore", lambda a, b: steps[a] - steps[b] == 16)
    if half is not None and backend == "layer_swap":
        yield found.row(
            f"{backend}.restore.16_layers_ms", half * 1e3, "ms, the longest", "<= 300", at_most(300)
        )
    rates = [
        part["host_backup"] / seconds / 1e9
        for seconds in taken("restore", lambda a, b: (a, b) == (top, 0))
    ]
    if rates:
        yield found.row(
            f"{backend}.restore.gbps",
            statistics.median(rates),
            "GB/s, all layers, from the withdrawal of pages to the last layer, median of "
            f"{len(rates)} (slowest {min(rates):.1f})",
            ">= 40",
            at_least(40),
        )
    yield from _gaps(found, backend, part)
    failed, changes, equal = part["failed_requests"], part["random_changes"], part["weights_equal"]
    yield found.row(
        f"{backend}.random_changes.failed_requests",
        failed,
        f"of {part['requests']} in {changes} changes at batch 64; weights equal: {equal}",
        "0 in 200 changes",
        failed == 0 and equal and changes >= 200,
    )


def _gaps(found: Recorder, backend: str, part: Content) -> Iterator[Row]:
    steps = part["steps_of_levels"]
    by_move: dict[int, list[float]] = {}
    for gap in part["downshift"]:
        if steps[gap["to"]] - steps[gap["from"]] == 8:
            by_move.setdefault(gap["to"], []).append(gap["gap_above_step_ms"])
    if by_move:
        measured = [gap for gaps in by_move.values() for gap in gaps]
        yield found.row(
            f"{backend}.downshift.gap_ms",
            max(statistics.median(gaps) for gaps in by_move.values()),
            f"ms above the median step, 8 layers, median of {len(measured)} (longest "
            f"{max(measured):.2f})",
            "<= 3",
            at_most(3),
        )
    restore = part["restore"]
    if restore["tpot_ratio"] is not None:
        yield found.row(
            f"{backend}.restore.tpot_ratio",
            restore["tpot_ratio"],
            f"P50 of {restore['gaps']} steps in {len(restore['restores'])} restores, at full speed",
            "<= 1.10",
            at_most(1.10),
        )


def _lent(found: Recorder, backend: str, levels: Sequence[Content]) -> Iterator[Row]:
    """Of what weights free at each 8-bit level, the share that becomes pages.

    Padding of slabs is lent as well, so that alone could come to more than all; at the deepest
    level nothing but the pages may be left of the memory that moves, so there both count.
    """
    full = levels[0]["bytes"]
    eight_bit = [level["bytes"] for level in levels[1:] if level["bits"] == 8]
    if not eight_bit:
        return
    weights = full["full_weights"] + full["variant_weights"]
    shares = [
        now["kv_lent"] / (weights - now["full_weights"] - now["variant_weights"])
        for now in eight_bit
    ]
    last = eight_bit[-1]
    region = full["host_backup"] if backend == "semi_unified" else last["kv_lent"] + last["unused"]
    shares.append(last["kv_lent"] / region)
    limit = _LENT_BARS[backend]
    # With levels in between, a unit that the next layer still reads from stays where it is.
    share = shares[-1] if backend == "semi_unified" else min(shares)
    yield found.row(f"{backend}.lent_fraction", share, "", f">= {limit}", at_least(limit))


def _kv(found: Recorder, backend: str, parts: Content) -> Row:
    """What decode graphs take beyond those of static FP8 is counted as KV tokens not to be had."""
    fp8, levels = found.content[FP8], parts["levels"]
    deepest = [level for level in levels if level["bits"] >= 8][-1]
    page_bytes = levels[0]["bytes"]["kv_base"] / (levels[0]["base_tokens"] + 1)
    graphs = 2**30 * ((parts["graphs_gib"] or 0.0) - (fp8["graphs_gib"] or 0.0))
    return found.row(
        f"{backend}.kv_over_static_fp8",
        (deepest["capacity_tokens"] - graphs / page_bytes) / fp8["tokens"],
        f"{deepest['capacity_tokens']} over {fp8['tokens']} tokens, decode graphs counted",
        ">= 0.95",
        at_least(0.95),
    )


def _upload_rate(found: Recorder, backend: str, rate: Content) -> Iterator[Row]:
    if rate["tpot_ratio"] is None:
        return
    limit = rate["limit_gb_per_s"]
    most = 1.05 if limit is None else 1.10
    yield found.row(
        f"{backend}.restore.tpot_ratio.limit_{'none' if limit is None else f'{limit:g}'}",
        rate["tpot_ratio"],
        f"P50 of {rate['gaps']} steps in {len(rate['restores'])} restores, at "
        f"{rate['gb_per_s']:.1f} GB/s",
        f"<= {most:.2f}",
        at_most(most),
    )


def _lowered_speed(found: Recorder, backend: str, part: Content) -> Iterator[Row]:
    name = f"{backend}.fast_over_full_throughput.bs{part['batch']}"
    unit = f"median of {len(part['full_tokens_per_s'])} turns"
    yield found.row(name, part["ratio"], unit, ">= 1.3", at_least(1.3))


def merge_rows(found: Recorder) -> Iterator[Row]:
    for row in found.content.get("rows", []):
        if (limit := _MERGE_BARS.get(row["m"])) is not None:
            name = f"semi_unified.gemm_ratio.m{row['m']}"
            unit = "over cuBLAS bf16, weighted by the shapes of a decode step"
            yield found.row(
                name,
                row["ratio_weighted"],
                unit,
                f"<= {limit}",
                at_most(limit),
                row.get("origin"),
            )


def main() -> None:
    rows = gpu_rows(RESULTS)
    upsert(rows, ACCEPTANCE)
    print(f"{len(rows)} rows, {sum(not row.holds for row in rows)} of them miss their bar")


if __name__ == "__main__":
    main()
