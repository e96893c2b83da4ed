from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict

import pytest
import torch
from torch.nn.functional import linear

from sglang_morph.precision.names import NOMINAL_BITS
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants import registry
from sglang_morph.precision.variants.base import Variant
from sglang_morph.precision.variants.registry import (
    VARIANTS,
    create_variant,
    default_variants,
    register_variant,
)

SMOLLM2_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
KERNELS = [
    ("fp8", "cpu"),
    ("int3", "cpu"),
    ("int4", "cpu"),
    ("int8", "cpu"),
    ("int8", "cuda"),
    ("nested_fp8", "cpu"),
]
"""What runs on a CPU: `int8` of `cuda` is plain torch."""
CODES = {"int8": 0.01, "int4": 0.1, "int3": 0.22, "fp8": 0.03, "nested_fp8": 0.03}
"""Relative error of the codes on Gaussian weights."""
BATCHES = [*range(1, 18), 31, 32, 33, 63, 64]


def variant(name: str, device_type: str) -> Variant:
    return create_variant(name, device_type, create_quantizer("rtn"))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("key", KERNELS, ids="-".join)
@pytest.mark.parametrize("shape", [*SMOLLM2_SHAPES, (48, 96)], ids=str)
def test_kernel_equals_its_reference(key: tuple[str, str], shape: tuple[int, int]) -> None:
    """The weights' mean is far from 0, so a wrong zero shows."""
    chosen, (rows, columns) = variant(*key), shape
    weight = (random(rows, columns) * 0.05 + 0.03).half()
    parts, reference = chosen.encode(weight), chosen.reference(weight)
    assert relative_error(reference, weight.float()) < CODES[chosen.name]
    for batch in BATCHES:
        x = random(batch, columns, seed=batch).bfloat16()
        y = chosen.linear(parts, x, None)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), linear(x.float(), reference), rtol=0.02, atol=0.02)
        assert relative_error(y, linear(x.float(), reference)) < 0.005


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_kernels_on_narrower_cpus(capability: str) -> None:
    """The packed layout follows the vector width, which torch fixes when the process starts."""
    if capability == "avx2" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this CPU has no AVX2")
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, __file__, "-k", "kernel_equals and cpu and (960 or 48)"],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("key", KERNELS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtype_shape_and_bias(key: tuple[str, str], dtype: torch.dtype) -> None:
    chosen = variant(*key)
    weight, bias = random(48, 64).clamp(-1.5, 1.5).half(), random(48, seed=1).to(dtype)
    parts = chosen.encode(weight)
    x = random(2, 3, 64, seed=2).to(dtype)
    before = x.clone()
    y = chosen.linear(parts, x, bias)
    assert (y.shape, y.dtype) == ((2, 3, 48), dtype)
    assert torch.equal(x, before)
    expected = linear(x.float(), chosen.reference(weight), bias.float())
    assert relative_error(y, expected) < 0.005
    assert chosen.linear(parts, x[:, :0], bias).shape == (2, 0, 48)


@pytest.mark.parametrize("key", KERNELS, ids="-".join)
def test_parts_are_small_and_contiguous(key: tuple[str, str]) -> None:
    chosen = variant(*key)
    weight = random(960, 576).clamp(-1.5, 1.5).half()
    parts = chosen.encode(weight)
    assert all(part.is_contiguous() and part.device.type == "cpu" for part in parts.values())
    groups = weight.numel() // chosen.group_size(576)
    codes = weight.numel() * chosen.nominal_bits // 8
    assert sum(part.nbytes for part in parts.values()) <= codes + groups * 2 * 4


@pytest.mark.parametrize("key", KERNELS, ids="-".join)
def test_parts_may_lie_in_a_slab(key: tuple[str, str]) -> None:
    """Views of foreign bytes give the same result, bit for bit, and nothing is read beyond."""
    chosen = variant(*key)
    parts = chosen.encode(random(64, 96).clamp(-1.5, 1.5).half())
    x = random(5, 96, seed=3)
    expected = chosen.linear(parts, x, None)
    for filler in (0x00, 0xFF):
        slab = torch.full((1 << 16,), filler, dtype=torch.uint8)
        views, offset = {}, 256
        for name, part in parts.items():
            view = slab[offset : offset + part.nbytes].view(part.dtype).view(part.shape)
            views[name] = view.copy_(part)
            offset += -(-part.nbytes // 256) * 256
        assert torch.equal(chosen.linear(views, x, None), expected)


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        (("int8", "cpu"), (64, 40), "K divisible by 16, not 40"),
        (("int4", "cpu"), (40, 64), "N divisible by 16, not 40"),
        (("int4", "cpu"), (64, 48), "K divisible by 32, not 48"),
        (("int3", "cpu"), (64, 48), "K divisible by 32, not 48"),
        (("int3", "cpu"), (60, 64), "N divisible by 8, not 60"),
        (("int4", "cuda"), (64, 192), "K divisible by 128, not 192"),
        (("int4", "cuda"), (96, 128), "N divisible by 64, not 96"),
        (("nested_fp8", "cpu"), (64, 33), "an even K, not 33"),
    ],
)
def test_unsupported_shapes_are_refused(
    key: tuple[str, str], shape: tuple[int, int], message: str
) -> None:
    chosen = variant(*key)
    assert message in (chosen.supports(*shape) or "")
    with pytest.raises(ValueError, match=message):
        chosen.encode(torch.ones(shape, dtype=torch.float16))


def test_error_on_real_weights(smollm2_weights: dict[str, torch.Tensor]) -> None:
    """Bounds a little above what SmolLM2-135M shows; int8 is 8% below symmetric codes."""
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    symmetric: list[float] = []
    for name, weight in smollm2_weights.items():
        for kind in default_variants("cpu"):
            chosen = variant(kind, "cpu")
            errors[kind, name.split(".")[-2]].append(
                relative_error(chosen.reference(weight), weight)
            )
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        symmetric.append(relative_error((weight / scale).round() * scale, weight))
    bounds = {"int8": 0.012, "int4": 0.11}
    for (kind, linear_name), found in sorted(errors.items()):
        print(f"{kind} {linear_name}: mean {sum(found) / len(found):.4f}, worst {max(found):.4f}")
        assert max(found) < bounds[kind]
    int8 = [e for (kind, _), found in errors.items() if kind == "int8" for e in found]
    assert sum(int8) < 0.95 * sum(symmetric)


def test_linear_on_real_weights(smollm2_weights: dict[str, torch.Tensor]) -> None:
    for name, weight in smollm2_weights.items():
        x = random(8, weight.shape[1])
        for kind in default_variants("cpu"):
            chosen = variant(kind, "cpu")
            y = chosen.linear(chosen.encode(weight), x, None)
            assert relative_error(y, linear(x, chosen.reference(weight))) < 0.005, (name, kind)


def test_defaults_exist_and_shrink() -> None:
    for device_type in ("cpu", "cuda"):
        names = default_variants(device_type)
        assert all((name, device_type) in VARIANTS for name in names)
        bits = [NOMINAL_BITS[name] for name in ("full", *names)]
        assert bits == sorted(set(bits), reverse=True)


@pytest.mark.parametrize(
    ("available", "capability", "expected"),
    [
        (True, (9, 0), "nested_fp8"),
        (True, (8, 9), "nested_fp8"),
        (True, (8, 6), "int8"),
        (False, (9, 0), "int8"),
    ],
)
def test_the_gpu_decides_the_default(
    monkeypatch: pytest.MonkeyPatch, available: bool, capability: tuple[int, int], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert default_variants("cuda") == (expected,)


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'int2' does not exist on device 'cpu'.*int8, int4"):
        variant("int2", "cpu")
    with pytest.raises(ValueError, match="known there: none"):
        variant("int8", "npu")
    with pytest.raises(ValueError, match="'npu'; use cpu or cuda"):
        default_variants("npu")


def test_third_party_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "VARIANTS", dict(VARIANTS))
    monkeypatch.setattr(registry, "NOMINAL_BITS", dict(NOMINAL_BITS))
    target = VARIANTS["int4", "cpu"]
    register_variant("int4", "xpu", target, bits=4)
    assert variant("int4", "xpu").name == "int4"
    with pytest.raises(ValueError, match="already"):
        register_variant("int4", "xpu", target, bits=4)
    with pytest.raises(ValueError, match="4 bits, not 5"):
        register_variant("int4", "npu", target, bits=5)
