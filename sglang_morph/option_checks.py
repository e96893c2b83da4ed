"""Checks of `MorphOptions` that need neither the model nor SGLang's arguments."""

from __future__ import annotations

import math
from pathlib import Path

from memory_backends import BACKENDS, backend_class
from memory_backends.semi_unified import SemiUnifiedBackend
from memory_backends.shared_region import UNIT_STEP, check_unit_bytes
from sglang_morph.bundle import AUTO
from sglang_morph.controller.eviction_cost import EvictionParameters
from sglang_morph.controller.limits import is_rate
from sglang_morph.controller.monitor import check_percentile
from sglang_morph.controller.policy_options import flag
from sglang_morph.controller.registry import create_policy
from sglang_morph.options import FLOOR_POLICIES, PREFIX_POLICIES, MorphOptions
from sglang_morph.precision.plan import ORDERS
from sglang_morph.precision.variants.registry import check_variant
from sglang_morph.refusals import MorphRefusal


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
    _check_request_policies(options)
    _check_plan(options, device)
    _check_halves(options, device)
    _check_restore_rate(options)
    _check_event_log(options)


def _check_policy(options: MorphOptions) -> None:
    try:
        create_policy(options, top_level=1)
        check_percentile(options.slo_percentile)
        EvictionParameters.of(options)
    except ValueError as error:
        raise MorphRefusal(str(error)) from error


def _check_request_policies(options: MorphOptions) -> None:
    for name, known in (("floor_policy", FLOOR_POLICIES), ("prefix_policy", PREFIX_POLICIES)):
        if (given := getattr(options, name)) not in known:
            raise MorphRefusal(f"{flag(name)} is {given!r}; give one of {', '.join(known)}")


def _check_plan(options: MorphOptions, device: str) -> None:
    if options.order not in ORDERS:
        raise MorphRefusal(
            f"unknown order {options.order!r}; give --morph-order one of {', '.join(ORDERS)}"
        )
    if options.plan is not None and options.variants:
        raise MorphRefusal("--morph-plan names its own variants; leave out --morph-variants")
    if options.bundle is not None and options.variant_checkpoint is not None:
        raise MorphRefusal(
            "--morph-bundle and --morph-variant-checkpoint both bring variants; leave out one"
        )
    if options.bundle not in (None, AUTO) and (options.plan or options.variants):
        raise MorphRefusal(
            f"--morph-bundle {options.bundle} brings its own plan; leave out --morph-plan and "
            "--morph-variants"
        )
    for variant in options.variants:
        try:
            check_variant(variant, device)
        except ValueError as error:
            raise MorphRefusal(f"--morph-variants: {error}") from error


def _check_halves(options: MorphOptions, device: str) -> None:
    """What a backend that keeps weights as halves needs, and what only it takes."""
    if not issubclass(backend_class(options.memory_backend), SemiUnifiedBackend):
        if options.unit_mib is not None:
            raise MorphRefusal(
                f"--memory-backend {options.memory_backend} has no units; leave out "
                "--morph-unit-mib, or use --memory-backend semi_unified"
            )
        return
    if device not in ("cpu", "cuda"):
        raise MorphRefusal(
            f"--memory-backend {options.memory_backend} has no kernels for {device}; "
            "use --memory-backend layer_swap"
        )
    for name in ("bundle", "variant_checkpoint"):
        if getattr(options, name) is not None:
            raise MorphRefusal(
                f"{flag(name)} does not work with --memory-backend {options.memory_backend}: lower "
                "precision is the upper half of the weights themselves; leave it out (--morph-plan "
                "gives an order of layers), or use --memory-backend layer_swap"
            )
    if options.unit_mib is not None:
        try:
            check_unit_bytes(options.unit_mib << 20, UNIT_STEP)
        except ValueError as error:
            raise MorphRefusal(f"--morph-unit-mib {options.unit_mib}: {error}") from error


def _check_restore_rate(options: MorphOptions) -> None:
    rate = options.restore_gb_per_s
    if rate is not None and not is_rate(rate):
        raise MorphRefusal(
            f"--morph-restore-gb-per-s is {rate}; give more than 0, or leave it out for the "
            "link's full speed"
        )


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
