"""Which rows come out of the GPU benchmarks' files, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.acceptance import Row
from benchmarks.record_gpu import LEVEL0, MERGE, TRANSITIONS, gpu_rows

ORIGIN = {"command": "python -m b", "commit": "abc", "date": "2030-01-01", "hardware": "a GPU"}


def move(a: int, b: int, phase: str, duration_s: float, result: str = "completed") -> dict:
    return {"from": a, "to": b, "phase": phase, "duration_s": duration_s, "result": result}


def owners(full: int, variant: int, lent: int, unused: int, backup: int = 64) -> dict[str, int]:
    return {
        "full_weights": full, "variant_weights": variant, "kv_lent": lent, "unused": unused,
        "host_backup": backup, "kv_base": 2**30,
    }  # fmt: skip


def parts(top_ms: float) -> dict[str, Any]:
    """Levels of 8, 16 and 32 layers."""
    return {
        "levels": [
            {"bits": 16, "bytes": owners(128, 0, 0, 2)},
            {"bits": 8, "bytes": owners(64, 32, 32, 2)},
            {"bits": 8, "bytes": owners(0, 64, 64, 0)},
            {"bits": 4, "bytes": owners(0, 32, 80, 0)},
        ],
        "changes": {
            "steps_of_levels": [0, 8, 16, 32, 64],
            "top": 3,
            "random_changes": 200,
            "requests": 640,
            "failed_requests": 0,
            "weights_equal": True,
            "host_backup": 8e9,
            "downshift": [
                {"from": 0, "to": 1, "gap_above_step_ms": 1.0},
                {"from": 0, "to": 1, "gap_above_step_ms": 9.0},
                {"from": 0, "to": 1, "gap_above_step_ms": 2.0},
                {"from": 1, "to": 2, "gap_above_step_ms": 2.5},
                {"from": 2, "to": 3, "gap_above_step_ms": 7.0},
            ],
            "restore": {"tpot_ratio": 1.05, "gaps": 300, "restores": [{}] * 8},
            "events": [
                move(0, 3, "lower", 0.009),
                move(0, 3, "lower", top_ms / 1e3),
                move(3, 2, "reclaim", 9.0, "started"),
                move(3, 2, "restore", 0.09),
                move(3, 0, "restore", 0.16),
            ],
        },
        "lowered_speed": {"batch": 64, "ratio": 1.35, "full_tokens_per_s": [1.0] * 4},
    }


def level0(tpot: float) -> dict[str, Any]:
    return {"tokens_per_s_ratio": 1.0, "tpot_ms_ratio": tpot, "tpot_ms": [5.0] * 16}


FIRST, AGAIN = LEVEL0
_, LATER = TRANSITIONS["layer_swap"]
(SEMI,) = TRANSITIONS["semi_unified"]
SEEN = {"gaps": 100, "restores": [{}] * 3}

FILES: dict[str, dict[str, Any]] = {
    FIRST: {
        "origin": ORIGIN,
        "ready_s": {"stock": 50.0, "layer_swap": 75.0, "semi_unified": 75.0},
        "level0": {
            "1": {"stock": {}, "layer_swap": level0(1.02)},
            "64": {"stock": {}, "semi_unified": level0(1.0)},
        },
        "backends": {"layer_swap": parts(12.0)},
    },
    AGAIN: {
        "origin": ORIGIN,
        "ready_s": {},
        "level0": {"1": {"stock": {}, "layer_swap": level0(1.005)}},
    },
    SEMI: {
        "origin": ORIGIN,
        "ready_s": {},
        "level0": {"64": {"stock": {}, "semi_unified": level0(2.0)}},  # measured again since
        "backends": {"semi_unified": parts(4.0)},
    },
    LATER: {
        "origin": ORIGIN,
        "static_fp8": {"tokens": 1000, "graphs_gib": 0.0},
        "backends": {
            "layer_swap": {
                "graphs_gib": 1.0,
                "levels": [
                    {"bits": 16, "bytes": owners(128, 0, 0, 2), "base_tokens": 9},
                    {"bits": 8, "bytes": owners(0, 64, 64, 0), "capacity_tokens": 970},
                    {"bits": 4, "bytes": owners(0, 32, 80, 0), "capacity_tokens": 2000},
                ],
                "upload_rates": [
                    {"limit_gb_per_s": 5.0, "gb_per_s": 4.9, "tpot_ratio": 1.06, **SEEN},
                    {"limit_gb_per_s": None, "gb_per_s": 45.0, "tpot_ratio": 1.06, **SEEN},
                    {"limit_gb_per_s": 2.5, "gb_per_s": None, "tpot_ratio": None, **SEEN},
                ],
            }
        },
    },
    MERGE: {
        "origin": ORIGIN,
        "rows": [
            {"m": 1, "ratio_weighted": 1.0},
            {"m": 64, "ratio_weighted": 1.2},
            {"m": 4096, "ratio_weighted": 1.05},
        ],
    },
}  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Row]:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(orjson.dumps(content))
    return {row.name: row for row in gpu_rows(tmp_path)}


@pytest.mark.parametrize(
    ("name", "value", "holds"),
    [
        ("layer_swap.level0.tpot_ratio.bs1", 1.005, True),
        ("layer_swap.level0.throughput_ratio.bs1", 1.0, True),
        ("layer_swap.start_ratio", 1.5, True),
        ("layer_swap.fp8_whole_model_ms", 12.0, True),
        ("layer_swap.restore.16_layers_ms", 90.0, True),
        ("layer_swap.restore.gbps", 50.0, True),
        ("layer_swap.restore.tpot_ratio", 1.05, True),
        ("layer_swap.downshift.gap_ms", 2.5, True),
        ("layer_swap.lent_fraction", 1.0, True),
        ("layer_swap.random_changes.failed_requests", 0, True),
        ("layer_swap.kv_over_static_fp8", 0.96, True),
        ("layer_swap.restore.tpot_ratio.limit_5", 1.06, True),
        ("layer_swap.restore.tpot_ratio.limit_none", 1.06, False),
        ("semi_unified.level0.throughput_ratio.bs64", 1.0, True),
        ("semi_unified.to_fast_ms", 9.0, False),
        ("semi_unified.restore.gbps", 50.0, True),
        ("semi_unified.restore.tpot_ratio", 1.05, True),
        ("semi_unified.lent_fraction", 1.0, True),
        ("semi_unified.random_changes.failed_requests", 0, True),
        ("semi_unified.fast_over_full_throughput.bs64", 1.35, True),
        ("semi_unified.gemm_ratio.m64", 1.2, False),
        ("semi_unified.gemm_ratio.m4096", 1.05, True),
    ],
)
def test_every_number_is_recorded_whether_it_holds_or_not(
    rows: dict[str, Row], name: str, value: float, holds: bool
) -> None:
    row = rows[name]
    assert row.value == pytest.approx(value, abs=1e-3)
    assert row.holds is holds
    assert (row.commit, row.hardware) == ("abc", "a GPU")
    assert row.raw.startswith("benchmarks/results/")


def test_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    assert gpu_rows(tmp_path) == []
    content = {**FILES[FIRST], "level0": {}, "backends": {"layer_swap": {}}}
    (tmp_path / FIRST).write_bytes(orjson.dumps(content))
    names = [row.name for row in gpu_rows(tmp_path)]
    assert names == ["layer_swap.start_ratio", "semi_unified.start_ratio"]


def test_a_rate_that_no_step_was_seen_at_has_no_row(rows: dict[str, Row]) -> None:
    assert "layer_swap.restore.tpot_ratio.limit_2.5" not in rows


def test_fewer_changes_than_asked_for_do_not_hold(tmp_path: Path) -> None:
    changes = parts(12.0)["changes"] | {"random_changes": 60}
    overhead = {**FILES[FIRST], "backends": {"layer_swap": {"changes": changes}}}
    (tmp_path / FIRST).write_bytes(orjson.dumps(overhead))
    rows = {row.name: row for row in gpu_rows(tmp_path)}
    assert not rows["layer_swap.random_changes.failed_requests"].holds
