"""What an emulated card's rows, made by hand, say."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.emulated_card import card_measures, is_card
from sglang_morph.demo.report import Measure


def knee(turn: int, arm: str, ttft_ms: float) -> dict[str, Any]:
    return {
        "dataset_name": f"card-knee-{turn}", "arm": arm, "block": 0, "p95_ttft_ms": ttft_ms,
    }  # fmt: skip


ROWS: list[dict[str, Any]] = [
    knee(1, "static_fp8", 100.0), knee(1, "layer_swap", 160.0),
    knee(2, "layer_swap", 120.0), knee(2, "static_fp8", 100.0),
    knee(3, "static_fp8", 100.0), knee(3, "layer_swap", 140.0),
    knee(3, "static_bf16", 700.0), knee(3, "static_fp8_wide", 80.0),
    {**knee(1, "layer_swap", 9e9), "dataset_name": "azure-conv-8b"},
    {
        "dataset_name": "card-overload", "arm": "static_fp8", "block": 0,
        "output_throughput": 1000.0,
    },
    {
        "dataset_name": "card-overload", "arm": "layer_swap", "block": 0,
        "output_throughput": 940.0,
    },
    {
        "dataset_name": "card-quiet", "arm": "layer_swap", "block": 0, "transitions": 0,
        "offered_rate": 3.0, "tokens_by_level": {"0": 900},
        "prefilled_by_level": {"0": 4000, "1": 100},
    },
]  # fmt: skip


def named(rows: list[dict[str, Any]]) -> dict[str, Measure]:
    return {measure.name: measure for measure in card_measures(rows)}


@pytest.mark.parametrize(
    ("name", "value", "holds"),
    [
        ("knee.p95_ttft_over_static_fp8", 1.4, True),
        ("knee.p95_ttft_over_static_fp8_wide", 1.75, False),
        ("knee.p95_ttft_static_bf16_over_ours", 5.0, True),
        ("overload.throughput_over_static_fp8", 0.94, False),
        ("quiet.transitions", 0, True),
        ("quiet.full_precision_share", 0.98, False),
    ],
)
def test_every_number_is_there_whether_it_holds_or_not(
    name: str, value: float, holds: bool
) -> None:
    measure = named(ROWS)[f"layer_swap.{name}"]
    assert measure.value == pytest.approx(value)
    assert measure.holds is holds


def test_fewer_turns_than_asked_for_do_not_hold() -> None:
    assert not named(ROWS[2:4])["layer_swap.knee.p95_ttft_over_static_fp8"].holds


def test_a_turn_that_only_one_arm_had_does_not_count() -> None:
    assert "layer_swap.knee.p95_ttft_over_static_fp8" not in named(ROWS[:1])


def test_other_workloads_are_none_of_the_cards() -> None:
    assert is_card("card-knee-2")
    assert is_card("card-quiet")
    assert not is_card("azure-conv-8b")
    assert not is_card("card-kneel")
