from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from memory_backends.residual_room import SPARE_BYTES, residual_start, spare_bytes
from memory_backends.slab import ALIGNMENT, Layout

shapes = st.tuples(st.integers(1, 40), st.integers(1, 400), st.integers(0, 300))
"""Rows and columns of a weight, and how many exceptions it has."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layouts(
    linears: list[tuple[int, int, int]], dtype: torch.dtype
) -> tuple[Layout, Layout, Layout]:
    """Of the full weights, of a lossless variant and of its residual."""
    full, lossless, residual = {}, {}, {}
    for index, (rows, columns, exceptions) in enumerate(linears):
        path = f"block.{index}"
        full[f"{path}.weight"] = empty((rows, columns), dtype)
        lossless[f"{path}.codes"] = empty((rows, columns), torch.uint8)
        lossless[f"{path}.scales"] = empty((rows,), torch.float32)
        residual[f"{path}.lower"] = empty((rows, columns), torch.uint8)
        if exceptions:
            residual[f"{path}.exception_index"] = empty((exceptions,), torch.int32)
            residual[f"{path}.exception_bits"] = empty((exceptions,), torch.int16)
    return Layout.of(full), Layout.of(lossless), Layout.of(residual)


@given(st.lists(shapes, min_size=1, max_size=5), st.sampled_from([torch.bfloat16, torch.float32]))
def test_no_byte_is_overwritten_before_it_is_read(
    linears: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    full, lossless, residual = layouts(linears, dtype)
    start = residual_start(full, lossless, residual)
    assert start >= lossless.nbytes and start % ALIGNMENT == 0
    for index, (rows, columns, exceptions) in enumerate(linears):
        weight = full.parts[f"block.{index}.weight"].offset
        lower = start + residual.parts[f"block.{index}.lower"].offset
        for row in range(rows):
            # Row `row` has been copied aside when it is written; the rest of the residual has not.
            assert weight + (row + 1) * columns * dtype.itemsize <= lower + (row + 1) * columns
        if exceptions:
            first = start + residual.parts[f"block.{index}.exception_index"].offset
            assert weight + rows * columns * dtype.itemsize <= first


@given(st.lists(shapes, min_size=1, max_size=5))
def test_weights_of_16_bits_need_no_room_for_it(linears: list[tuple[int, int, int]]) -> None:
    full, lossless, residual = layouts(linears, torch.bfloat16)
    assert residual_start(full, lossless, residual) == lossless.nbytes


def test_a_long_tensor_is_copied_aside_in_parts() -> None:
    def spare(*rows: int) -> int:
        lower = {f"{i}.lower": empty((n, 1024), torch.uint8) for i, n in enumerate(rows)}
        return spare_bytes(Layout.of({**lower, "0.exception_bits": empty((1 << 20,), torch.int16)}))

    assert spare(3, 5, 4) == 5 * 1024
    assert spare(3, SPARE_BYTES) == SPARE_BYTES
