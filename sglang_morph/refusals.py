"""What an elastic backend does not serve yet, as one table. `static` accepts all SGLang accepts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

REFUSED = 2
"""Exit status for arguments, a model or a machine that do not fit."""


class MorphRefusal(ValueError):
    """Arguments, model or machine do not fit. One line: the cause, then the remedy."""


Arguments = Any
"""Resolved `ServerArgs`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refuse when `applies` holds. `setting` is the flag or environment variable to change."""

    setting: str
    applies: Callable[[Arguments, Mapping[str, str]], bool]
    reason: str
    remedy: str

    def message(self, backend: str) -> str:
        return (
            f"{self.setting} does not work with --memory-backend {backend}: {self.reason}; "
            f"{self.remedy}, or use --memory-backend static"
        )


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _above(field: str, limit: float, reason: str) -> Refusal:
    return Refusal(
        _flag(field),
        lambda args, _: getattr(args, field) > limit,
        reason,
        f"set it to {limit} or leave it out",
    )


def _given(field: str, reason: str) -> Refusal:
    """`field` is true, or is neither None nor empty."""
    return Refusal(_flag(field), lambda args, _: bool(getattr(args, field)), reason, "leave it out")


def _other_than(field: str, accepted: tuple[str | None, ...], reason: str) -> Refusal:
    return Refusal(
        _flag(field),
        lambda args, _: getattr(args, field) not in accepted,
        reason,
        f"set it to {next(value for value in accepted if value)} or leave it out",
    )


def _variable(name: str, reason: str) -> Refusal:
    return Refusal(
        name,
        lambda _, environ: environ.get(name, "").lower() in ("1", "true", "yes", "y", "t", "on"),
        reason,
        "unset it",
    )


_ONE_RANK = "a change of level is not synchronised between ranks yet"
_OWN_CACHE = "it keeps ids of KV pages that a shrink would not rewrite"
_OWN_WEIGHTS = "it moves or rewrites weights that the backend must own"
_OWN_POOL = "it replaces the KV pool that lent pages belong to"

REFUSALS: tuple[Refusal, ...] = (
    # Parallelism
    _above("tp_size", 1, _ONE_RANK),
    _above("pp_size", 1, _ONE_RANK),
    _above("dp_size", 1, _ONE_RANK),
    _above("nnodes", 1, _ONE_RANK),
    _above("dcp_size", 1, _ONE_RANK),
    _above("attn_cp_size", 1, _ONE_RANK),
    _given("enable_dp_attention", _ONE_RANK),
    _given("use_ray", "its actors start the scheduler without these patches"),
    _above("tokenizer_worker_num", 1, "its HTTP workers would lack the /morph routes"),
    # KV cache
    _above("page_size", 1, "pages of more than one token are not built yet"),
    _other_than(
        "kv_cache_dtype",
        ("auto", "bf16", "bfloat16"),
        "a KV cache of fewer bits has another page layout",
    ),
    _given("radix_cache_backend", _OWN_CACHE),
    _given("enable_hierarchical_cache", _OWN_CACHE),
    _given("enable_lmcache", _OWN_CACHE),
    _given("enable_flexkv", _OWN_CACHE),
    _given("enable_streaming_session", _OWN_CACHE),
    _given("enable_session_radix_cache", _OWN_CACHE),
    _variable("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", _OWN_CACHE),
    _variable("SGLANG_ENABLE_UNIFIED_RADIX_TREE", _OWN_CACHE),
    _given("enable_hisparse", _OWN_POOL),
    _given("enable_unified_memory", _OWN_POOL),
    _given("enable_page_major_kv_layout", _OWN_POOL),
    _given("prefill_only_disable_kv_cache", _OWN_POOL),
    _variable("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "it resizes the KV pool after start"),
    _other_than("kv_canary", ("none",), "it watches pages that a shrink moves"),
    # Weights
    _given("quantization", "layers that are quantized already cannot be lowered further"),
    _given("modelopt_quant", "layers that are quantized already cannot be lowered further"),
    _given("quantize_and_serve", "layers that are quantized already cannot be lowered further"),
    _given("torchao_config", "layers that are quantized already cannot be lowered further"),
    _given("enable_lora", "adapters wrap the linears whose method a level switches"),
    _given("lora_paths", "adapters wrap the linears whose method a level switches"),
    _given("enable_memory_saver", _OWN_WEIGHTS),
    _given("enable_weights_cpu_backup", _OWN_WEIGHTS),
    _above("cpu_offload_gb", 0, _OWN_WEIGHTS),
    _above("offload_group_size", 0, _OWN_WEIGHTS),
    _given("kt_weight_path", _OWN_WEIGHTS),
    _other_than("weight_cache_mode", ("off",), _OWN_WEIGHTS),
    _given(
        "checkpoint_engine_wait_weights_before_ready",
        "weights cannot be updated while the backend owns them",
    ),
    _other_than(
        "model_impl", ("auto", "sglang"), "only SGLang's own model code has known decoder layers"
    ),
    _given("enable_torch_compile", "compiled code keeps the linear method it was traced with"),
    # Serving modes
    _other_than("disaggregation_mode", ("null",), "KV pages are sent to another server by address"),
    _given("enable_pdmux", "prefill and decode run on streams that a morph does not order"),
    _given("encoder_only", "an encoder has no KV cache to grow"),
    _given("language_only", "the multimodal model around it has not been tried"),
    _given("speculative_algorithm", "the draft model keeps KV pages of its own"),
    _given("dllm_algorithm", "its scheduler stages requests that a shrink would not see"),
    _given("enable_return_routed_experts", "it records values by KV page"),
    _given("enable_return_indexer_topk", "it records values by KV page"),
    _given("smg_grpc_mode", "its server process would lack the control channel"),
    _variable("SGLANG_RUST_SERVER", "its server process would lack the control channel"),
)
"""All refusals. They shrink with time."""


def refuse_unsupported(
    args: Arguments, backend: str, environ: Mapping[str, str] = os.environ
) -> None:
    """Raises `MorphRefusal` for the first row of the table that applies to resolved `args`."""
    for refusal in REFUSALS:
        if refusal.applies(args, environ):
            raise MorphRefusal(refusal.message(backend))
