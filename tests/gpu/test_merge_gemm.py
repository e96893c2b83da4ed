"""The merge GEMM against a plain one on the rebuilt weight."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from sglang_morph.precision.nested import merge_gemm
from sglang_morph.precision.nested.encoding import Nesting, find_exceptions
from sglang_morph.precision.nested.ops import exception_starts, split_into

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != merge_gemm.CAPABILITY,
    reason="needs a Hopper GPU (SM90)",
)


def _weight(rows: int, columns: int, dtype: torch.dtype, nesting: Nesting) -> torch.Tensor:
    """Random weights that both fp16 and `dtype` hold."""
    torch.manual_seed(rows * columns)
    scale = 0.02 if nesting is Nesting.E4M3 else 2.0
    weight = torch.randn(rows, columns, device="cuda") * scale
    return weight.to(torch.bfloat16).half().to(dtype)


def _halves(weight: torch.Tensor, nesting: Nesting) -> tuple[torch.Tensor, torch.Tensor]:
    upper, lower = (torch.empty_like(weight, dtype=torch.uint8) for _ in range(2))
    split_into(weight, upper, lower, nesting)
    return upper, lower


@pytest.mark.parametrize("nesting", [Nesting.E4M3, Nesting.E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(128, 64), (136, 576), (4096, 4096), (6144, 4096)])
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 33, 64, 100, 128, 200, 256, 300, 1024])
def test_equals_a_plain_linear_in_float32(
    tokens: int, shape: tuple[int, int], dtype: torch.dtype, nesting: Nesting
) -> None:
    weight = _weight(*shape, dtype, nesting)
    x = torch.randn(tokens, shape[1], device="cuda").to(dtype)
    y = merge_gemm.merge_gemm(*_halves(weight, nesting), x, nesting)
    expected = linear(x.float(), weight.float())
    error = (y.float() - expected).norm() / expected.norm()
    assert y.dtype == dtype
    assert error < (4e-3 if dtype is torch.bfloat16 else 5e-4), float(error)


@pytest.mark.parametrize("nesting", [Nesting.E4M3, Nesting.E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [64, 576, 14336])
def test_any_rows_are_merged_bit_for_bit(
    columns: int, dtype: torch.dtype, nesting: Nesting
) -> None:
    """A block of the kernel has 64 rows, 7.1 or 0.3, and exceptions beyond its ends."""
    weight = _weight(200, columns, dtype, nesting)
    weight[::3, 5::7] = 3.3e-7
    weight[150] = -1.1e-6
    upper, lower = _halves(weight, nesting)
    found = find_exceptions(weight)
    assert (len(found.index) > 0) == (dtype is torch.bfloat16)
    lists = {
        "exception_index": found.index,
        "exception_bits": found.bits,
        "exception_starts": exception_starts(found.index, *weight.shape),
    }
    residual = {"lower": lower} | (lists if len(found.index) else {})
    for first, stop in [(0, 200), (0, 1), (1, 70), (70, 200), (150, 151), (199, 200)]:
        rows = torch.full_like(weight[first:stop], torch.nan)
        merge_gemm.merge_rows(upper, residual, rows, first, nesting)
        assert torch.equal(rows.view(torch.int16), weight[first:stop].view(torch.int16)), first


def test_rows_of_x_may_be_apart() -> None:
    weight = _weight(256, 128, torch.bfloat16, Nesting.E4M3)
    wide = torch.randn(20, 512, device="cuda").bfloat16()
    halves = _halves(weight, Nesting.E4M3)
    y = merge_gemm.merge_gemm(*halves, wide[:, 128:256], Nesting.E4M3)
    same = merge_gemm.merge_gemm(*halves, wide[:, 128:256].contiguous(), Nesting.E4M3)
    assert torch.equal(y, same)


def test_gives_the_same_bits_every_time_and_in_a_graph() -> None:
    weight = _weight(4096, 4096, torch.bfloat16, Nesting.E4M3)
    halves = _halves(weight, Nesting.E4M3)
    x = torch.randn(64, 4096, device="cuda").bfloat16()
    first = merge_gemm.merge_gemm(*halves, x, Nesting.E4M3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = merge_gemm.merge_gemm(*halves, x, Nesting.E4M3)
    for _ in range(50):
        graph.replay()
        assert torch.equal(y, first)


def test_no_tokens() -> None:
    weight = _weight(128, 64, torch.bfloat16, Nesting.E4M3)
    x = torch.empty(0, 64, device="cuda", dtype=torch.bfloat16)
    assert merge_gemm.merge_gemm(*_halves(weight, Nesting.E4M3), x, Nesting.E4M3).shape == (0, 128)


def test_refuses_shapes_and_strides_that_do_not_fit() -> None:
    weight = _weight(128, 128, torch.bfloat16, Nesting.E4M3)
    halves = _halves(weight, Nesting.E4M3)
    with pytest.raises(ValueError, match="16-byte"):
        wide = torch.zeros(4, 260, device="cuda", dtype=torch.bfloat16)
        merge_gemm.merge_gemm(*halves, wide[:, 1:129], Nesting.E4M3)
    with pytest.raises(ValueError, match="divisible by 64"):
        short = torch.zeros(4, 96, device="cuda", dtype=torch.bfloat16)
        merge_gemm.merge_gemm(halves[0][:, :96], halves[1][:, :96], short, Nesting.E4M3)
