"""All patches, in the order in which a server meets them."""

from __future__ import annotations

from patches import (
    admission,
    allocator,
    argument_defaults,
    attach,
    communicator,
    control,
    cuda_graphs,
    demand,
    exposure,
    guards,
    kv_budget,
    kv_pool,
    launch,
    lengths,
    prefixes,
    requests,
    retract,
    server_start,
    sleep,
    status,
    tick,
    weights,
)
from patches.ledger import Patch

ENTRY_POINT_PATCHES: tuple[Patch, ...] = (
    argument_defaults.PATCH,
    server_start.PATCH,
)
"""Needed only under SGLang's own entry points, which know nothing of `MorphServerArgs`."""

SERVER_PATCHES: tuple[Patch, ...] = (
    communicator.PATCH,
    demand.PATCH,
    *exposure.PATCHES,
    *(patch for patch in guards.PATCHES if patch.process == "server"),
)

SCHEDULER_PATCHES: tuple[Patch, ...] = (
    weights.PATCH,
    kv_budget.PATCH,
    kv_pool.PATCH,
    allocator.PATCH,
    *cuda_graphs.PATCHES,
    attach.PATCH,
    tick.PATCH,
    sleep.PATCH,
    retract.PATCH,
    *requests.PATCHES,
    lengths.PATCH,
    admission.PATCH,
    launch.PATCH,
    prefixes.PATCH,
    control.PATCH,
    status.PATCH,
    *(patch for patch in guards.PATCHES if patch.process == "scheduler"),
)

ALL_PATCHES: tuple[Patch, ...] = ENTRY_POINT_PATCHES + SERVER_PATCHES + SCHEDULER_PATCHES
