"""Kernel times on a GPU: measured in a moment, near to what is known, and read back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from sglang_morph.bundle.cache import CACHE_VARIABLE
from sglang_morph.precision.names import FULL
from sglang_morph.precision.variants.kernel_times import (
    BATCHES,
    available_variants,
    describe,
    measured_times,
    stored_times,
)
from sglang_morph.precision.variants.registry import has_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

LLAMA_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


def test_times_of_an_8b_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    torch.zeros(1, device="cuda")
    held = torch.cuda.memory_reserved()
    began = time.perf_counter()
    found = measured_times(LLAMA_8B, torch.bfloat16)
    seconds = time.perf_counter() - began
    assert found is not None
    print(f"\n{seconds:.2f} s: {describe(found)}\n{found.milliseconds}")
    assert seconds < 15  # the first call loads libraries
    assert torch.cuda.memory_reserved() <= held + (64 << 20)
    assert found.milliseconds.keys() == {FULL, *available_variants(LLAMA_8B, torch.bfloat16)}
    for times in found.milliseconds.values():
        assert len(times) == len(BATCHES) and 0 < times[0] < 5 * times[-1]
    if has_fp8():
        assert found.order[0] == "nested_fp8"
        assert found.costs["nested_fp8"].time < 0.9
        assert 0.5 <= found.costs["nested_fp8"].size < 0.51
    assert stored_times(LLAMA_8B, torch.bfloat16) == found
