"""Limits per request are wider while a long prompt is taken in, and for no other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_morph.controller.request_lengths import RequestLengths

PAGES = (100, 300, 900)
USUAL = (100, 99, 94)


def limits_for(
    prompt: int | None, reach: int, context: int = 500, chunk: int | None = 64
) -> tuple[int, int, int]:
    """While a prompt of so many tokens is taken in."""
    scheduler = SimpleNamespace(
        model_config=SimpleNamespace(context_len=context), chunked_prefill_size=chunk
    )
    names = ("max_total_num_tokens", "max_req_len", "max_req_input_len")
    for name, value in zip(names, USUAL, strict=True):
        setattr(scheduler, name, value)
    request = SimpleNamespace(input_ids=None if prompt is None else range(prompt))
    with RequestLengths(scheduler, PAGES, lambda _: reach).taking_in(request):
        found = tuple(getattr(scheduler, name) for name in names)
    assert tuple(getattr(scheduler, name) for name in names) == USUAL, "they come back"
    return found


@pytest.mark.parametrize(
    ("prompt", "reach", "limits"),
    [
        (93, 2, USUAL),
        (94, 1, (300, 299, 294)),
        (94, 2, (900, 499, 494)),  # the context ends first
        (94, 0, USUAL),
        (None, 2, USUAL),  # embeddings
    ],
)
def test_a_long_prompt_is_measured_by_the_level_it_may_count_on(
    prompt: int | None, reach: int, limits: tuple[int, int, int]
) -> None:
    assert limits_for(prompt, reach) == limits


def test_a_context_that_fits_at_full_precision_changes_nothing() -> None:
    assert limits_for(94, reach=2, context=100) == USUAL


def test_without_chunks_a_prompt_must_fit_the_input_buffers() -> None:
    assert limits_for(94, reach=2, chunk=None) == USUAL


def test_limits_come_back_when_taking_in_fails() -> None:
    scheduler = SimpleNamespace(
        model_config=SimpleNamespace(context_len=500),
        chunked_prefill_size=64,
        max_total_num_tokens=100,
        max_req_len=99,
        max_req_input_len=94,
    )
    lengths = RequestLengths(scheduler, PAGES, lambda _: 2)
    with pytest.raises(OSError), lengths.taking_in(SimpleNamespace(input_ids=range(94))):
        raise OSError
    assert scheduler.max_req_input_len == 94
