"""Measure a running server's speed at every precision level, over HTTP, into a profile.

    python -m benchmarks.measure_profile --url http://127.0.0.1:30000 --out profile.json

The server must run with `--morph-policy manual` and be otherwise idle. Prompts are random token
ids, so that no prefix is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from sglang_morph.policy_cli.profile import SCHEMA_VERSION, Curve, LevelProfile, ServerProfile

_SHORT_PROMPT = 16
_SETTLE_TIMEOUT_S = 120.0
_FIRST_GAP = 4
"""Gaps before this one belong to the time in which the batch fills up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: prefill sizes (tokens), decode batch sizes, tokens per decode, repeats."""

    prefill: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int
    repeats: int
    percentile: float
    """Of the times measured; below 50 on a machine that others use too."""

    def typical(self, seconds: list[float]) -> float:
        return float(np.percentile(seconds, self.percentile))


class Server:
    """The few calls that are needed."""

    def __init__(self, session: aiohttp.ClientSession, vocabulary: int) -> None:
        self._session = session
        self._vocabulary = vocabulary
        self._rng = random.Random(0)

    async def get(self, path: str) -> dict[str, Any]:
        async with self._session.get(path) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer

    async def go_to(self, level: int) -> dict[str, Any]:
        """Morph to `level`; the status once it is there. Raises TimeoutError."""
        async with self._session.post("/morph/level", json={"level": level}) as response:
            response.raise_for_status()
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while time.monotonic() < deadline:
            status = await self.get("/morph/status")
            latest = status["monitor"]["latest"]  # read at the start of a tick, so it may be old
            if latest["level"] == status["level"] == level and not status["restoring"]:
                return status
            await asyncio.sleep(0.1)
        raise TimeoutError(f"the server did not reach level {level}; is --morph-policy manual set?")

    async def arrivals(self, prompt: int, output: int) -> list[float]:
        """Seconds from sending a request to each of its tokens."""
        body = {
            "input_ids": [self._rng.randrange(100, self._vocabulary) for _ in range(prompt)],
            "stream": True,
            "sampling_params": {"max_new_tokens": output, "temperature": 0, "ignore_eos": True},
        }
        began, times, tokens = time.monotonic(), [], 0
        async with self._session.post("/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                now = orjson.loads(line[5:])["meta_info"]["completion_tokens"]
                times += [time.monotonic() - began] * (now - tokens)
                tokens = now
        return times


async def _decode_step(server: Server, batch: int, prompt: int, plan: Plan) -> float:
    """Seconds between tokens while all of `batch` requests run."""
    runs = await asyncio.gather(*(server.arrivals(prompt, plan.steps) for _ in range(batch)))
    last_start = max(times[0] for times in runs)
    first_end = min(times[-1] for times in runs)
    gaps = [
        after - before
        for times in runs
        for before, after in zip(times[_FIRST_GAP:], times[_FIRST_GAP + 1 :], strict=False)
        if before >= last_start and after <= first_end
    ]
    if not gaps:
        raise ValueError(f"{batch} requests never ran together; measure smaller --batches")
    return plan.typical(gaps)


async def _first_token(server: Server, prompt: int, plan: Plan) -> float:
    return plan.typical([(await server.arrivals(prompt, 1))[0] for _ in range(plan.repeats)])


async def _measure_level(
    server: Server, level: int, plan: Plan, lower_s: float, restore_s: float, results_late: bool
) -> tuple[LevelProfile, float, int]:
    """The level, the overhead outside the scheduler seen at it, and the KV pages that exist."""
    status = await server.go_to(level)
    capacity = status["monitor"]["latest"]["capacity_pages"]
    base = status["monitor"]["latest"]["base_pages"]
    room = capacity * 0.8
    batches = [n for n in plan.batches if n * (_SHORT_PROMPT + plan.steps) <= room]
    decode = [await _decode_step(server, n, _SHORT_PROMPT, plan) for n in batches]
    context = min(plan.prefill[-1], int(room / 4) - plan.steps)
    long_step = await _decode_step(server, 4, context, plan)
    short_step = Curve([float(n) for n in batches], decode).at(4)
    sizes = [n for n in plan.prefill if n <= room]
    first = [await _first_token(server, n, plan) for n in sizes]
    # A prefill of few tokens and a decode step of one request are the same work.
    late = decode[0] if results_late else 0.0
    overhead = max(0.0, await _first_token(server, 2, plan) - decode[0] - late)
    seconds = [max(decode[0], value - overhead - late) for value in first]
    profile = LevelProfile(
        name=f"level {level}",
        lent_pages=capacity - base,
        prefill=Curve([float(n) for n in sizes], seconds),
        decode=Curve([float(n) for n in batches], decode),
        decode_context_s=max(0.0, (long_step - short_step) / (4 * (context - _SHORT_PROMPT))),
        lower_s=lower_s,
        restore_s=restore_s,
    )
    print(f"level {level}: {capacity} pages, decode {dict(zip(batches, decode, strict=True))}")
    return profile, overhead, base


def _durations(status: dict[str, Any], phases: tuple[str, ...]) -> float:
    """Seconds of the last transition's `phases`, from the status's events."""
    rows = [e for e in status["events"] if e["kind"] == "transition" and e["phase"] in phases]
    return float(rows[-1]["duration_s"])


async def _transition_times(server: Server, top: int) -> tuple[list[float], list[float]]:
    """Seconds from level 0 to each level, and back."""
    lower, restore = [0.0], [0.0]
    for level in range(1, top + 1):
        lower.append(_durations(await server.go_to(level), ("lower",)))
        restore.append(_durations(await server.go_to(0), ("restore",)))
    return _rising(lower), _rising(restore)


def _rising(values: list[float]) -> list[float]:
    """Noise must not make a further level look nearer."""
    return [max(values[: index + 1]) for index in range(len(values))]


async def measure(url: str, plan: Plan, name: str, hardware: str) -> ServerProfile:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        info, model = await _about(session)
        late = info.get("device") == "cpu" and not info.get("disable_overlap_schedule")
        server = Server(session, vocabulary=30_000)
        top = (await server.get("/morph/status"))["policy"]["max_level"]
        await server.go_to(0)
        lower, restore = await _transition_times(server, top)
        found = [
            await _measure_level(server, level, plan, lower[level], restore[level], late)
            for level in range(top + 1)
        ]
        await server.go_to(0)
    return ServerProfile(
        schema_version=SCHEMA_VERSION,
        name=name,
        source=f"benchmarks/measure_profile.py over HTTP, {plan.percentile:g}th percentiles of "
        "the times of streamed tokens",
        hardware=hardware,
        model=model,
        base_pages=found[0][2],
        max_running=int(info.get("max_running_requests") or 64),
        chunk_tokens=max(1, int(info.get("chunked_prefill_size") or 8192)),
        request_overhead_s=statistics.median(overhead for _, overhead, _ in found),
        levels=[level for level, _, _ in found],
        results_late=late,
    )


async def _about(session: aiohttp.ClientSession) -> tuple[dict[str, Any], str]:
    """The server's own account of itself, and its model's name."""
    async with session.get("/get_server_info") as response:
        response.raise_for_status()
        info: dict[str, Any] = await response.json()
    states = info.get("internal_states") or [{}]
    running = states[0].get("effective_max_running_requests_per_dp")
    return {**info, "max_running_requests": info.get("max_running_requests") or running}, Path(
        str(info.get("model_path", "unknown"))
    ).name


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--out", type=Path, required=True, help="the profile, a JSON file")
    parser.add_argument("--name", default="measured")
    parser.add_argument("--hardware", default=platform.processor() or platform.machine())
    parser.add_argument("--prefill", type=_numbers, default=(16, 64, 256, 768), help="tokens")
    parser.add_argument("--batches", type=_numbers, default=(1, 2, 4, 8, 16, 32), help="requests")
    parser.add_argument("--steps", type=int, default=32, help="tokens of each decode request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--percentile", type=float, default=50.0, help="below 50 if others run")
    arguments = parser.parse_args()
    plan = Plan(
        arguments.prefill,
        arguments.batches,
        arguments.steps,
        arguments.repeats,
        arguments.percentile,
    )
    profile = asyncio.run(measure(arguments.url, plan, arguments.name, arguments.hardware))
    profile.save(arguments.out)
    print(f"Wrote {arguments.out}")


if __name__ == "__main__":
    main()
