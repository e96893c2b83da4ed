"""Quantized checkpoints, written here in the published formats, as sources of variants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_morph.precision.checkpoints.files import CheckpointFiles
from sglang_morph.precision.checkpoints.formats import format_of
from sglang_morph.precision.checkpoints.source import CheckpointSource
from sglang_morph.precision.plan import ModelIdentity, PrecisionPlan, default_plan
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.sources import SourceError
from sglang_morph.precision.variants.registry import create_variant
from sglang_morph.refusals import MorphRefusal
from sglang_morph.variant_checkpoint import open_checkpoint
from tests.sglang_morph.precision import checkpoint_writer as writer

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 128, 256, 8, 4, 2
QUERIES, VALUES = 128, 64
IDENTITY = ModelIdentity("LlamaForCausalLM", LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, 32)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 32,
}
SHAPES = {
    "self_attn.qkv_proj": (QUERIES + 2 * VALUES, HIDDEN),
    "self_attn.o_proj": (HIDDEN, QUERIES),
    "mlp.gate_up_proj": (2 * INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
FORMATS: dict[str, tuple[dict[str, Any], writer.LinearWriter]] = {
    "awq-128": (writer.awq_config(128), writer.awq_linear(128)),
    "awq-32": (writer.awq_config(32, version="GEMM"), writer.awq_linear(32)),
    **{
        f"packed-{zeros}": (
            writer.compressed_config(
                "pack-quantized", "int", 4, "group", group_size=64, symmetric=zeros == "none"
            ),
            writer.packed_linear(64, zeros),
        )
        for zeros in ("none", "packed", "plain")
    },
    **{
        f"fp8-{strategy}": (
            writer.compressed_config("float-quantized", "float", 8, strategy),
            writer.fp8_linear(strategy),
        )
        for strategy in ("channel", "tensor")
    },
}


def checkpoint(scale: float = 1.0, seed: int = 0) -> dict[str, torch.Tensor]:
    """An unquantized checkpoint. With `scale` what the linears after norms read is multiplied,
    and their columns are divided, as AWQ does: the same model."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    tensors = {"model.embed_tokens.weight": random(32, HIDDEN), "model.norm.weight": random(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = (1 + random(HIDDEN)) * scale
        for name, rows, columns in (
            ("self_attn.q", QUERIES, HIDDEN),
            ("self_attn.k", VALUES, HIDDEN),
            ("self_attn.v", VALUES, HIDDEN),
            ("self_attn.o", HIDDEN, QUERIES),
            ("mlp.gate", INNER, HIDDEN),
            ("mlp.up", INNER, HIDDEN),
            ("mlp.down", HIDDEN, INNER),
        ):
            after_norm = name not in ("self_attn.o", "mlp.down")
            tensors[f"{prefix}{name}_proj.weight"] = random(rows, columns) / (
                scale if after_norm else 1
            )
    return tensors


def write(folder: Path, name: str, scale: float = 1.0, seed: int = 0) -> Path:
    quantization, linear = FORMATS[name]
    return writer.write_checkpoint(folder, checkpoint(scale, seed), CONFIG, quantization, linear)


def fused(tensors: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """The layer's weights and norms, named as in SGLang."""
    prefix = f"model.layers.{layer}."
    found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    q, k, v = (found.pop(f"self_attn.{x}_proj.weight") for x in "qkv")
    gate, up = (found.pop(f"mlp.{x}_proj.weight") for x in ("gate", "up"))
    return found | {
        "self_attn.qkv_proj.weight": torch.cat((q, k, v)),
        "mlp.gate_up_proj.weight": torch.cat((gate, up)),
    }


def source(folder: Path, device_type: str = "cpu") -> CheckpointSource:
    return CheckpointSource(folder, device_type, torch.float16)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_computes_what_was_written(tmp_path: Path, name: str) -> None:
    """By the kernel, from the parts, with the checkpoint's norms."""
    made = source(write(tmp_path, name, scale=1.5))
    made.check(IDENTITY, range(LAYERS), SHAPES)
    original = fused(checkpoint(), 1)
    made.compare_with(lambda layer: fused(checkpoint(), layer))
    tensors = made.tensors(1, made.variant)
    assert tensors is not None
    variant = create_variant(made.variant, "cpu", create_quantizer("rtn"))
    for path, norm in (
        ("self_attn.qkv_proj", "input_layernorm"),
        ("mlp.gate_up_proj", "post_attention_layernorm"),
        ("mlp.down_proj", None),
        ("self_attn.o_proj", None),
    ):
        x = torch.randn(3, SHAPES[path][1], generator=torch.Generator().manual_seed(1))
        parts = {
            n.removeprefix(f"{path}."): t for n, t in tensors.items() if n.startswith(f"{path}.")
        }
        full, lowered = x, x
        if norm:
            full = x * original[f"{norm}.weight"]
            lowered = x * tensors[f"{norm}.weight"].float()
        expected = full @ original[f"{path}.weight"].t()
        actual = variant.linear(parts, lowered, None)
        assert (actual - expected).norm() / expected.norm() < (0.15 if "fp8" not in name else 0.04)


def awq_oracle(folder: Path, module: str) -> torch.Tensor:
    """By SGLang's own dequantizer for such checkpoints."""
    from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition

    tensors = load(folder)
    weight = awq_dequantize_decomposition(
        tensors[f"{module}.qweight"],
        tensors[f"{module}.scales"].float(),
        tensors[f"{module}.qzeros"],
    )
    return weight.t()


def packed_oracle(folder: Path, module: str) -> torch.Tensor:
    """By the library that defines the format."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    tensors = {n.removeprefix(f"{module}.weight_"): t for n, t in load(folder).items()}
    codes = unpack_from_int32(tensors["packed"], 4, torch.Size(tensors["shape"].tolist()))
    scales = tensors["scale"].float()
    zeros = tensors.get("zero_point", torch.zeros(scales.shape))
    if zeros.dtype == torch.int32:
        zeros = unpack_from_int32(zeros, 4, scales.shape, packed_dim=0)
    grouped = codes.view(*scales.shape, -1).float() - zeros.float().unsqueeze(-1)
    return (grouped * scales.unsqueeze(-1)).flatten(1)


def fp8_oracle(folder: Path, module: str) -> torch.Tensor:
    tensors = load(folder)
    return tensors[f"{module}.weight"].float() * tensors[f"{module}.weight_scale"].float()


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_scales_and_zeros_are_those_stored(tmp_path: Path, name: str) -> None:
    files = CheckpointFiles(write(tmp_path, name))
    oracle = {"awq": awq_oracle, "packed": packed_oracle, "fp8": fp8_oracle}[name.split("-")[0]]
    for linear in ("self_attn.k_proj", "mlp.down_proj"):
        module = f"model.layers.0.{linear}"
        weight = format_of(files).read(files, module)
        assert torch.equal(weight.dequantize(), oracle(tmp_path, module))


@pytest.mark.parametrize("name", FORMATS)
def test_parts_stand_for_the_stored_weight(tmp_path: Path, name: str) -> None:
    """Exactly in fp8. int4's kernel on a CPU holds scales in bfloat16, 1/256 off at most."""
    made = source(write(tmp_path, name))
    files = CheckpointFiles(tmp_path)
    stored = format_of(files).read(files, "model.layers.0.mlp.down_proj")
    tensors = made.tensors(0, made.variant) or {}
    parts = {n.rpartition(".")[2]: t for n, t in tensors.items() if "down_proj" in n}
    if made.variant == "fp8":
        actual = parts["codes"].float() * parts["scales"].unsqueeze(-1)
        assert torch.equal(actual, stored.dequantize())
        return
    scales, zeros = parts["scales_and_zeros"].float().unbind(-1)
    group = INNER // len(scales)
    steps = stored.scales.float().repeat_interleave(group, 1)
    actual = (stored.codes.float() - 8) * scales.t().repeat_interleave(group, 1)
    actual += zeros.t().repeat_interleave(group, 1)
    assert ((actual - stored.dequantize()).abs() / steps).max() < 16 / 256
    variant = create_variant("int4", "cpu", create_quantizer("rtn"))
    computed = variant.linear(parts, torch.eye(INNER, dtype=torch.bfloat16), None).t().float()
    assert (computed - actual).abs().max() < 0.01 * actual.abs().max()


def test_symmetric_bfloat16_scales_are_kept_exactly(tmp_path: Path) -> None:
    quantization, linear = FORMATS["packed-none"]

    def rounded(weight: torch.Tensor) -> writer.Tensors:
        tensors = linear(weight)
        return tensors | {"weight_scale": tensors["weight_scale"].bfloat16()}

    writer.write_checkpoint(tmp_path, checkpoint(), CONFIG, quantization, rounded)
    pairs = (source(tmp_path).tensors(0, "int4") or {})["mlp.down_proj.scales_and_zeros"]
    stored = load(tmp_path)["model.layers.0.mlp.down_proj.weight_scale"]
    assert torch.equal(pairs[..., 0].t(), stored)
    assert (pairs[..., 1] == 0).all()


def test_other_variants_do_not_come_from_here(tmp_path: Path) -> None:
    made = source(write(tmp_path, "awq-128"))
    assert made.provides(0, "int4") and not made.provides(0, "fp8")
    assert made.tensors(0, "fp8") is None


def test_biases_are_joined(tmp_path: Path) -> None:
    tensors = checkpoint()
    biases = {x: torch.rand(QUERIES if x == "q" else VALUES).half() for x in "qkv"}
    for x, bias in biases.items():
        tensors[f"model.layers.0.self_attn.{x}_proj.bias"] = bias
    writer.write_checkpoint(tmp_path, tensors, CONFIG, *FORMATS["awq-128"])
    made = source(tmp_path).tensors(0, "int4") or {}
    assert torch.equal(made["self_attn.qkv_proj.bias"], torch.cat(list(biases.values())))
    assert "self_attn.qkv_proj.bias" not in (source(tmp_path).tensors(1, "int4") or {})


@pytest.mark.parametrize("name", ["awq-128", "packed-packed", "fp8-channel"])
def test_another_models_layer_is_named(tmp_path: Path, name: str) -> None:
    made = source(write(tmp_path, name, seed=1))
    made.check(IDENTITY, range(LAYERS), SHAPES)
    made.compare_with(lambda layer: fused(checkpoint(), layer))
    with pytest.raises(SourceError, match=r"layer 1, self_attn\.qkv_proj: .* not that of this mod"):
        made.tensors(1, made.variant)


def test_swapped_layers_are_noticed_in_every_linear(tmp_path: Path) -> None:
    folder = write(tmp_path, "awq-128")
    for linear in SHAPES:
        made = source(folder)

        def mixed(layer: int, linear: str = linear) -> dict[str, torch.Tensor]:
            other = fused(checkpoint(), 1 - layer)
            return fused(checkpoint(), layer) | {f"{linear}.weight": other[f"{linear}.weight"]}

        made.compare_with(mixed)
        with pytest.raises(SourceError, match=f"layer 0, {linear}"):
            made.tensors(0, "int4")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name, None))


def put(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: tensor}))


def configure(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def truncate(folder: Path) -> None:
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


Q1 = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (
            "awq-128",
            drop(f"{Q1}.scales"),
            r"layer 1, self_attn\.qkv_proj: .*no tensor .*q_proj\.sc",
        ),
        (
            "awq-128",
            put("model.layers.1.mlp.down_proj.qzeros", torch.zeros(4, 16, dtype=torch.int32)),
            r"layer 1, mlp\.down_proj: .*qzeros is \[4, 16\], this model needs \[2, 16\]",
        ),
        (
            "awq-128",
            put("model.layers.0.mlp.down_proj.scales", torch.zeros(2, 128, dtype=torch.int32)),
            r"layer 0, mlp\.down_proj: .*scales is I32, not F16 or BF16 or F32",
        ),
        (
            "awq-128",
            drop("model.layers.1.input_layernorm.weight"),
            r"layer 1, input_layernorm: .*no tensor",
        ),
        (
            "packed-packed",
            put(f"{Q1}.weight_g_idx", torch.zeros(128, dtype=torch.int32)),
            r"layer 1, self_attn\.qkv_proj: .*out of order",
        ),
        ("packed-plain", drop(f"{Q1}.weight_zero_point"), r"layer 1, .*no tensor"),
        ("fp8-channel", drop(f"{Q1}.weight_scale"), r"layer 1, .*no tensor"),
        (
            "fp8-channel",
            put(f"{Q1}.weight_scale", torch.ones(1, 4)),
            r"layer 1, .*weight_scale is \[1, 4\], this model needs \[128, 1\]",
        ),
        (
            "awq-128",
            configure(quantization_config=writer.awq_config(16)),
            r"every layer, self_attn\.qkv_proj: its groups are of 16.*takes 32, 64, 128, 256",
        ),
        (
            "awq-128",
            configure(quantization_config=writer.awq_config(256)),
            r"groups of 256 do not divide K = 128",
        ),
        ("awq-128", configure(hidden_size=64), r"of another model: hidden_size is 64, not 128"),
        ("awq-128", configure(architectures=["Qwen2ForCausalLM"]), r"architecture is 'Qwen2"),
        ("awq-128", configure(hidden_size=None), r"no integer `hidden_size`"),
        ("awq-128", truncate, r"model-1\.safetensors is not a whole safetensors file"),
        ("awq-128", configure(quantization_config=None), r"it is not quantized"),
        (
            "awq-128",
            configure(quantization_config={"quant_method": "gptq"}),
            r"it is quantized by gptq; give an AutoAWQ checkpoint",
        ),
        (
            "awq-128",
            configure(quantization_config=writer.awq_config(128, version="gemv")),
            r"its AWQ version is gemv",
        ),
        (
            "awq-128",
            configure(quantization_config=writer.awq_config(128, bits=8)),
            r"8 bits, not 4",
        ),
        (
            "awq-128",
            configure(quantization_config=writer.awq_config(128, zero_point=False)),
            r"no zero points",
        ),
        ("awq-128", configure(quantization_config=writer.awq_config(-1)), r"group size is -1"),
        (
            "packed-none",
            configure(
                quantization_config=writer.compressed_config("pack-quantized", "int", 4, "channel")
            ),
            r"its weights are pack-quantized int 4 channel",
        ),
        (
            "fp8-channel",
            configure(
                quantization_config=writer.compressed_config("float-quantized", "float", 8, "block")
            ),
            r"its weights are float-quantized float 8 block",
        ),
        (
            "fp8-channel",
            configure(
                quantization_config={"quant_method": "compressed-tensors", "config_groups": {}}
            ),
            r"in 0 ways, not in one",
        ),
        ("awq-128", lambda folder: (folder / "config.json").unlink(), r"no readable config\.json"),
        (
            "awq-128",
            lambda folder: [file.unlink() for file in folder.glob("*.safetensors")],
            r"no \*\.safetensors",
        ),
    ],
)
def test_unfit_checkpoints_are_refused_before_anything_is_loaded(
    tmp_path: Path, name: str, damage: Callable[[Path], object], message: str
) -> None:
    damage(write(tmp_path, name))
    variants = ["fp8"] if name.startswith("fp8") else ["int4"]
    with pytest.raises(MorphRefusal, match=message) as refusal:
        open_checkpoint(
            str(tmp_path), default_plan(IDENTITY, variants), SHAPES, "cpu", torch.float16
        )
    assert str(refusal.value).startswith("--morph-variant-checkpoint: ")


def test_marlin_takes_other_groups_than_the_cpu(tmp_path: Path) -> None:
    """Checked before a GPU is touched."""
    plan = default_plan(IDENTITY, ["int4"])
    for name, group_size, message in (
        ("awq-128", 128, None),
        ("awq-32", 32, None),
        ("awq-128", 256, "groups are of 256, SGLang Marlin .AWQ. takes 32, 64, 128"),
    ):
        folder = write(tmp_path / f"{group_size}", name)
        edit_config(folder, quantization_config=writer.awq_config(group_size))
        if message is None:
            open_checkpoint(str(folder), plan, SHAPES, "cuda", torch.float16)
            continue
        with pytest.raises(MorphRefusal, match=message):
            open_checkpoint(str(folder), plan, SHAPES, "cuda", torch.float16)


def test_only_layers_that_the_plan_lowers_are_checked(tmp_path: Path) -> None:
    folder = write(tmp_path, "awq-128")
    drop(f"{Q1}.scales")(folder)
    plan = default_plan(IDENTITY, ["int4"])
    first = PrecisionPlan(IDENTITY, plan.steps[:1], (0, 1))
    assert open_checkpoint(str(folder), first, SHAPES, "cpu", torch.float16).variant == "int4"


def test_a_checkpoint_that_the_plan_has_no_use_for_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "fp8-channel")
    plan = default_plan(IDENTITY, ["int8", "int4"])
    with pytest.raises(
        MorphRefusal, match=r"holds fp8, and the plan has only int8, int4; name fp8"
    ):
        open_checkpoint(str(folder), plan, SHAPES, "cpu", torch.float16)


def test_a_file_that_goes_missing_later_is_named(tmp_path: Path) -> None:
    made = source(write(tmp_path, "awq-128"))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(SourceError, match="cannot be read from .*copy the checkpoint again"):
        made.tensors(0, "int4")
