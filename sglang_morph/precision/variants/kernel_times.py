"""What the variants' kernels cost on this GPU, measured once, and the order that follows from it.

Which of two variants is faster depends on the GPU and the number of tokens: Marlin's int4 beats
bf16 at one token and takes twice its time at 256 on Hopper, where fp8 is faster everywhere. So the
linears of one decoder layer are timed as a server starts, and the result is kept in the cache.
Nothing is compiled for it: a kernel that would have to be is left out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import orjson
import torch
from torch.nn.functional import linear

from patches.upstream import installed_version
from sglang_morph.bundle.cache import kernel_times_file
from sglang_morph.precision.names import FULL, NOMINAL_BITS
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.base import Parts, Variant, parts_on_device
from sglang_morph.precision.variants.registry import (
    FP8_VARIANTS,
    LOSSLESS_VARIANTS,
    VARIANTS,
    create_variant,
    has_fp8,
)

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
BATCHES = (1, 16, 64, 256, 1024)
"""Tokens: decoding alone, decoding under load, prefill. Each counts alike."""
TIE = 0.1
"""Prices this near are one price: the same kernel differs as much from run to run."""
FLUSH_BYTES = 512 << 20
"""Written before every call: no weight is left in the L2 cache, and the host gets ahead."""
ROUNDS = 5

Shape = tuple[int, int]
Kernel = Callable[[torch.Tensor], torch.Tensor]


@runtime_checkable
class CompiledVariant(Protocol):
    """A variant whose kernel is compiled on the machine that runs it."""

    def is_built(self, dtype: torch.dtype) -> bool:
        """Whether that was done before, for weights of `dtype` and the current GPU."""


class Cost(msgspec.Struct, frozen=True):
    """One variant beside full precision, which is 1 in both."""

    time: float
    """Of a decoder layer's linears: the mean over `BATCHES`."""
    size: float
    """Of their weights."""


class KernelTimes(msgspec.Struct, frozen=True):
    """Of one GPU, one SGLang and the linears of one model."""

    measured_for: dict[str, Any]
    """All that the times depend on."""
    milliseconds: dict[str, list[float]]
    """Variant or `full` -> a decoder layer's linears together, for each of `BATCHES`."""
    costs: dict[str, Cost]

    @property
    def order(self) -> tuple[str, ...]:
        """The variants a layer should pass through."""
        return order_of(self.costs)

    def status(self) -> dict[str, Any]:
        """For people."""
        return {"batches": BATCHES, **msgspec.to_builtins(self), "order": self.order}


def order_of(costs: Mapping[str, Cost]) -> tuple[str, ...]:
    """The variant that costs least time for the bytes it frees, then the next smaller ones.

    A variant slower than full precision comes in only if there is no other: it would make the
    server slower when it is under pressure. Between equals the lossless and the larger one wins.
    """
    chosen: list[str] = []
    now, bits = Cost(1.0, 1.0), NOMINAL_BITS[FULL]
    while True:
        left = {
            name: (cost.time - now.time) / (now.size - cost.size)
            for name, cost in costs.items()
            if NOMINAL_BITS[name] < bits and cost.size < now.size and (cost.time <= 1 or not chosen)
        }
        if not left:
            return tuple(chosen)
        equal = [name for name, price in left.items() if price <= min(left.values()) + TIE]
        best = min(equal, key=lambda n: (n not in LOSSLESS_VARIANTS, -NOMINAL_BITS[n], left[n]))
        chosen.append(best)
        now, bits = costs[best], NOMINAL_BITS[best]


def available_variants(shapes: Sequence[Shape], dtype: torch.dtype) -> dict[str, Variant]:
    """Those that this GPU runs well, that take all of `shapes`, and need not be compiled first."""
    unfit = {"int8"} if has_fp8() else set(FP8_VARIANTS)
    created = {
        name: create_variant(name, "cuda", create_quantizer("rtn"))
        for name, device in VARIANTS
        if device == "cuda" and name not in unfit
    }
    return {
        name: variant
        for name, variant in created.items()
        if all(variant.supports(*shape) is None for shape in shapes)
        and (not isinstance(variant, CompiledVariant) or variant.is_built(dtype))
    }


def stored_times(shapes: Sequence[Shape], dtype: torch.dtype) -> KernelTimes | None:
    """What was measured before for this GPU, SGLang and model; None if nothing, or damaged.

    `shapes`: the linears of a decoder layer, `[N, K]`.
    """
    if not torch.cuda.is_available():
        return None
    return _read(_identity(shapes, dtype, available_variants(shapes, dtype)))


def measured_times(shapes: Sequence[Shape], dtype: torch.dtype) -> KernelTimes | None:
    """As `stored_times`, but measured and stored where there is nothing.

    None, and a warning in the log, where a kernel fails or memory is short: a few times the
    largest weight, and `FLUSH_BYTES`.
    """
    variants = available_variants(shapes, dtype)
    identity = _identity(shapes, dtype, variants)
    found = _read(identity)
    if found is not None:
        logger.info("Kernel times, measured before: %s", describe(found))
        return found
    began = time.perf_counter()
    try:
        found = measure(shapes, dtype, variants, identity)
    except Exception as error:  # whatever a kernel raises: a measurement must not end a start
        cause = str(error).partition("\n")[0]
        logger.warning("Kernel times cannot be measured (%s); the default order is used", cause)
        return None
    finally:
        torch.cuda.empty_cache()
    _write(found)
    logger.info("Kernel times, %.1f s: %s", time.perf_counter() - began, describe(found))
    return found


def describe(times: KernelTimes) -> str:
    """One line for the log."""
    costs = ", ".join(f"{name} {cost.time:.2f}" for name, cost in times.costs.items())
    return (
        f"{costs} of full precision's on {times.measured_for['gpu']}; "
        f"order: {', '.join(times.order)}"
    )


@torch.inference_mode()
def measure(
    shapes: Sequence[Shape],
    dtype: torch.dtype,
    variants: Mapping[str, Variant],
    identity: dict[str, Any],
) -> KernelTimes:
    """Time every variant on made-up weights. Raises RuntimeError where a kernel fails."""
    generator = torch.Generator("cuda").manual_seed(0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    total = {name: [0.0] * len(BATCHES) for name in (FULL, *variants)}
    nbytes = dict.fromkeys(total, 0)
    for shape in shapes:
        weight = torch.randn(shape, generator=generator, device="cuda", dtype=dtype).mul_(0.02)
        kernels: dict[str, Kernel] = {FULL: partial(linear, weight=weight)}
        nbytes[FULL] += weight.nbytes
        for name, variant in variants.items():
            chosen = variant.for_weight(weight)
            parts = parts_on_device(chosen, weight)
            kernels[name] = partial(_apply, chosen, parts)
            nbytes[name] += sum(part.nbytes for part in parts.values())
        for position, batch in enumerate(BATCHES):
            x = torch.randn(batch, shape[1], generator=generator, device="cuda", dtype=dtype)
            calls = {name: partial(kernel, x) for name, kernel in kernels.items()}
            for name, milliseconds in _medians(calls, flush).items():
                total[name][position] += milliseconds
    costs = {
        name: Cost(
            statistics.mean(a / b for a, b in zip(total[name], total[FULL], strict=True)),
            nbytes[name] / nbytes[FULL],
        )
        for name in variants
    }
    return KernelTimes(identity, total, costs)


def _apply(variant: Variant, parts: Parts, x: torch.Tensor) -> torch.Tensor:
    return variant.linear(parts, x, None)


def _medians(calls: Mapping[str, Callable[[], object]], flush: torch.Tensor) -> dict[str, float]:
    """Milliseconds of each call, in turn, after a first one that does not count."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(1 + ROUNDS):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs[1:])
        for name, pairs in events.items()
    }


def _identity(
    shapes: Sequence[Shape], dtype: torch.dtype, variants: Mapping[str, Variant]
) -> dict[str, Any]:
    """All that the times depend on; a kernel compiled since makes them another measurement."""
    return {
        "schema": SCHEMA_VERSION,
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "sglang": installed_version(),
        "torch": str(torch.__version__),
        "dtype": str(dtype).removeprefix("torch."),
        "shapes": [list(shape) for shape in shapes],
        "batches": list(BATCHES),
        "kernels": {name: variant.kernel for name, variant in sorted(variants.items())},
    }


def _file(identity: dict[str, Any]) -> Path:
    content = orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)
    gpu = re.sub(r"\W+", "-", identity["gpu"])
    return kernel_times_file(gpu, hashlib.sha256(content).hexdigest())


def _read(identity: dict[str, Any]) -> KernelTimes | None:
    file = _file(identity)
    try:
        found = msgspec.json.decode(file.read_bytes(), type=KernelTimes)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be used: %s; kernels are timed again", file, error)
        return None
    fits = found.measured_for == identity and set(found.costs) == set(identity["kernels"])
    return found if fits else None


def _write(times: KernelTimes) -> None:
    """Whole or not at all. A cache that cannot be written only costs the next start time."""
    file = _file(times.measured_for)
    partial_file = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial_file.write_bytes(msgspec.json.format(msgspec.json.encode(times), indent=2))
        partial_file.replace(file)
    except OSError as error:
        logger.warning("Kernel times are not kept for the next start: %s", error)
