"""Where SGLang looks for compiled Marlin kernels, and what is told while they are compiled."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from sglang_morph.precision.variants import marlin_build
from sglang_morph.precision.variants.marlin_build import ensure_built, is_built, libraries

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sglang_loads_those_files(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tvm_ffi
    from sglang.kernels.ops.quantization import awq_marlin_repack, gptq_marlin

    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path))
    assert not is_built(dtype)
    for library in libraries(dtype):
        library.parent.mkdir()
        library.touch()
    assert is_built(dtype)
    loaded: list[str] = []
    monkeypatch.setattr(tvm_ffi, "load_module", loaded.append)
    gptq_marlin._jit_gptq_marlin_module.__wrapped__(dtype)
    awq_marlin_repack._jit_awq_marlin_repack_module.__wrapped__()
    assert loaded == [str(library) for library in libraries(dtype)]


def test_compiling_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.kernels.ops.quantization import awq_marlin_repack, gptq_marlin

    compiled: list[torch.dtype | None] = []

    def slowly(dtype: torch.dtype | None = None) -> None:
        time.sleep(0.1)
        compiled.append(dtype)

    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(marlin_build, "PROGRESS_S", 0.05)
    monkeypatch.setattr(gptq_marlin, "_jit_gptq_marlin_module", slowly)
    monkeypatch.setattr(awq_marlin_repack, "_jit_awq_marlin_repack_module", slowly)
    ensure_built.cache_clear()
    caplog.set_level(logging.INFO)
    ensure_built(torch.bfloat16)
    ensure_built(torch.bfloat16)
    ensure_built.cache_clear()
    assert compiled == [None, torch.bfloat16]
    lines = [record.message for record in caplog.records if record.name == marlin_build.__name__]
    assert "--prebuild" in lines[0] and "compiled in" in lines[-1]
    assert any("Still compiling" in line for line in lines)
