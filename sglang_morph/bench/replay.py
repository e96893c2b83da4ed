"""Sends a workload in open loop: each request when it is due, whatever the server does.

One process, one event loop. Bodies are made before the start and garbage is collected after the
end, so that the loop is free when a request is due; how late each was is recorded.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
import orjson

from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.routes import Route
from sglang_morph.bench.workload import PlannedRequest, Workload

_DATA = b"data:"
_END = b"[DONE]"
_READ_BUFFER = 2**20
"""Events carry the whole text so far; aiohttp refuses lines longer than twice this."""
_LEAD_S = 0.2
"""From the call to time 0, for the loop to settle."""

Finished = Callable[[Outcome], None]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Replay:
    """Outcomes in the workload's order; failures are outcomes too."""

    outcomes: list[Outcome]
    started: float
    """UNIX seconds of time 0."""
    duration_s: float
    """From time 0 to the last answer: the drain is in it."""


def run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run `main` on uvloop's event loop where there is one, else on asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


async def replay(
    url: str,
    route: Route,
    workload: Workload,
    drain_timeout_s: float,
    finished: Finished = lambda outcome: None,
) -> Replay:
    """Send `workload` to the server at `url` and wait for the answers.

    Requests not answered `drain_timeout_s` after the last arrival are given up; they have failed.
    """
    bodies = [route.body(r.input_ids, r.output_tokens) for r in workload.requests]
    async with _session(url) as session:
        with _quiet_memory(), _prompt_waking():
            begin = time.monotonic() + _LEAD_S
            started = time.time() + _LEAD_S
            replayer = _Replayer(session, route, begin, finished)
            outcomes = await replayer.run(workload.requests, bodies, drain_timeout_s)
            duration_s = time.monotonic() - begin
    return Replay(outcomes, started, duration_s)


def _session(url: str) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_connection_create_start.append(_note_connecting)
    trace.on_connection_create_end.append(_note_connected)
    trace.on_request_chunk_sent.append(_note_sent)
    return aiohttp.ClientSession(
        url,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=_READ_BUFFER,
        headers={"Content-Type": "application/json"},
        trace_configs=[trace],
    )


async def _note_connecting(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceConnectionCreateStartParams,
) -> None:
    context.connecting = time.monotonic()


async def _note_connected(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceConnectionCreateEndParams,
) -> None:
    outcome, _ = context.trace_request_ctx
    outcome.connect_s = time.monotonic() - context.connecting


async def _note_sent(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestChunkSentParams,
) -> None:
    outcome, begin = context.trace_request_ctx
    outcome.sent_s = time.monotonic() - begin


@contextmanager
def _quiet_memory() -> Iterator[None]:
    """No garbage collection while requests are due: a full one takes tens of milliseconds."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _prompt_waking() -> Iterator[None]:
    """Wake this thread at once when a request is due, where the system lets us.

    A server on the same cores would otherwise delay arrivals just when it is busiest. The replayer
    sleeps nearly all the time, so what it takes from the server is the same.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except (AttributeError, OSError):  # Not on Linux, or not permitted.
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class _Replayer:
    def __init__(
        self, session: aiohttp.ClientSession, route: Route, begin: float, finished: Finished
    ) -> None:
        self._session = session
        self._route = route
        self._begin = begin
        self._finished = finished

    async def run(
        self, requests: list[PlannedRequest], bodies: list[bytes], drain_timeout_s: float
    ) -> list[Outcome]:
        outcomes, tasks = [], []
        for index, (request, body) in enumerate(zip(requests, bodies, strict=True)):
            outcome = Outcome(
                index=index,
                at_s=request.at_s,
                input_tokens=len(request.input_ids),
                wanted_tokens=request.output_tokens,
                session=request.session,
            )
            await self._until(request.at_s)
            outcomes.append(outcome)
            tasks.append(asyncio.create_task(self._send(outcome, body)))
        _, late = await asyncio.wait(tasks, timeout=drain_timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks)
        return outcomes

    async def _until(self, at_s: float) -> None:
        # Again, since a timer may fire up to a millisecond early.
        while (left := self._begin + at_s - time.monotonic()) > 0:
            await asyncio.sleep(left)

    async def _send(self, outcome: Outcome, body: bytes) -> None:
        try:
            await self._stream(outcome, body)
        except asyncio.CancelledError:
            outcome.error = "given up: not answered within the drain timeout"
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        if outcome.error is None and not outcome.ok:
            outcome.error = f"{outcome.output_tokens} of {outcome.wanted_tokens} tokens came"
        self._finished(outcome)

    async def _stream(self, outcome: Outcome, body: bytes) -> None:
        context = (outcome, self._begin)
        async with self._session.post(
            self._route.path, data=body, trace_request_ctx=context
        ) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(_DATA) and _END not in line:
                    now_s = time.monotonic() - self._begin
                    self._route.take(orjson.loads(line[len(_DATA) :]), outcome, now_s)
