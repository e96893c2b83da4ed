from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memory_backends.base import PageRange
from memory_backends.pages import count, subtract, to_tensor


@st.composite
def range_lists(draw: st.DrawFn) -> list[PageRange]:
    """Ascending, disjoint, non-empty ranges."""
    cuts = sorted(draw(st.sets(st.integers(0, 60), max_size=12)))
    return [PageRange(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]


def ids(ranges: list[PageRange]) -> set[int]:
    return set(to_tensor(ranges, "cpu").tolist())


@given(range_lists(), range_lists())
def test_subtract_is_set_difference(left: list[PageRange], right: list[PageRange]) -> None:
    result = subtract(left, right)
    assert ids(result) == ids(left) - ids(right)
    assert count(result) == len(ids(result))
    assert all(len(r) > 0 for r in result)


def test_no_ranges_make_an_empty_tensor() -> None:
    assert to_tensor([], "cpu").tolist() == []
