"""The linear from two halves as on a GPU, with the kernels' CPU counterparts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from sglang_morph.precision.nested import full_linear, merge_gemm
from sglang_morph.precision.nested.encoding import Nesting, find_exceptions
from sglang_morph.precision.nested.full_linear import BLOCK_BYTES, block_rows
from sglang_morph.precision.nested.ops import (
    exception_starts,
    merge_into,
    patch_rows,
    split_into,
)

ROWS, COLUMNS = 80, 64


def bf16_weight() -> torch.Tensor:
    """With exceptions in some rows, in none of others."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(ROWS, COLUMNS, generator=generator) * 0.02).bfloat16()
    weight[7, ::3] = 3.3e-7
    weight[40] = -1.1e-6
    weight[ROWS - 1, COLUMNS - 1] = 3.3e-7
    return weight


def halves(weight: torch.Tensor, nesting: Nesting) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Upper half and residual."""
    upper, lower = (torch.empty_like(weight, dtype=torch.uint8) for _ in range(2))
    split_into(weight, upper, lower, nesting)
    found = find_exceptions(weight)
    residual = {
        "lower": lower,
        "exception_index": found.index,
        "exception_bits": found.bits,
        "exception_starts": exception_starts(found.index, *weight.shape),
    }
    return upper, residual


def test_any_rows_are_rebuilt_bit_for_bit() -> None:
    weight = bf16_weight()
    upper, residual = halves(weight, Nesting.E4M3)
    for first, stop in [(0, ROWS), (0, 1), (7, 8), (8, 40), (40, ROWS)]:
        block = torch.empty(stop - first, COLUMNS, dtype=torch.bfloat16)
        merge_into(upper[first:stop], residual["lower"][first:stop], block, Nesting.E4M3)
        patch_rows(block, residual, first)
        assert torch.equal(block, weight[first:stop])


def test_a_weight_without_exceptions_needs_no_lists() -> None:
    weight = torch.ones(4, 8, dtype=torch.float16)
    patch_rows(weight, {}, 0)
    assert (weight == 1).all()


@pytest.mark.parametrize("nesting", [Nesting.E4M3, Nesting.E5M2])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scratch_rows", [ROWS, 32, 16])
def test_many_tokens_in_blocks_of_rows(
    nesting: Nesting, with_bias: bool, scratch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_gemm, "MAX_TOKENS", 4)
    weight = bf16_weight()
    upper, residual = halves(weight, nesting)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, COLUMNS, generator=generator).bfloat16()
    bias = torch.randn(ROWS, generator=generator).bfloat16() if with_bias else None
    scratch = torch.full((scratch_rows, COLUMNS), torch.nan, dtype=torch.bfloat16)
    y = full_linear.full_linear(upper, residual, x, bias, nesting, scratch)
    assert y.dtype == torch.bfloat16 and y.is_contiguous()
    expected = linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert (y.float() - expected).norm() <= 0.005 * expected.norm()


def test_the_number_of_tokens_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = []

    def merge(
        upper: torch.Tensor, lower: torch.Tensor, x: torch.Tensor, nesting: Nesting
    ) -> torch.Tensor:
        fused.append(len(x))
        return x.new_zeros(len(x), len(upper))

    monkeypatch.setattr(merge_gemm, "MAX_TOKENS", 4)
    monkeypatch.setattr(merge_gemm, "merge_gemm", merge)
    upper, residual = halves(bf16_weight(), Nesting.E4M3)
    scratch = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    bias = torch.arange(ROWS).bfloat16()
    for tokens in (0, 1, 4, 5, 6):
        x = torch.zeros(tokens, COLUMNS, dtype=torch.bfloat16)
        y = full_linear.full_linear(upper, residual, x, bias, Nesting.E4M3, scratch)
        assert torch.equal(y, bias.expand(tokens, ROWS))
    assert fused == [0, 1, 4]


@pytest.mark.parametrize(
    ("rows", "columns"), [(28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (960, 576)]
)
def test_blocks_stay_in_the_cache_and_are_of_about_one_size(rows: int, columns: int) -> None:
    step = block_rows(rows, columns, 2)
    assert step == rows or step % 128 == 0
    assert step * columns * 2 <= 1.5 * BLOCK_BYTES
    blocks = -(-rows // step)
    assert rows / blocks >= 0.7 * step
