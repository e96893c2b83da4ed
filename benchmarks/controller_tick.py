"""Time of one controller tick, from the signals to the decision, beside a busy scheduler.

    python -m benchmarks.controller_tick [--record]

The scheduler here is what a tick reads of SGLang's: 1,000 running and 10,000 waiting requests in
lists, and some counters. Weights, pages and the event log have no part in it.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.acceptance import ACCEPTANCE, Row, upsert
from sglang_morph.controller.eviction_cost import EvictionCost, EvictionParameters
from sglang_morph.controller.limits import LimitGuard, Limits
from sglang_morph.controller.monitor import Monitor
from sglang_morph.controller.policy import Decision, Policy
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.queue_tokens import waiting_tokens
from sglang_morph.controller.registry import create_policy
from sglang_morph.controller.signals import Signals
from sglang_morph.demo.provenance import provenance

BAR_US = 50.0
RUNNING, WAITING = 1_000, 10_000
TOP_LEVEL = 7
LEVEL_PAGES = tuple(1_000_000 + 20_000 * level for level in range(TOP_LEVEL + 1))
ARMS = (
    PolicyOptions(),
    PolicyOptions(mode="performance"),
    PolicyOptions(policy="two_mode"),
    PolicyOptions(policy="slo"),
)
STEP_S = 0.01
"""Time between two ticks, as the policy sees it."""


@dataclass(slots=True)
class Request:
    """What a tick reads of a request."""

    origin_input_ids: range
    entered_s: float


@dataclass(slots=True)
class Scheduler:
    running: list[Request]
    waiting: list[Request]
    arrived_tokens: int = 0
    served_tokens: int = 0

    def advance(self, index: int, monitor: Monitor) -> None:
        """A step of load between two ticks: arrivals, service, two requests that end."""
        self.arrived_tokens += 900 + index % 200
        self.served_tokens += 1000
        for _ in range(2):
            monitor.request_finished(0.05 * (1 + index % 40), 0.01 * (1 + index % 7))


def tick(
    scheduler: Scheduler,
    monitor: Monitor,
    policy: Policy,
    eviction: EvictionCost,
    limits: LimitGuard,
    now: float,
    used: int,
) -> None:
    """What `Controller.tick` does before it acts, with a cache whose pages are about to go."""
    signals = Signals(
        now=now,
        base_pages=1_000_000,
        capacity_pages=1_000_000,
        free_pages=0,
        evictable_pages=1_000_000 - used,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        oldest_wait_s=now - scheduler.waiting[0].entered_s,
        admission_blocked=True,
        level=0,
        level_pages=LEVEL_PAGES,
        waiting_tokens=waiting_tokens(scheduler.waiting, lambda r: len(r.origin_input_ids)),
        arrived_tokens_total=scheduler.arrived_tokens,
        served_tokens_total=scheduler.served_tokens,
        ttft_s=monitor.ttft_s,
        tpot_s=monitor.tpot_s,
    )
    monitor.observe(signals)
    decision = policy.observe(signals)
    verdict = eviction.weigh(signals, policy.max_level)
    if decision is None and verdict is not None and verdict.morph:
        decision = Decision(verdict.level, verdict.reason)
    limits.bound(decision, signals.level, now)


def measure(options: PolicyOptions, ticks: int) -> list[float]:
    """Microseconds of each tick, of the thread's CPU time: other processes do not count."""
    requests = [Request(range(100 + i % 900), 0.0) for i in range(RUNNING + WAITING)]
    scheduler = Scheduler(requests[:RUNNING], requests[RUNNING:])
    monitor, policy = Monitor(), create_policy(options, top_level=TOP_LEVEL)
    eviction, limits = EvictionCost(EvictionParameters(), 8192), LimitGuard(TOP_LEVEL)
    limits.limits = Limits(highest_level=5, max_transitions_per_minute=6)
    times = []
    gc.collect()
    for index in range(ticks):
        scheduler.advance(index, monitor)
        eviction.reuse.finished(900, 100)
        used = 840_000 + index % 20_000  # about the default threshold
        now = index * STEP_S
        began = time.thread_time_ns()
        tick(scheduler, monitor, policy, eviction, limits, now, used)
        times.append((time.thread_time_ns() - began) / 1e3)
    return times


def report(arms: Sequence[PolicyOptions], ticks: int) -> float:
    """Print every arm's times; the mean of the slowest."""
    print(f"{RUNNING:,} running and {WAITING:,} waiting requests, {ticks:,} ticks each")
    means = []
    for options in arms:
        times = sorted(measure(options, ticks))
        means.append(statistics.fmean(times))
        name = options.policy + (f" ({options.mode})" if options.policy == "threshold" else "")
        print(
            f"{name:24} mean {means[-1]:6.1f} us, median {statistics.median(times):6.1f}, "
            f"P99 {times[int(0.99 * len(times))]:6.1f}"
        )
    return max(means)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ticks", type=int, default=20_000)
    parser.add_argument("--record", action="store_true", help="write the number to acceptance.json")
    arguments = parser.parse_args()
    slowest = report(ARMS, arguments.ticks)
    holds = slowest < BAR_US
    if arguments.record:
        command = shlex.join(["python", "-m", "benchmarks.controller_tick", *sys.argv[1:]])
        row = Row(
            name="controller.tick_us",
            value=round(slowest, 1),
            unit="us",
            bar=f"< {BAR_US:g}",
            holds=holds,
            **asdict(provenance(command)),
        )
        upsert([row], ACCEPTANCE)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
