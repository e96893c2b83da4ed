"""The Triton kernels without a GPU: interpreted on every code, and compiled for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sglang_morph.precision.nested.encoding import (
    E4M3_BOUND,
    E5M2_BOUND,
    Nesting,
    find_exceptions,
    patch_exceptions,
    split,
)

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in a process of its own"
)


def test_interpreted_kernels() -> None:
    """Triton decides when it is imported, so this needs a fresh process."""
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, __file__, "-k", "comes_back"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "9 passed" in done.stdout, done.stdout


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nesting", [Nesting.E4M3, Nesting.E5M2])
@pytest.mark.parametrize("cut", [0, 1338], ids=["whole blocks", "a part of a block"])
def test_every_code_comes_back(dtype: torch.dtype, nesting: Nesting, cut: int) -> None:
    from sglang_morph.precision.nested import triton_kernels

    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)[cut:]
    magnitude = weight.float().abs()
    bound = magnitude <= E4M3_BOUND if nesting is Nesting.E4M3 else magnitude < E5M2_BOUND
    weight = torch.where(bound, weight, 0)
    guard = 0x5A
    upper, lower, only_upper = torch.full((3, len(weight) + 2), guard, dtype=torch.uint8)
    n = len(weight)
    triton_kernels.split_into(weight, upper[:n], lower[:n], nesting)
    triton_kernels.split_into(weight, only_upper[:n], None, nesting)
    expected = split(weight.to(torch.float16), nesting)
    assert torch.equal(upper[:n], expected[0]) and torch.equal(lower[:n], expected[1])
    assert torch.equal(only_upper, upper)
    assert (upper[n:] == guard).all() and (lower[n:] == guard).all()

    back = torch.zeros(n + 2, dtype=dtype)
    triton_kernels.merge_into(upper[:n], lower[:n], back[:n], nesting)
    assert (back[n:] == 0).all()
    patch_exceptions(back[:n], find_exceptions(weight))
    assert torch.equal(back[:n].view(torch.int16), weight.view(torch.int16))


@interpreted
def test_every_exception_of_some_rows_comes_back() -> None:
    from sglang_morph.precision.nested import triton_kernels
    from sglang_morph.precision.nested.ops import exception_starts

    rows, columns = 37, 96
    weight = torch.full((rows, columns), 0.5, dtype=torch.bfloat16)
    tiny = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) < 0.2
    tiny[3:5] = False
    tiny[-1, -1] = True
    weight[tiny] = 3.3e-7
    found = find_exceptions(weight)
    starts = exception_starts(found.index, rows, columns)
    for first, stop in [(0, rows), (0, 1), (1, 30), (3, 5), (30, rows)]:
        merged = torch.full((stop - first + 1, columns), 0.5, dtype=torch.bfloat16)
        triton_kernels.patch_rows(merged[:-1], found.index, found.bits, starts, first)
        assert torch.equal(merged[:-1], weight[first:stop])
        assert (merged[-1] == 0.5).all()


def test_the_patch_kernel_compiles_for_hopper() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_morph.precision.nested import triton_kernels

    types = {
        "weight_ptr": "*i16",
        "index_ptr": "*i64",
        "bits_ptr": "*i16",
        "starts_ptr": "*i32",
        "first": "i32",
        "rows": "i32",
        "columns": "i32",
        "BLOCK": "constexpr",
    }
    source = ASTSource(
        fn=triton_kernels._patch_kernel,
        signature=types,
        constexprs={(list(types).index("BLOCK"),): triton_kernels.PATCH_BLOCK},
    )
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32))
    assert ".global" in compiled.asm["ptx"]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kernel", ["split", "merge"])
def test_compiled_for_hopper_with_16_byte_accesses(kernel: str, bf16: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_morph.precision.nested import triton_kernels

    options: dict[str, bool | int] = {"E5M2": False, "BLOCK": triton_kernels.BLOCK}
    if kernel == "split":
        function = triton_kernels._split_kernel
        options |= {"FROM_BF16": bf16, "WITH_LOWER": True}
    else:
        function = triton_kernels._merge_kernel
        options |= {"TO_BF16": bf16}
    types = {"weight_ptr": "*i32", "upper_ptr": "*i16", "lower_ptr": "*i16", "pairs": "i32"}
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in options.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target, options={"num_warps": triton_kernels.WARPS})
    ptx = [line for line in compiled.asm["ptx"].splitlines() if ".global." in line]
    assert ptx and all(".global.v4.b32" in line for line in ptx), ptx
