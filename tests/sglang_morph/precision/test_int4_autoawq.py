"""int4 of AutoAWQ: who computes, and what its kernels are given. They cannot run without a GPU, so
a module of their name computes in torch what they are documented to."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants import int4_autoawq
from sglang_morph.precision.variants.int4_autoawq import MODULE, Int4AutoAwq
from sglang_morph.precision.variants.int4_marlin import Int4Marlin
from sglang_morph.precision.variants.registry import create_variant


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    int4_autoawq._obstacle.cache_clear()
    yield
    int4_autoawq._obstacle.cache_clear()


def test_marlin_where_it_cannot_be_imported_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    caplog.set_level(logging.INFO)
    for _ in range(3):
        assert type(create_variant("int4", "cuda", create_quantizer("rtn"))) is Int4Marlin
    (line,) = [r.message for r in caplog.records if r.name == int4_autoawq.__name__]
    assert "autoawq-kernels cannot be used (import of awq_ext halted" in line


def test_marlin_where_it_would_run_on_another_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace())
    monkeypatch.setattr(int4_autoawq, "_follow_streams", lambda: False)
    caplog.set_level(logging.INFO)
    assert type(create_variant("int4", "cuda", create_quantizer("rtn"))) is Int4Marlin
    assert "do not run on the stream they are called on" in caplog.text


@pytest.fixture
def variant(monkeypatch: pytest.MonkeyPatch) -> Int4AutoAwq:
    from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition

    def dequantize(
        codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, *_: object
    ) -> torch.Tensor:
        assert scales.dtype == torch.float16 and codes.dtype == zeros.dtype == torch.int32
        return awq_dequantize_decomposition(codes, scales.float(), zeros).half()

    kernels = SimpleNamespace(
        dequantize_weights_cuda=dequantize,
        gemm_forward_cuda=lambda x, *weight: x @ dequantize(*weight),
    )
    monkeypatch.setitem(sys.modules, MODULE, kernels)
    monkeypatch.setattr(int4_autoawq, "_follow_streams", lambda: True)
    created = create_variant("int4", "cuda", create_quantizer("rtn"))
    assert isinstance(created, Int4AutoAwq) and created.kernel == "autoawq-kernels"
    return created


@pytest.mark.parametrize("tokens", [0, 1, 17, 1024])
def test_parts_are_as_its_kernels_read_them(variant: Int4AutoAwq, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(64, 256, generator=generator) * 0.02 + 0.01).half()
    assert variant.for_weight(weight) is variant
    parts = variant.encode(weight)
    x = torch.randn(tokens, 256, generator=generator).half()
    bias = torch.randn(64, generator=generator).half()
    y = variant.linear(parts, x, bias)
    assert y.shape == (tokens, 64) and y.dtype == torch.float16
    expected = linear(x.float(), variant.reference(weight), bias.float())
    assert (y.float() - expected).norm() <= variant.tolerance * expected.norm()


def test_bf16_is_left_to_marlin(variant: Int4AutoAwq) -> None:
    assert type(variant.for_weight(torch.ones(64, 128).bfloat16())) is Int4Marlin
    assert variant.is_built(torch.float16)
