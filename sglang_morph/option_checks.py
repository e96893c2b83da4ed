"""Checks of `MorphOptions` that need neither the model nor SGLang's arguments."""

from __future__ import annotations

import math
from pathlib import Path

from memory_backends import BACKENDS
from sglang_morph.controller.monitor import Monitor
from sglang_morph.controller.registry import create_policy
from sglang_morph.options import MorphOptions
from sglang_morph.precision.variants.registry import check_variant
from sglang_morph.refusals import MorphRefusal

ORDERS = ("front", "back")


def check_options(options: MorphOptions, device: str) -> None:
    """Raises `MorphRefusal` for the first option that is unknown or contradicts another.

    `device` is a device type, such as `cpu`. With `static` only the backend's name matters.
    """
    if options.memory_backend not in BACKENDS:
        raise MorphRefusal(
            f"unknown memory backend {options.memory_backend!r}; "
            f"give --memory-backend one of {', '.join(BACKENDS)}"
        )
    if options.is_static:
        return
    _check_policy(options)
    _check_plan(options, device)
    _check_event_log(options)


def _check_policy(options: MorphOptions) -> None:
    try:
        create_policy(options, top_level=1)
        Monitor(percentile=options.slo_percentile)
    except ValueError as error:
        raise MorphRefusal(str(error)) from error


def _check_plan(options: MorphOptions, device: str) -> None:
    if options.order not in ORDERS:
        raise MorphRefusal(
            f"unknown order {options.order!r}; give --morph-order one of {', '.join(ORDERS)}"
        )
    if options.plan is not None and options.variants:
        raise MorphRefusal("--morph-plan names its own variants; leave out --morph-variants")
    for variant in options.variants:
        try:
            check_variant(variant, device)
        except ValueError as error:
            raise MorphRefusal(f"--morph-variants: {error}") from error


def _check_event_log(options: MorphOptions) -> None:
    if not 0 <= options.sample_interval_s < math.inf:
        raise MorphRefusal(
            f"--morph-sample-interval-s is {options.sample_interval_s}; give seconds, 0 or more"
        )
    if options.event_log is None:
        return
    path = Path(options.event_log)
    if path.is_dir() or not path.parent.is_dir():
        raise MorphRefusal(
            f"--morph-event-log {options.event_log} cannot be written; "
            "give a file in a folder that exists"
        )
