"""Sends a burst to a server in open loop (arrivals don't wait for answers) and times the tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import orjson

from sglang_morph.demo.burst import BurstRequest

_DATA = b"data:"
_END = b"[DONE]"
_REQUEST_TIMEOUT_S = 400.0


@dataclass(slots=True)
class RequestResult:
    """What became of one request. Times are seconds since the burst's start or durations."""

    index: int
    phase: str
    sent_s: float
    wanted_tokens: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    end_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Times between two arrivals of tokens."""
    error: str | None = None

    @property
    def ok(self) -> bool:
        """All tokens asked for have come, and no error."""
        return self.error is None and self.output_tokens == self.wanted_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.first_token_s is None or self.end_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)


Finished = Callable[[RequestResult], None]


async def replay(
    url: str, burst: Sequence[BurstRequest], start: float, finished: Finished
) -> list[RequestResult]:
    """Send every request at its time after `start` (a `time.monotonic()` value).

    Returns one result per request, in the burst's order; failures are results too.
    """
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        return await asyncio.gather(
            *(
                _send(session, index, request, start, finished)
                for index, request in enumerate(burst)
            )
        )


async def _send(
    session: aiohttp.ClientSession,
    index: int,
    request: BurstRequest,
    start: float,
    finished: Finished,
) -> RequestResult:
    await asyncio.sleep(max(0.0, start + request.at_s - time.monotonic()))
    result = RequestResult(
        index, request.phase, time.monotonic() - start, wanted_tokens=request.output_tokens
    )
    try:
        await _stream(session, request, result, start)
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        result.error = str(error) or type(error).__name__
    if result.error is None and not result.ok:
        result.error = f"{result.output_tokens} of {result.wanted_tokens} tokens came"
    finished(result)
    return result


async def _stream(
    session: aiohttp.ClientSession, request: BurstRequest, result: RequestResult, start: float
) -> None:
    """Read the answer's events into `result`. Raises ValueError for an error the server sends."""
    body = {
        "text": request.prompt,
        "stream": True,
        "sampling_params": {
            "max_new_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
    }
    async with session.post("/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(_DATA) and _END not in line:
                _take(orjson.loads(line[len(_DATA) :]), result, time.monotonic() - start)


def _take(event: dict[str, object], result: RequestResult, now_s: float) -> None:
    if "error" in event:
        raise ValueError(f"server: {event['error']}")
    meta = event["meta_info"]
    assert isinstance(meta, dict)
    reason = meta.get("finish_reason")
    if reason and reason["type"] == "abort":
        raise ValueError(f"aborted: {reason.get('message', 'no reason given')}")
    if meta["completion_tokens"] == result.output_tokens:
        return
    if result.end_s is None:
        result.first_token_s = now_s
    else:
        result.gaps_s.append(now_s - result.end_s)
    result.prompt_tokens = meta["prompt_tokens"]
    result.output_tokens = meta["completion_tokens"]
    result.end_s = now_s
