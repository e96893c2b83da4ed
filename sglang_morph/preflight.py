"""Whether model and machine can be served elastically, known before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memory_backends import backend_class
from memory_backends.semi_unified import default_unit_bytes
from memory_backends.shared_region import UNIT_STEP
from memory_backends.vmm import VmmError, check_support
from sglang_morph.bundle import AUTO
from sglang_morph.bundle.bundle import Bundle
from sglang_morph.bundle.serving import check_bundle
from sglang_morph.host_memory import available_bytes
from sglang_morph.options import MorphOptions
from sglang_morph.precision.names import NOMINAL_BITS
from sglang_morph.precision.nested.merge_gemm import CAPABILITY as MERGE_CAPABILITY
from sglang_morph.precision.plan import ModelIdentity, PrecisionPlan, default_plan
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.base import NestedVariant
from sglang_morph.precision.variants.kernel_times import KernelTimes, stored_times
from sglang_morph.precision.variants.registry import (
    LOSSLESS_VARIANTS,
    check_variant,
    create_variant,
    default_variants,
)
from sglang_morph.refusals import MorphRefusal
from sglang_morph.variant_checkpoint import open_checkpoint

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""Models whose decoder layers are known: four dense linears over plain multi-head KV."""

TRACED = "tc_piecewise"
"""The prefill graphs of SGLang that go through torch's compiler."""

_STATIC = "serve it with --memory-backend static"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A morphable linear as SGLang fuses it: weight `[rows, columns]`, the same in every layer."""

    path: str
    rows: int
    columns: int


def check_model_and_host(server_args: Any, options: MorphOptions) -> None:
    """Raises `MorphRefusal` unless `options` can work with this model on this host.

    Reads the model's configuration, not its weights.
    """
    model_config = server_args.get_model_config()
    config = model_config.hf_text_config
    check_architecture(model_config)
    shapes = list(linear_shapes(config))
    times = None
    if follows_kernel_times(options, server_args.device):
        times = stored_times(list(shapes_by_path(shapes).values()), model_config.dtype)
    plan = make_plan(config, options, server_args.device, times)
    check_shapes(shapes, plan.variants, server_args.device)
    if options.bundle is not None:
        try:
            check_bundle(server_args, options.bundle)
        except ValueError as error:
            raise MorphRefusal(str(error)) from error
    if options.variant_checkpoint is not None:
        open_checkpoint(
            options.variant_checkpoint,
            plan,
            shapes_by_path(shapes),
            server_args.device,
            model_config.dtype,
        )
    if needs_lossless(options):
        check_halves(shapes, plan, options, server_args.device)
        check_prefill_graphs(server_args, options)
        needed = residual_bytes(shapes, len(plan.steps))
    else:
        needed = host_bytes(shapes, plan, model_config.dtype.itemsize)
    if server_args.device == "cpu":
        needed += model_bytes(config, shapes, model_config.dtype.itemsize)
    check_host_memory(needed, available_bytes())


def check_architecture(model_config: Any) -> None:
    """Raises `MorphRefusal`, saying why, unless the decoder layers are of a known, plain kind."""
    architecture = (model_config.hf_config.architectures or ["unknown"])[0]
    if reason := _obstacle(model_config):
        raise MorphRefusal(f"the layers of {architecture} cannot be morphed: {reason}; {_STATIC}")
    if architecture not in ARCHITECTURES:
        raise MorphRefusal(
            f"the layers of {architecture} have not been tried with an elastic backend; use one "
            f"of {', '.join(ARCHITECTURES)}, or {_STATIC}"
        )


def _obstacle(model_config: Any) -> str | None:
    """What in the configuration rules morphing out, whatever the architecture is called."""
    config = model_config.hf_text_config
    quantization = getattr(model_config.hf_config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        return f"the checkpoint is quantized already ({method or 'quantization_config'})"
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (getattr(config, key, None) or 0) > 1:
            return f"it is a mixture of experts ({key} is {getattr(config, key)})"
    if model_config.attention_arch.name != "MHA":
        return f"its KV cache is {model_config.attention_arch.name}, not plain multi-head"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds and getattr(config, "use_sliding_window", True):
        return f"it is a hybrid ({', '.join(sorted(kinds))} layers)"
    if model_config.is_hybrid_swa:
        return "it is a hybrid (sliding-window layers keep a KV cache of their own)"
    return None


def make_plan(
    config: Any, options: MorphOptions, device: str, times: KernelTimes | None = None
) -> PrecisionPlan:
    """The bundle's, or that of `--morph-plan`, else the default one. Raises `MorphRefusal`.

    `times`: what the variants' kernels cost, where that is known and `follows_kernel_times`.
    """
    try:
        identity = ModelIdentity.from_hf_config(config)
        if options.bundle not in (None, AUTO):
            plan = Bundle.open(Path(options.bundle)).plan
            plan.check_model(identity)
        elif options.plan is None:
            variants = options.variants or _default_variants(options, device, times)
            plan = default_plan(identity, variants, options.order)
        else:
            plan = PrecisionPlan.load(options.plan)
            plan.check_model(identity)
        if options.levels:
            plan = plan.with_levels(options.levels)
        for variant in plan.variants:
            check_variant(variant, device)
    except ValueError as error:
        raise MorphRefusal(str(error)) from error
    if needs_lossless(options):
        _check_lossless(plan, options)
    return plan


def needs_lossless(options: MorphOptions) -> bool:
    """Whether the backend keeps weights as the two halves of a lossless variant."""
    return not options.is_static and backend_class(options.memory_backend).lossless_only


def follows_kernel_times(options: MorphOptions, device: str) -> bool:
    """Whether the variants and their order are chosen by what their kernels cost."""
    given = options.variants or options.plan or options.bundle not in (None, AUTO)
    return device == "cuda" and not given and not needs_lossless(options)


def _default_variants(
    options: MorphOptions, device: str, times: KernelTimes | None
) -> tuple[str, ...]:
    if needs_lossless(options):
        return LOSSLESS_VARIANTS[:1]
    return default_variants(device) if times is None else times.order


def _check_lossless(plan: PrecisionPlan, options: MorphOptions) -> None:
    unfit = [variant for variant in plan.variants if variant not in LOSSLESS_VARIANTS]
    if unfit:
        raise MorphRefusal(
            f"--memory-backend {options.memory_backend} keeps weights as halves of "
            f"{' or '.join(LOSSLESS_VARIANTS)} and cannot take {', '.join(unfit)}; leave it out of "
            "--morph-variants or the plan, or use --memory-backend layer_swap"
        )


def linear_shapes(config: Any) -> Iterator[LinearShape]:
    """The morphable linears of one decoder layer, of a transformers text config."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    yield LinearShape("self_attn.qkv_proj", (heads + 2 * kv_heads) * head_dim, hidden)
    yield LinearShape("self_attn.o_proj", hidden, heads * head_dim)
    yield LinearShape("mlp.gate_up_proj", 2 * inner, hidden)
    yield LinearShape("mlp.down_proj", hidden, inner)


def shapes_by_path(shapes: Iterable[LinearShape]) -> dict[str, tuple[int, int]]:
    """Path -> rows and columns."""
    return {shape.path: (shape.rows, shape.columns) for shape in shapes}


def check_shapes(shapes: Sequence[LinearShape], variants: Sequence[str], device: str) -> None:
    """Raises `MorphRefusal` naming every linear that cannot take one of `variants`."""
    encoders = [create_variant(name, device, create_quantizer("rtn")) for name in variants]
    reasons = [
        f"{shape.path}: {reason}"
        for shape in shapes
        for encoder in encoders
        if (reason := encoder.supports(shape.rows, shape.columns))
    ]
    if reasons:
        raise MorphRefusal(
            f"no decoder layer can take the variants: {'; '.join(reasons)}; "
            f"choose others with --morph-variants, or {_STATIC}"
        )


def host_bytes(shapes: Sequence[LinearShape], plan: PrecisionPlan, itemsize: int) -> int:
    """Host memory for the backup of all layers and for the images of the plan's steps.

    `itemsize`: bytes of one weight at full precision. Scales and zeros take at most one bit a
    weight.
    """
    weights = sum(shape.rows * shape.columns for shape in shapes)
    images = sum(weights * (NOMINAL_BITS[step.variant] + 1) // 8 for step in plan.steps)
    return plan.model.num_layers * weights * itemsize + images


def residual_bytes(shapes: Sequence[LinearShape], layers: int) -> int:
    """The lower halves of `layers` decoder layers, one byte a weight."""
    return layers * sum(shape.rows * shape.columns for shape in shapes)


def check_halves(
    shapes: Sequence[LinearShape], plan: PrecisionPlan, options: MorphOptions, device: str
) -> None:
    """Raises `MorphRefusal` unless this device computes from halves and can lend the lower ones."""
    check_unit_size(shapes, plan, options, device)
    if device == "cuda":
        _check_gpu(options)
    for name in plan.variants:
        variant = create_variant(name, device, create_quantizer("rtn"))
        assert isinstance(variant, NestedVariant)
        for shape in shapes:
            if reason := variant.merged_obstacle(shape.rows, shape.columns):
                raise MorphRefusal(
                    f"{shape.path}: {reason}; use --memory-backend layer_swap in place of "
                    f"{options.memory_backend}"
                )


def check_prefill_graphs(server_args: Any, options: MorphOptions) -> None:
    """Raises `MorphRefusal` where prefill would be traced by torch's compiler."""
    if server_args.device == "cuda" and server_args.cuda_graph_config.prefill.backend == TRACED:
        raise MorphRefusal(
            f"--cuda-graph-backend-prefill {TRACED} does not work with --memory-backend "
            f"{options.memory_backend}: its kernels cannot be traced; set it to breakable or leave "
            "it out, or use --memory-backend layer_swap"
        )


def _check_gpu(options: MorphOptions) -> None:
    """Raises `MorphRefusal` unless the GPU has what it takes. Takes none of its memory."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != MERGE_CAPABILITY:
        raise MorphRefusal(
            f"--memory-backend {options.memory_backend} has kernels for Hopper GPUs (SM90) only, "
            f"and this one is SM{major}{minor}; use --memory-backend layer_swap"
        )
    try:
        check_support(torch.device("cuda"))
    except VmmError as error:
        raise MorphRefusal(str(error)) from error


def check_unit_size(
    shapes: Sequence[LinearShape], plan: PrecisionPlan, options: MorphOptions, device: str
) -> None:
    """Raises `MorphRefusal` where the first level of `plan` would not lend a single unit."""
    asked = options.unit_mib
    unit = default_unit_bytes(device) if asked is None else asked << 20
    first = residual_bytes(shapes, plan.levels[min(1, plan.max_level)])
    if first < unit:
        largest = first // UNIT_STEP * (UNIT_STEP >> 20)
        raise MorphRefusal(
            f"units of {unit >> 20} MiB are too large: at level 1 the lower halves of this model "
            f"are {first / (1 << 20):.1f} MiB, so nothing could be lent; "
            + (f"give --morph-unit-mib {largest}" if largest else "choose deeper --morph-levels")
            + ", or use --memory-backend layer_swap"
        )


def model_bytes(config: Any, shapes: Sequence[LinearShape], itemsize: int) -> int:
    """The model's own weights: decoder linears, embedding and, unless tied, the output head."""
    linears = config.num_hidden_layers * sum(shape.rows * shape.columns for shape in shapes)
    tables = 1 if getattr(config, "tie_word_embeddings", False) else 2
    return (linears + tables * config.vocab_size * config.hidden_size) * itemsize


def check_host_memory(needed: int, available: int) -> None:
    """Raises `MorphRefusal` with both figures if `needed` bytes exceed `available`."""
    if needed > available:
        raise MorphRefusal(
            f"backups and variants need {needed / _GIB:.1f} GiB of host memory, available are "
            f"{available / _GIB:.1f} GiB; free memory, name fewer --morph-variants, or use "
            "--memory-backend static"
        )
