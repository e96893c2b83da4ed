"""Servers side by side on one machine, and what one batch of equal requests measures on them."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from sglang_morph.bench.ending import end_on_sigterm
from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.replay import replay, run_loop
from sglang_morph.bench.routes import make_route
from sglang_morph.bench.workload import Workload, steady_workload
from sglang_morph.demo.server import ServerFailed, ServerProcess

START_TIMEOUT_S = 240.0
DRAIN_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Equal requests sent at once. Seconds."""

    outcomes: list[Outcome]
    started: float
    """UNIX seconds of time 0."""
    duration_s: float

    @property
    def output_tokens_per_s(self) -> float:
        return sum(o.output_tokens for o in self.outcomes) / self.duration_s

    @property
    def median_gap_s(self) -> float:
        """P50 of the time between two tokens of a request, first tokens left out."""
        return statistics.median(gap for o in self.outcomes for gap in o.gaps_s)

    @property
    def failed(self) -> int:
        return sum(not o.ok for o in self.outcomes)


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers requests."""

    url: str
    ready_s: float
    """From the start of all servers to its first answer."""


def server_arguments(description: str, backend_help: str, out: str) -> argparse.ArgumentParser:
    """What every benchmark of elastic servers asks for; results go to `out` by default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--flags", default="", help="flags of all servers")
    parser.add_argument("--morph-flags", default="", help="more flags of ours")
    parser.add_argument(
        "--backend",
        choices=("layer_swap", "semi_unified"),
        action="append",
        help=f"{backend_help} (default layer_swap)",
    )
    parser.add_argument(
        "--time-budget", type=float, default=3600.0, help="begin no part after so many s"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results") / out)
    return parser


def elastic_command(arguments: argparse.Namespace, backend: str) -> str:
    """Of a server with `backend` whose level the benchmark sets."""
    return (
        f"python -m sglang_morph.launch_server --model-path {arguments.model} {arguments.flags} "
        f"--memory-backend {backend} --morph-policy manual {arguments.morph_flags}"
    )


@contextmanager
def serving(commands: Mapping[str, str], logs: Path) -> Iterator[dict[str, Served]]:
    """Start all `commands` (`python -m ...`) at once; by name, those that became ready.

    Says of the others why they didn't. Raises `ServerFailed` where none did. SIGTERM ends this
    process as Ctrl-C does, so that no server outlives it.
    """
    end_on_sigterm()
    with ExitStack() as stack:
        began = time.monotonic()
        servers = {
            name: stack.enter_context(
                ServerProcess([sys.executable, *shlex.split(command)[1:]], {}, logs / f"{name}.log")
            )
            for name, command in commands.items()
        }

        def ready_after(server: ServerProcess) -> float | ServerFailed:
            try:
                server.wait_ready(START_TIMEOUT_S, lambda passed: None)
            except ServerFailed as error:
                server.stop()
                return error
            return time.monotonic() - began

        with ThreadPoolExecutor(len(servers)) as pool:
            waits = dict(zip(servers, pool.map(ready_after, servers.values()), strict=True))
        served = {}
        for name, wait in waits.items():
            if isinstance(wait, ServerFailed):
                print(f"{name} did not start: {wait}", flush=True)
            else:
                print(f"{name} is ready after {wait:.0f} s", flush=True)
                served[name] = Served(servers[name].url, wait)
        if not served:
            raise ServerFailed("no server became ready")
        yield served


def send(url: str, workload: Workload) -> Batch:
    """Send `workload` and wait for every answer."""
    done = run_loop(replay(url, make_route("sglang", "default"), workload, DRAIN_TIMEOUT_S))
    return Batch(done.outcomes, done.started, done.duration_s)


def equal_requests(number: int, inputs: int, outputs: int, seed: int) -> Workload:
    """`number` requests at once, token ids below 30,000 so that any vocabulary has them."""
    ids = [100 + (i * 7919) % 29_000 for i in range(20_000)]
    return steady_workload(
        f"{number} at once",
        ids,
        requests=number,
        rate=1e6,
        input_tokens=inputs,
        output_tokens=outputs,
        seed=seed,
    )


class Morphing:
    """A server's `/morph` routes."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120.0)

    def status(self) -> dict[str, Any]:
        return self._http.get("/morph/status").raise_for_status().json()

    def set_level(self, level: int) -> None:
        self._http.post("/morph/level", json={"level": level}).raise_for_status()

    def limit_uploads(self, gb_per_s: float | None) -> None:
        """10^9 bytes a second; None: no limit."""
        body = {"restore_gb_per_s": gb_per_s}
        self._http.post("/morph/limits", json=body).raise_for_status()

    def go_to(self, level: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """The status once the server rests at `level`."""
        self.set_level(level)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.status()
            if status["level"] == level and not status["restoring"]:
                return status
            time.sleep(0.01)
        raise TimeoutError(f"not at level {level}: {status['obstacle']}")

    def verify(self) -> dict[str, Any]:
        return self._http.post("/morph/verify").raise_for_status().json()


class Parts:
    """What a benchmark measures one after the other, each saved at once.

    A part that fails, or for which no time is left, is noted in `results["errors"]`.
    """

    def __init__(self, results: dict[str, Any], path: Path, budget_s: float) -> None:
        self._results = results
        self._path = path
        self._ends = time.monotonic() + budget_s

    def measure(self, where: dict[str, Any], name: str, measure: Callable[[], Any]) -> None:
        """Put what `measure` returns into `where[name]`, a part of `results`."""
        errors: list[str] = self._results["errors"]
        if time.monotonic() > self._ends:
            errors.append(f"{name}: no time was left")
        else:
            try:
                where[name] = measure()
            except Exception:
                errors.append(f"{name}: {traceback.format_exc()}")
                print(errors[-1], flush=True)
        save(self._results, self._path)


def save(results: dict[str, Any], path: Path) -> None:
    """As JSON, whole, so that what was measured before an interruption is there."""
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")
    scratch.replace(path)
