"""Guards: operations on weights or memory that would not know that weights can move.

A morphable weight lives in the backend's memory and has a backup there. What SGLang wrote into the
one would be undone by a restore from the other; what it read could be a variant or KV pages. So
these operations are refused at every level, in the form in which their callers expect a failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from patches.ledger import HookKind, Patch, Process

logger = logging.getLogger(__name__)

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"

WRITES = "It writes into weights whose backup would undo it at the next restore."
READS = "It reads weights whose bytes may be a variant or KV pages."
PAUSES = "It unmaps or restores memory that the backend shares between weights and KV cache."


def refusal(operation: str) -> str:
    """The message a refused caller gets."""
    return (
        f"{operation} is refused while an elastic memory backend owns the weights; "
        "restart with --memory-backend static"
    )


def _guard(
    owner: str,
    operation: str,
    why: str,
    source_sha256: str,
    *,
    kind: HookKind,
    process: Process,
    guard: Callable[..., Any],
) -> Patch:
    return Patch(
        name=f"guard_{operation}",
        target=f"{owner}.{operation}",
        kind=kind,
        process=process,
        why=why,
        why_not_milder="SGLang has no switch for the operation, and its endpoint always exists.",
        upstream="none found",
        remove_when="Writes reach the backup and reads see full precision at every level.",
        source_sha256=source_sha256,
        make_hook=lambda runtime: guard,
    )


def answering(
    owner: str, operation: str, why: str, source_sha256: str, reply_type: str, **fields: Any
) -> Patch:
    """Answer with `reply_type` of SGLang's messages; without `fields`, with success and message."""
    fields = fields or {"success": False, "message": refusal(operation)}

    def guard(original: Callable[..., Any], *_: Any, **__: Any) -> Any:
        from sglang.srt.managers import io_struct

        logger.warning(refusal(operation))
        return getattr(io_struct, reply_type)(**fields)

    return _guard(
        owner, operation, why, source_sha256, kind="around", process="scheduler", guard=guard
    )


def raising(
    owner: str, operation: str, why: str, source_sha256: str, process: Process = "scheduler"
) -> Patch:
    """Raise ValueError, where the caller turns an exception into an error reply."""

    def guard(*_: Any, **__: Any) -> None:
        raise ValueError(refusal(operation))

    return _guard(owner, operation, why, source_sha256, kind="before", process=process, guard=guard)


PATCHES: tuple[Patch, ...] = (
    answering(
        UPDATER,
        "update_weights_from_disk",
        WRITES,
        "b040f091097feb7112a1ee335ead1ac89133bfe9bae7d40f32fe9738ec185e81",
        "UpdateWeightFromDiskReqOutput",
    ),
    answering(
        UPDATER,
        "init_weights_update_group",
        "It prepares updates that are refused; failing here names the reason early.",
        "6e46963cd243b37504cafcbb14f0a1da3faeeff0af4ca1c53df14edf7c1ef9fb",
        "InitWeightsUpdateGroupReqOutput",
    ),
    answering(
        UPDATER,
        "update_weights_from_distributed",
        WRITES,
        "7926c8040251e5cba865152e68548d983573d74aed44177cbba6c70b34c4fbf6",
        "UpdateWeightsFromDistributedReqOutput",
    ),
    answering(
        UPDATER,
        "update_weights_from_tensor",
        WRITES,
        "cc40217ea071e50d943a01201a7d55420603e95da8d5ad9153b01f09eee683ca",
        "UpdateWeightsFromTensorReqOutput",
    ),
    answering(
        UPDATER,
        "update_weights_from_ipc",
        WRITES,
        "f816d32c3211748c8b8a3bf7e3f473e2b34f4e501e9bc547fc6404b997d7857a",
        "UpdateWeightsFromIPCReqOutput",
    ),
    answering(
        UPDATER,
        "get_weights_by_name",
        READS,
        "af77cf78a1a23869c4fc77eae891803880e083d5c4d0e5d275ff4003d5a4e890",
        "GetWeightsByNameReqOutput",
        parameter=None,
    ),
    answering(
        UPDATER,
        "check_weights",
        READS + " POST /morph/verify is the check that knows levels.",
        "24d9ead4671b550b3e2203f1e62c1906cae9d692e5f47d85810556bc3d9d587b",
        "CheckWeightsReqOutput",
    ),
    raising(
        UPDATER,
        "save_remote_model",
        READS,
        "529c45029848b1adcf7d3b8a5ebadb9b6bf45298f4d788cbad1e33ad24db61b7",
    ),
    raising(
        UPDATER,
        "save_sharded_model",
        READS,
        "065776dc3aa37432769370202a281878ad9c920761813e8cc622afd385cc3144",
    ),
    answering(
        SCHEDULER,
        "init_weights_send_group_for_remote_instance",
        READS,
        "8e479e54466c6eeb456d3567d9722fe8a212d00d14c00e34f7c3c02f697bab49",
        "InitWeightsSendGroupForRemoteInstanceReqOutput",
    ),
    answering(
        SCHEDULER,
        "send_weights_to_remote_instance",
        READS,
        "af8207157ba80b468e093217fe2e837040d250b35c3214cac309302e6e6e0e2f",
        "SendWeightsToRemoteInstanceReqOutput",
    ),
    # Their replies cannot say that they failed, so they are refused before they are sent.
    raising(
        TOKENIZER,
        "release_memory_occupation",
        PAUSES,
        "2d3c571321c468ffec793591ed0c27930234f6d2051a4c72533c7d18074876e3",
        process="server",
    ),
    raising(
        TOKENIZER,
        "resume_memory_occupation",
        PAUSES,
        "c13f1f255fcbd7424f108cb5c8ff90226ce2d85d30fd19f7ff3aaa3629bcaea7",
        process="server",
    ),
)
"""One guard per operation."""
