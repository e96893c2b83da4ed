"""Each option that is unknown or contradicts another is refused with a remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memory_backends import BACKENDS
from sglang_morph.option_checks import check_options
from sglang_morph.options import MorphOptions
from sglang_morph.refusals import MorphRefusal

ELASTIC = MorphOptions(memory_backend="layer_swap")


@pytest.mark.parametrize("backend", BACKENDS)
def test_defaults_are_accepted(backend: str) -> None:
    check_options(replace(ELASTIC, memory_backend=backend), "cpu")


def test_every_option_at_an_accepted_value(tmp_path: Path) -> None:
    options = MorphOptions(
        memory_backend="layer_swap",
        policy="manual",
        variants=("int8", "int4"),
        order="back",
        max_level=0,
        enter_pressure=1.0,
        leave_pressure=0.0,
        enter_queue_delay_s=0.0,
        restore_gb_per_s=2.5,
        event_log=str(tmp_path / "events.jsonl"),
        sample_interval_s=0.0,
    )
    check_options(options, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_backend": "swap"}, "'swap'; give --memory-backend one of static, layer_swap"),
        ({"policy": "magic"}, "unknown policy 'magic': give one of"),
        ({"enter_pressure": 0.6}, "--morph-leave-pressure is 0.6, --morph-enter-pressure 0.6"),
        ({"leave_pressure": -0.1}, "--morph-leave-pressure is -0.1"),
        ({"enter_pressure": 1.1}, "--morph-enter-pressure is 1.1"),
        ({"enter_pressure": float("nan")}, "--morph-enter-pressure is nan"),
        ({"enter_queue_delay_s": -1.0}, "--morph-enter-queue-delay-s is -1.0: give seconds"),
        ({"policy": "slo", "enter_late_s": -1.0}, "--morph-enter-late-s is -1.0: give seconds"),
        ({"enter_late_s": float("nan")}, "--morph-enter-late-s is nan: give seconds above 0"),
        ({"enter_hold_s": float("inf")}, "--morph-enter-hold-s is inf: give seconds"),
        ({"leave_hold_s": -0.5}, "--morph-leave-hold-s is -0.5: give seconds"),
        ({"min_dwell_s": float("nan")}, "--morph-min-dwell-s is nan: give seconds"),
        ({"sample_interval_s": -1.0}, "--morph-sample-interval-s is -1.0; give seconds"),
        ({"max_level": -1}, "--morph-max-level is -1"),
        ({"restore_gb_per_s": 0.0}, "--morph-restore-gb-per-s is 0.0; give more than 0"),
        ({"floor_policy": "wait"}, "--morph-floor-policy is 'wait'; give one of hold, reject, ign"),
        ({"prefix_policy": "mix"}, "--morph-prefix-policy is 'mix'; give one of share, namespace"),
        ({"order": "middle"}, "'middle'; give --morph-order one of front, back"),
        ({"variants": ("int9",)}, "--morph-variants: variant 'int9'.*known there: int8, int4"),
        ({"plan": "p.json", "variants": ("int8",)}, "leave out --morph-variants"),
        ({"unit_mib": 2}, "layer_swap has no units; leave out --morph-unit-mib"),
        ({"memory_backend": "semi_unified", "unit_mib": 3}, "multiple of 2 MiB.*; take "),
        ({"memory_backend": "semi_unified", "unit_mib": 0}, "multiple of 2 MiB.*; take "),
        ({"memory_backend": "semi_unified", "unit_mib": -2}, "multiple of 2 MiB.*; take "),
        ({"memory_backend": "semi_unified", "bundle": "auto"}, "--morph-bundle does not work with"),
        (
            {"memory_backend": "semi_unified", "variant_checkpoint": "x"},
            "--morph-variant-checkpoint does not work with",
        ),
        ({"event_log": "no/such/folder/log"}, "give a file in a folder that exists"),
        ({"event_log": "."}, "give a file in a folder that exists"),
    ],
    ids=str,
)
def test_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(MorphRefusal, match=message) as refusal:
        check_options(replace(ELASTIC, **change), "cpu")  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_static_asks_for_nothing_else() -> None:
    check_options(MorphOptions(policy="magic", enter_pressure=9.0), "xpu")


def test_units_of_any_multiple_of_2_mib() -> None:
    check_options(MorphOptions(memory_backend="semi_unified", unit_mib=6), "cpu")


def test_halves_are_merged_on_cpu_and_cuda_only() -> None:
    options = MorphOptions(memory_backend="semi_unified")
    for device in ("cpu", "cuda"):
        check_options(options, device)
    with pytest.raises(MorphRefusal, match="semi_unified has no kernels for xpu.*layer_swap"):
        check_options(options, "xpu")
