"""SGLang compiles its Marlin kernels when they are first used, which takes minutes, and keeps them.

Here it is told beforehand whether that will happen, and how it goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

PROGRESS_S = 20.0
"""Time between two lines in the log."""


def libraries(dtype: torch.dtype) -> list[Path]:
    """Files that SGLang loads instead of compiling, for weights of `dtype` and the current GPU."""
    from sglang.kernels.jit.utils import compile as jit

    def library(source: str, *names: str) -> Path:
        path = str((jit.KERNEL_PATH / "csrc" / "gemm" / "marlin" / source).resolve())
        module = "_".join(["sgl_kernel_jit", *names, jit._local_jit_source_hash([path])])
        folder = os.environ.get("TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi")
        return Path(folder).expanduser() / jit._jit_build_dir_name(module) / f"{module}.so"

    return [
        library("gptq_marlin.cuh", "gptq_marlin", *jit.make_cpp_args(dtype)),
        library("awq_marlin_repack.cuh", "awq_marlin_repack"),
    ]


def is_built(dtype: torch.dtype) -> bool:
    """Whether nothing would have to be compiled for weights of `dtype`."""
    return all(library.is_file() for library in libraries(dtype))


@cache
def ensure_built(dtype: torch.dtype) -> None:
    """Compile what is missing, with a line in the log now and then."""
    from sglang.kernels.ops.quantization.awq_marlin_repack import _jit_awq_marlin_repack_module
    from sglang.kernels.ops.quantization.gptq_marlin import _jit_gptq_marlin_module

    if is_built(dtype):
        return
    with _progress():
        _jit_awq_marlin_repack_module()
        _jit_gptq_marlin_module(dtype)


@contextmanager
def _progress() -> Iterator[None]:
    logger.warning(
        "Compiling SGLang's Marlin kernels for int4, which takes minutes, once; "
        "`sglang-morph doctor --prebuild` does it ahead"
    )
    began, done = time.perf_counter(), threading.Event()

    def tell() -> None:
        while not done.wait(PROGRESS_S):
            logger.info("Still compiling Marlin: %.0f s", time.perf_counter() - began)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
    logger.info("Marlin compiled in %.0f s", time.perf_counter() - began)
