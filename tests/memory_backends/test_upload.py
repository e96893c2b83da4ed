"""Uploads arrive in order and no faster than the limit."""

from __future__ import annotations

import pytest
import torch

from memory_backends.upload import CHUNK_BYTES, UploadQueue

CHUNKS = 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> UploadQueue:
    """On a CPU, where what is enqueued has arrived."""
    return UploadQueue(torch.device("cpu"), clock)


@pytest.fixture
def target(queue: UploadQueue) -> torch.Tensor:
    """Of transfer 0, which consists of `CHUNKS` chunks of ones."""
    target = torch.zeros(CHUNKS * CHUNK_BYTES, dtype=torch.uint8)
    queue.begin()
    queue.add(0, torch.ones_like(target), target)
    return target


def arrived(target: torch.Tensor) -> int:
    """Chunks."""
    return int(target[::CHUNK_BYTES].sum())


def test_without_a_limit_all_goes_out_at_once(queue: UploadQueue, target: torch.Tensor) -> None:
    queue.pump()
    assert arrived(target) == CHUNKS
    assert bool(target.all())


def test_the_limit_holds_on_average(queue: UploadQueue, clock: Clock, target: torch.Tensor) -> None:
    queue.limit(10.0 * CHUNK_BYTES)
    for now, chunks in ((100.0, 0), (100.05, 1), (100.1, 1), (100.15, 2), (100.35, 4)):
        clock.now = now
        queue.pump()
        assert arrived(target) == chunks, now
    assert bool(target.all())


def test_what_was_not_sent_before_an_upload_began_does_not_count(
    queue: UploadQueue, clock: Clock, target: torch.Tensor
) -> None:
    queue.limit(10.0 * CHUNK_BYTES)
    clock.now += 1000.0
    queue.begin()
    queue.pump()
    assert arrived(target) == 0


def test_who_waits_gets_the_rest_at_once(queue: UploadQueue, target: torch.Tensor) -> None:
    queue.limit(1.0)
    queue.wait(0)
    assert arrived(target) == CHUNKS


def test_a_limit_can_be_lifted(queue: UploadQueue, target: torch.Tensor) -> None:
    queue.limit(1.0)
    queue.pump()
    queue.limit(None)
    queue.pump()
    assert arrived(target) == CHUNKS
