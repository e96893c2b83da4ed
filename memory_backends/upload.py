"""Uploads from page-locked host memory on a stream of their own, in order.

The scheduler's thread only enqueues and queries: it never waits for a copy. A limit on the rate
holds over the steps of the scheduler: what it allows for one step goes out at the link's own speed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

CHUNK_BYTES = 16 << 20
"""Copies of this size reach full speed and let others in between."""

IN_FLIGHT_BYTES = 512 << 20
"""Most that is enqueued at a time: at 50 GB/s the copy engine is busy for about one decode step."""


@dataclass(slots=True)
class _Transfer:
    key: int
    source: torch.Tensor
    target: torch.Tensor
    done: int = 0


class UploadQueue:
    """Copies host tensors (uint8, 1-D, pinned) to device tensors of the same length.

    On a CPU the streams are torch's no-ops, and a copy is done when it is enqueued.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._pending: deque[_Transfer] = deque()
        self._in_flight: deque[tuple[int, torch.Event]] = deque()
        self._events: dict[int, torch.Event] = {}
        """Transfer -> event after its last chunk, once that is enqueued."""
        self._clock = clock
        self._bytes_per_s: float | None = None
        self._since, self._enqueued_since = clock(), 0
        """When counting for the limit began, and the bytes enqueued from then on."""

    def limit(self, bytes_per_s: float | None) -> None:
        """How much `pump` enqueues from now on, on average; None: as much as the link takes."""
        self._bytes_per_s = bytes_per_s
        self._count_anew()

    def begin(self) -> None:
        """What is added next waits for all work enqueued so far on the current stream."""
        self._stream.wait_stream(self._module.current_stream())
        self._count_anew()

    def add(self, key: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a transfer; `key` names it in `has` and `wait`, which forget an earlier one."""
        self._events.pop(key, None)
        self._pending.append(_Transfer(key, source, target))

    def has(self, key: int) -> bool:
        """Whether transfer `key` has arrived. Never blocks."""
        event = self._events.get(key)
        return event is not None and event.query()

    def wait(self, key: int) -> None:
        """Make the current stream wait for transfer `key`, enqueueing what is missing of it,
        whatever the limit."""
        while key not in self._events:
            self._enqueue_chunk()
        self._module.current_stream().wait_event(self._events[key])

    def cancel(self) -> None:
        """Forget all transfers. What is enqueued still lands, but before what follows on the
        current stream."""
        self._pending.clear()
        self._events.clear()
        self._module.current_stream().wait_stream(self._stream)

    def pump(self) -> None:
        """Enqueue as much as the window and the limit allow."""
        while self._in_flight and self._in_flight[0][1].query():
            self._in_flight.popleft()
        most = self._allowance()
        while self._pending and self._enqueued_since < most and self._window_open():
            self._enqueue_chunk()

    def _window_open(self) -> bool:
        return sum(nbytes for nbytes, _ in self._in_flight) < IN_FLIGHT_BYTES

    def _allowance(self) -> float:
        """Bytes that may have been enqueued by now."""
        if self._bytes_per_s is None:
            return math.inf
        return self._bytes_per_s * (self._clock() - self._since)

    def _count_anew(self) -> None:
        self._since, self._enqueued_since = self._clock(), 0

    def _enqueue_chunk(self) -> None:
        transfer = self._pending[0]
        stop = min(transfer.done + CHUNK_BYTES, transfer.source.numel())
        part = slice(transfer.done, stop)
        with self._module.stream(self._stream):
            transfer.target[part].copy_(transfer.source[part], non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        self._in_flight.append((stop - transfer.done, event))
        self._enqueued_since += stop - transfer.done
        transfer.done = stop
        if stop == transfer.source.numel():
            self._events[transfer.key] = event
            self._pending.popleft()
