"""The tick benchmark runs every policy, and looks at no more of a queue than it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from benchmarks.controller_tick import ARMS, measure
from sglang_morph.controller.queue_tokens import COUNTED, waiting_tokens


def test_every_policy_is_timed() -> None:
    for options in ARMS:
        times = measure(options, ticks=50)
        assert len(times) == 50
        assert all(time >= 0 for time in times)


class Watched(Sequence[int]):
    """A long queue that counts how often it is read."""

    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return 7

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole queue is walked")


def test_a_queue_of_any_length_costs_the_same() -> None:
    for length in (COUNTED, 10_000, 1_000_000):
        queue = Watched(length)
        assert waiting_tokens(queue, lambda tokens: tokens) == 7 * length
        assert queue.reads == COUNTED
