"""Models and hosts that cannot be served elastically are named before weights are loaded."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from memory_backends.vmm import VmmError
from sglang_morph import preflight
from sglang_morph.options import MorphOptions
from sglang_morph.precision.nested import merge_gemm
from sglang_morph.precision.plan import ModelIdentity, default_plan
from sglang_morph.precision.variants.nested_fp8 import NestedFp8
from sglang_morph.precision.variants.registry import create_variant
from sglang_morph.preflight import (
    check_architecture,
    check_halves,
    check_host_memory,
    check_model_and_host,
    check_prefill_graphs,
    check_shapes,
    check_unit_size,
    host_bytes,
    linear_shapes,
    make_plan,
    model_bytes,
)
from sglang_morph.refusals import MorphRefusal

ELASTIC = MorphOptions(memory_backend="layer_swap")
Attention = Enum("Attention", ["MHA", "MLA"])


def model_config(config: Any, attention: str = "MHA", hybrid: bool = False) -> Any:
    return SimpleNamespace(
        hf_config=config,
        hf_text_config=config,
        attention_arch=Attention[attention],
        is_hybrid_swa=hybrid,
    )


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_dense_models_are_accepted(kind: type) -> None:
    name = kind.__name__.replace("Config", "ForCausalLM")
    check_architecture(model_config(kind(architectures=[name])))


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        (
            {"quantization_config": {"quant_method": "awq"}},
            {},
            "LlamaForCausalLM cannot be morphed: the checkpoint is quantized already .awq.",
        ),
        ({"num_local_experts": 8}, {}, "mixture of experts .num_local_experts is 8."),
        ({"num_experts": 64}, {}, "mixture of experts .num_experts is 64."),
        ({}, {"attention": "MLA"}, "its KV cache is MLA"),
        ({}, {"hybrid": True}, "hybrid .sliding-window"),
        (
            {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
            {},
            "hybrid .linear_attention layers",
        ),
        (
            {"architectures": ["GemmaForCausalLM"]},
            {},
            "GemmaForCausalLM have not been tried.*Qwen3",
        ),
        ({"architectures": None}, {}, "unknown have not been tried"),
    ],
    ids=str,
)
def test_other_models_are_refused(
    settings: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    config = LlamaConfig(**{"architectures": ["LlamaForCausalLM"], **settings})
    with pytest.raises(MorphRefusal, match=message) as refusal:
        check_architecture(model_config(config, **given))
    assert "--memory-backend static" in str(refusal.value)


def test_qwen2_is_refused_only_with_sliding_window_layers() -> None:
    windows = {"sliding_window": 128, "max_window_layers": 1, "architectures": ["Qwen2ForCausalLM"]}
    check_architecture(model_config(Qwen2Config(**windows, use_sliding_window=False)))
    with pytest.raises(MorphRefusal, match="hybrid .sliding_attention layers"):
        check_architecture(model_config(Qwen2Config(**windows, use_sliding_window=True)))


def test_shapes_and_bytes_are_those_of_the_checkpoint(smollm2: Path) -> None:
    from safetensors import safe_open

    config = AutoConfig.from_pretrained(smollm2)
    with safe_open(smollm2 / "model.safetensors", framework="pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    numbers = {
        name: shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in sizes.items()
    }
    shapes = list(linear_shapes(config))
    linears = sum(size for name, size in numbers.items() if "_proj" in name)
    assert config.num_hidden_layers * sum(s.rows * s.columns for s in shapes) == linears

    matrices = sum(size for name, size in numbers.items() if "norm" not in name)
    assert model_bytes(config, shapes, 4) == 4 * matrices

    identity = ModelIdentity.from_hf_config(config)
    assert host_bytes(shapes, default_plan(identity, ()), 4) == 4 * linears
    both = host_bytes(shapes, default_plan(identity, ("int8", "int4")), 4)
    assert 4 * linears + 1.5 * linears < both < 4 * linears + 2 * linears


def test_linear_that_takes_no_variant_is_named() -> None:
    config = LlamaConfig(hidden_size=96, intermediate_size=112, num_attention_heads=4, head_dim=24)
    shapes = list(linear_shapes(config))
    with pytest.raises(MorphRefusal, match="mlp.down_proj: int4.*32, not 112") as refusal:
        check_shapes(shapes, ("int8", "int4"), "cpu")
    assert "o_proj" not in str(refusal.value)
    check_shapes(shapes, ("int8",), "cpu")


def test_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    planned, served = (
        LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=n) for n in (4, 5)
    )
    path = tmp_path / "plan.json"
    default_plan(ModelIdentity.from_hf_config(planned), ("int8",)).save(path)
    options = MorphOptions(memory_backend="layer_swap", plan=str(path))
    assert make_plan(planned, options, "cpu").max_level == 3
    with pytest.raises(MorphRefusal, match="num_layers is 4 in the plan and 5 in the model"):
        make_plan(served, options, "cpu")


def test_levels_can_be_chosen() -> None:
    config = LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=4)
    plan = make_plan(config, MorphOptions(levels=(2, 6)), "cpu")
    assert (plan.levels, len(plan.steps), plan.variants) == ((0, 2, 6), 6, ("int8", "int4"))
    assert make_plan(config, MorphOptions(levels=(4,)), "cpu").variants == ("int8",)


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        (MorphOptions(levels=(2, 9)), "cpu", r"levels \[2, 9\] must end at one of the plan's 4"),
        (MorphOptions(levels=(2, 2)), "cpu", "levels must rise strictly"),
        (MorphOptions(levels=(-1,)), "cpu", "must end at one of the plan's 4"),
        (MorphOptions(plan="no/such/plan.json"), "cpu", "no/such/plan.json"),
        (MorphOptions(variants=("int4", "int8")), "cpu", "no larger"),
        (MorphOptions(), "xpu", "no variants for device 'xpu'"),
    ],
)
def test_plan_that_does_not_fit_is_refused(
    options: MorphOptions, device: str, message: str
) -> None:
    config = LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=2)
    with pytest.raises(MorphRefusal, match=message):
        make_plan(config, options, device)


def test_too_little_host_memory_is_refused_with_both_figures() -> None:
    check_host_memory(8 << 30, 8 << 30)
    with pytest.raises(MorphRefusal, match="need 16.0 GiB of host memory, available are 8.0 GiB;"):
        check_host_memory(16 << 30, 8 << 30)


def test_real_model_passes_and_is_charged_on_the_cpu(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ServerArgs(
        model_path=str(smollm2), device="cpu", dtype="float32", attention_backend="torch_native"
    )
    check_model_and_host(args, ELASTIC)
    # float32 weights of 0.5 GB, 0.42 GB of them morphable and backed up, and two variants.
    monkeypatch.setattr(preflight, "available_bytes", lambda: 10**9)
    with pytest.raises(MorphRefusal, match="need 1.1 GiB of host memory, available are 0.9 GiB"):
        check_model_and_host(args, ELASTIC)


HALVES = MorphOptions(memory_backend="semi_unified")


def test_halves_are_of_a_lossless_variant_alone(tmp_path: Path) -> None:
    config = LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=4)
    assert make_plan(config, HALVES, "cpu").variants == ("nested_fp8",)
    path = tmp_path / "plan.json"
    default_plan(ModelIdentity.from_hf_config(config), ("nested_fp8", "int4")).save(path)
    for options, unfit in [
        (replace(HALVES, variants=("int8",)), "int8"),
        (replace(HALVES, plan=str(path)), "int4"),
    ]:
        with pytest.raises(MorphRefusal, match=f"halves of nested_fp8 and cannot take {unfit};"):
            make_plan(config, options, "cpu")


@pytest.mark.parametrize(
    ("unit_mib", "hidden", "message"),
    [
        (None, 1024, None),
        (20, 1024, None),
        (22, 1024, r"units of 22 MiB .* at level 1 .* are 21\.0 MiB.*; give --morph-unit-mib 20,"),
        (None, 64, r"units of 2 MiB .* are 0\.\d MiB.*; choose deeper --morph-levels, or"),
    ],
)
def test_units_fit_the_first_level(unit_mib: int | None, hidden: int, message: str | None) -> None:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    options = replace(HALVES, unit_mib=unit_mib)
    shapes, plan = list(linear_shapes(config)), make_plan(config, options, "cpu")
    if message is None:
        check_unit_size(shapes, plan, options, "cpu")
        return
    with pytest.raises(MorphRefusal, match=message):
        check_unit_size(shapes, plan, options, "cpu")


def test_halves_need_less_host_memory(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ServerArgs(
        model_path=str(smollm2), device="cpu", dtype="float32", attention_backend="torch_native"
    )
    # 0.54 GB of weights and 0.11 GB of residuals.
    monkeypatch.setattr(preflight, "available_bytes", lambda: 650 * 10**6)
    check_model_and_host(args, HALVES)
    monkeypatch.setattr(preflight, "available_bytes", lambda: 640 * 10**6)
    with pytest.raises(MorphRefusal, match="need 0.6 GiB of host memory"):
        check_model_and_host(args, HALVES)


@pytest.mark.parametrize(
    ("capability", "fails", "message"),
    [
        ((9, 0), False, None),
        ((8, 9), False, r"kernels for Hopper GPUs \(SM90\) only, and this one is SM89; use .*swap"),
        ((10, 0), False, "this one is SM100; use --memory-backend layer_swap"),
        ((9, 0), True, "no virtual memory.*; use --memory-backend layer_swap"),
    ],
)
def test_halves_need_a_gpu_with_the_kernels_and_virtual_memory(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fails: bool, message: str | None
) -> None:
    config = LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=4)
    plan, shapes = make_plan(config, HALVES, "cpu"), list(linear_shapes(config))

    def check_support(device: torch.device) -> None:
        if fails:
            raise VmmError(
                "GPU 0 has no virtual memory management; use --memory-backend layer_swap"
            )

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(preflight, "check_support", check_support)
    monkeypatch.setattr(
        preflight, "create_variant", lambda name, device, q: create_variant(name, "cpu", q)
    )
    if message is None:
        check_halves(shapes, plan, HALVES, "cuda")
        return
    with pytest.raises(MorphRefusal, match=message) as refusal:
        check_halves(shapes, plan, HALVES, "cuda")
    assert "\n" not in str(refusal.value)


def test_a_linear_that_the_merge_gemm_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=4)
    plan, shapes = make_plan(config, HALVES, "cpu"), list(linear_shapes(config))
    monkeypatch.setattr(
        NestedFp8,
        "merged_obstacle",
        lambda _, rows, columns: merge_gemm.supports(rows, columns + 8),
    )
    with pytest.raises(
        MorphRefusal, match="self_attn.qkv_proj: the merge GEMM .*; use .*layer_swap"
    ):
        check_halves(shapes, plan, HALVES, "cpu")


@pytest.mark.parametrize("backend", ["tc_piecewise", "breakable", "disabled"])
def test_prefill_that_would_be_traced(backend: str) -> None:
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend=backend))
    args = SimpleNamespace(device="cuda", cuda_graph_config=graphs)
    if backend != "tc_piecewise":
        check_prefill_graphs(args, HALVES)
        return
    with pytest.raises(MorphRefusal, match="set it to breakable or leave it out"):
        check_prefill_graphs(args, HALVES)
