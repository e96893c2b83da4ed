"""A queueing simulation of the server: SGLang's scheduling over measured service rates.

What is modelled: continuous batching with prefill first, chunked prefill, admission with SGLang's
reserve for the growth of running requests (`new_token_ratio`) and its sticky "batch is full",
retraction of the requests with the fewest output tokens, pages lent per level, downshifts that
stand still, restores that wait until what is in use fits and then take time out of each step,
emergencies, and the retry after a deferred restore. A page holds one token.

What is not: a prefix cache (traces carry no text), aborts, failures of a transition, and the
variation of step times around their median.

Between two events every decode step is the same, so they are taken together; a request knows the
number of the step at which it ends. An hour of trace takes seconds. Nothing is random.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from sglang_morph.bench.traces import TraceRequest
from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.monitor import Monitor
from sglang_morph.controller.policy import Decision, Policy
from sglang_morph.controller.signals import Signals
from sglang_morph.policy_cli.profile import ServerProfile

DEFAULT_TICK_S = 0.005
"""Shorter than a step, so that the policy looks once a step, as in the server: a condition that
flickers from step to step looks steadier where it is looked at less often."""
IDLE_TICK_S = 1.0
"""At level 0 with nothing to do, where a tick can only let time pass."""
LONGEST_REST_S = 120.0
"""A policy that has not returned an idle server to level 0 after this time will not."""
RETRY_S = 0.25
RESTORE_BUDGET_S = 0.01
"""Time a scheduler step spends on bringing layers back."""

RATIO_START, RATIO_FLOOR, RATIO_DECAY_STEPS = 0.7, 0.7 * 0.14, 600
"""Share of the tokens a running request may still generate that admission keeps free for it."""
RATIO_RETRACTION_STEPS = 20
LONGEST_RESERVE = 4096
"""Tokens per request that admission counts at most."""


@dataclass(frozen=True, slots=True)
class Transition:
    at_s: float
    source: int
    target: int
    reason: str
    emergency: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """The state at one tick, for the plot."""

    at_s: float
    used: int
    capacity: int
    waiting: int
    running: int
    level: int


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered. Seconds."""

    at_s: float
    ttft_s: float
    tpot_s: float | None
    """None for a single output token."""
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """What came of a simulation."""

    offered: int
    served: list[Served] = field(default_factory=list)
    rejected: int = 0
    """Requests longer than the base pages."""
    aborted: int = 0
    """Requests that did not fit although they ran alone."""
    retractions: int = 0
    retractions_avoided: int = 0
    transitions: list[Transition] = field(default_factory=list)
    deferred: int = 0
    """Restores that could not start when they were wanted."""
    seconds_at_level: dict[int, float] = field(default_factory=dict)
    tokens: int = 0
    """Prompt and output tokens computed, those computed again included."""
    lowered_tokens: int = 0
    """Those of them below full precision."""
    duration_s: float = 0.0
    ticks: int = 0
    timeline: list[Point] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Request:
    at_s: float
    prompt: int
    output: int
    generated: int = 0
    first_token_s: float = -1.0
    """When it is computed."""
    late_s: float = 0.0
    """How much later it is handed out."""
    joined_step: int = 0
    """Step number at which it joined the decode batch; it has `generated` tokens from before."""
    held: int = 0
    """Pages when it joined (or so far, while its prefill is not done)."""

    @property
    def to_prefill(self) -> int:
        """Tokens: after a retraction the generated ones are computed again too."""
        return self.prompt + self.generated

    @property
    def remaining(self) -> int:
        return self.output - self.generated


class Simulation:
    """One server, one policy, one trace. Run once."""

    def __init__(
        self,
        profile: ServerProfile,
        policy: Policy,
        requests: Sequence[TraceRequest],
        *,
        level: int = 0,
        tick_s: float = DEFAULT_TICK_S,
        percentile: float = 95.0,
        record_s: float = inf,
    ) -> None:
        """`requests` in order of arrival; `level` is the one it starts at.

        `record_s` is the shortest time between two points of the outcome's timeline.
        """
        self._profile = profile
        self._level_pages = tuple(profile.capacity(k) for k in range(profile.top_level + 1))
        self._policy = policy
        self._tick_s = tick_s
        self._record_s = record_s
        self._next_record = 0.0 if record_s < inf else inf
        self.monitor = Monitor(percentile=percentile)
        self.now = 0.0
        self._arrivals = deque(requests)
        self._waiting: deque[_Request] = deque()
        self._chunked: _Request | None = None
        """The request whose prefill is not complete."""
        self._held_back: list[_Request] = []
        """Those whose first token is computed and not handed out."""
        self._running: dict[int, _Request] = {}
        self._ends: list[tuple[int, int]] = []
        """(step number at which it ends, key in `_running`); a retracted one's entry is stale."""
        self._keys = count()
        self._steps = 0
        self._end_steps = 0
        """Sum of the ends of all running requests."""
        self._used = 0
        self._is_full = False
        self._ratio = RATIO_START
        self.level = level
        self._target = level
        self._restore_left_s = 0.0
        self._restore_reason = ""
        self._retry_at = -inf
        self._next_tick = 0.0
        self._last_busy = 0.0
        self._waiting_tokens = 0
        self._arrived_tokens = 0
        self._served_tokens = 0
        self.outcome = Outcome(offered=len(requests))
        steps = range(profile.max_running + 1)
        self._decode_s = [[lvl.decode.at(n) for n in steps] for lvl in profile.levels]

    # Pages

    @property
    def capacity(self) -> int:
        """Pages that exist: a restore takes its pages back when it begins."""
        return self._profile.capacity(self._target)

    @property
    def used(self) -> int:
        return self._used

    @property
    def held(self) -> int:
        """Pages by request, added up; must equal `used`."""
        running = sum(r.held + self._steps - r.joined_step for r in self._running.values())
        return running + (0 if self._chunked is None else self._chunked.held)

    @property
    def in_flight(self) -> int:
        """Requests that arrived and are neither answered nor given up."""
        return len(self._waiting) + len(self._running) + (self._chunked is not None)

    def run(self) -> Outcome:
        """Until every request is answered and the policy is at rest."""
        while self.advance():
            pass
        self.outcome.duration_s = self.now
        self.outcome.seconds_at_level = {
            level: self.monitor.seconds_at_level(level)
            for level in range(self._profile.top_level + 1)
        }
        return self.outcome

    def advance(self) -> bool:
        """To the next event; False once nothing is left to do."""
        self._take_arrivals()
        if self.now >= self._next_tick or self._restoring:
            self._tick()
        if self._prefill() or self._decode():
            return True
        return self._idle()

    # Time

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0].at_s <= self.now:
            self._receive(self._arrivals.popleft())

    def _receive(self, arrival: TraceRequest) -> None:
        # Admission wants one page more than the request will hold, and one must stay free.
        longest = self._profile.base_pages - 2
        if arrival.input_tokens >= longest:
            self.outcome.rejected += 1
            return
        output = min(arrival.output_tokens, longest - arrival.input_tokens)
        self._waiting.append(_Request(arrival.at_s, arrival.input_tokens, output))
        self._waiting_tokens += arrival.input_tokens
        self._arrived_tokens += arrival.input_tokens

    def _idle(self) -> bool:
        """Nothing runs: to the next arrival or tick; False if neither can change anything."""
        if self._waiting:
            self._is_full = False  # as SGLang does once its batch is empty
            return True
        if self._restoring:
            return True
        if not self._arrivals and (self.level == 0 or self._is_settled):
            return False
        tick = self._next_tick if self.level else self.now + IDLE_TICK_S
        self.now = max(self.now, min(tick, self._arrivals[0].at_s if self._arrivals else inf))
        return True

    @property
    def _is_settled(self) -> bool:
        """Nothing more will happen, although precision is not full."""
        fixed = isinstance(self._policy, ManualPolicy)
        return fixed or self.now - self._last_busy > LONGEST_REST_S

    # Control: as the controller and the executor do it

    @property
    def _restoring(self) -> bool:
        return self._target != self.level

    def _signals(self) -> Signals:
        return Signals(
            now=self.now,
            base_pages=self._profile.base_pages,
            capacity_pages=self.capacity,
            free_pages=self.capacity - self._used,
            evictable_pages=0,
            running=len(self._running),
            waiting=len(self._waiting),
            oldest_wait_s=self.now - self._waiting[0].at_s if self._waiting else 0.0,
            admission_blocked=bool(self._waiting) and self._is_full,
            level=self.level,
            level_pages=self._level_pages,
            waiting_tokens=self._waiting_tokens,
            arrived_tokens_total=self._arrived_tokens,
            served_tokens_total=self._served_tokens,
            retractions_total=self.outcome.retractions,
            ttft_s=self.monitor.ttft_s,
            tpot_s=self.monitor.tpot_s,
        )

    def _tick(self) -> None:
        signals = self._signals()
        self.monitor.observe(signals)
        self.outcome.ticks += 1
        if self.now >= self._next_record:
            self._record(signals)
        decision = self._policy.observe(signals)
        self._next_tick = self.now + self._tick_s
        if self._restoring:
            self._continue_restore()
        elif decision is not None and self.now >= self._retry_at:
            self._carry_out(decision)

    def _record(self, signals: Signals) -> None:
        self._next_record = self.now + self._record_s
        self.outcome.timeline.append(
            Point(
                self.now,
                self._used,
                signals.capacity_pages,
                signals.waiting,
                signals.running,
                self.level,
            )
        )

    def _carry_out(self, decision: Decision) -> None:
        if decision.target > self.level:
            self._lower(decision.target, decision.reason)
        elif self._used + self._growth_reserve() > self._profile.capacity(decision.target):
            self.outcome.deferred += 1
            self._retry_at = self.now + RETRY_S
        else:
            levels = self._profile.levels
            self._target = decision.target
            self._restore_left_s = levels[self.level].restore_s - levels[self._target].restore_s
            self._restore_reason = decision.reason
            self._continue_restore()

    def _lower(self, target: int, reason: str, emergency: bool = False) -> None:
        """Also in the middle of a restore, which then is void."""
        levels, source = self._profile.levels, self.level
        if target > source:
            self.now += levels[target].lower_s - levels[source].lower_s
        self.level = self._target = max(target, source)
        self._is_full = False
        if self.level != source:
            self.outcome.transitions.append(
                Transition(self.now, source, self.level, reason, emergency)
            )
        self._policy.moved(self.now, self.level)

    def _continue_restore(self) -> None:
        step = min(self._restore_left_s, RESTORE_BUDGET_S)
        self.now += step
        self._restore_left_s -= step
        if self._restore_left_s > 1e-9:
            return
        source, self.level = self.level, self._target
        self.outcome.transitions.append(
            Transition(self.now, source, self.level, self._restore_reason)
        )
        self._policy.moved(self.now, self.level)

    def _growth_reserve(self) -> int:
        chunked = self._chunked
        unread = 0 if chunked is None else chunked.to_prefill - chunked.held
        return int(self._growth() * self._ratio) + len(self._running) + unread

    def _growth(self) -> int:
        """Tokens the running requests will still generate."""
        return self._end_steps - self._steps * len(self._running)

    def _relieve(self, missing: int) -> bool:
        """Go up just far enough for `missing` more pages, if the policy lets precision fall."""
        if not self._policy.relieves:
            return False
        for level in range(self._target + 1, self._policy.max_level + 1):
            if self._profile.capacity(level) - self.capacity >= missing:
                self._lower(level, f"the next decode step lacks {missing} pages", emergency=True)
                self.outcome.retractions_avoided += 1
                return True
        return False

    # Prefill

    def _prefill(self) -> bool:
        """One prefill batch, if a request can be admitted or goes on; whether there was one."""
        if self._chunked is None and (self._is_full or not self._waiting):
            return False
        batch, tokens = self._admit()
        if not tokens:
            return False
        self._last_busy = self.now
        level = self.level
        step_s = self._profile.levels[level].prefill.at(tokens)
        self._hand_out(step_s)
        self.now += step_s
        self._count_tokens(tokens, level)
        for request in batch:
            self._end_prefill(request)
        return True

    def _admit(self) -> tuple[list[_Request], int]:
        """Requests whose prefill will be complete, and the tokens of the batch."""
        chunk = self._profile.chunk_tokens
        room = self.capacity - self._used - self._growth() * self._ratio
        done: list[_Request] = []
        total = 0
        if self._chunked is not None:
            request = self._chunked
            total = self._extend(request, min(chunk, self.capacity - self._used))
            room -= total + min(request.remaining, LONGEST_RESERVE) + 1
            if request.held < request.to_prefill:
                return done, total
            self._chunked = None
            done.append(request)
        while self._waiting and total < chunk:
            if len(self._running) + len(done) >= self._profile.max_running:
                self._is_full = True
                break
            request = self._waiting[0]
            wanted = request.to_prefill + min(request.remaining, LONGEST_RESERVE) + 1
            if wanted >= room:
                self._is_full = True
                break
            self._waiting.popleft()
            self._waiting_tokens -= request.to_prefill
            self._served_tokens += request.prompt if request.generated == 0 else 0
            room -= wanted
            total += self._extend(request, chunk - total)
            if request.held < request.to_prefill:
                self._chunked = request
                break
            done.append(request)
        return done, total

    def _extend(self, request: _Request, limit: int) -> int:
        """Give `request` pages for at most `limit` more tokens of its prefill; how many."""
        tokens = min(limit, request.to_prefill - request.held)
        request.held += tokens
        self._used += tokens
        return tokens

    def _end_prefill(self, request: _Request) -> None:
        """The prefill gives the next token, whose page the next decode step takes."""
        request.generated += 1
        if request.first_token_s < 0:
            request.first_token_s = self.now
            if self._profile.results_late:
                self._held_back.append(request)
        if request.remaining == 0:
            self._used -= request.held
            self._answer(request)
            return
        key = next(self._keys)
        request.joined_step = self._steps
        end = self._steps + request.remaining
        self._running[key] = request
        self._end_steps += end
        heapq.heappush(self._ends, (end, key))

    def _hand_out(self, step_s: float) -> None:
        """The first tokens that wait for a step to be done, of one that takes `step_s` from now."""
        for request in self._held_back:
            request.late_s = step_s
        self._held_back.clear()

    # Decode

    def _decode(self) -> bool:
        """As many decode steps as pass without an event; whether there were any."""
        size = len(self._running)
        if not size:
            return False
        self._last_busy = self.now
        if self.capacity - self._used < size and not self._make_room():
            return True
        size, level = len(self._running), self.level
        profile = self._profile.levels[level]
        step_s = self._decode_s[level][size] + profile.decode_context_s * self._used
        steps = self._steps_until_event(size, step_s)
        self._hand_out(step_s)
        self.now += steps * step_s
        self._steps += steps
        self._used += steps * size
        self._ratio = max(
            RATIO_FLOOR, self._ratio - steps * (RATIO_START - RATIO_FLOOR) / RATIO_DECAY_STEPS
        )
        self._count_tokens(steps * size, level)
        self._end_requests()
        return True

    def _steps_until_event(self, size: int, step_s: float) -> int:
        self._drop_stale_ends()
        until_end = self._ends[0][0] - self._steps
        until_full = (self.capacity - self._used) // size
        if self._restoring:
            return 1  # every step brings some layers back
        limit = self._next_tick
        if self._arrivals and not self._is_full:
            limit = min(limit, self._arrivals[0].at_s)
        until_time = int(max(0.0, limit - self.now) / step_s) + 1
        return max(1, min(until_end, until_full, until_time))

    def _make_room(self) -> bool:
        """For one decode step, by lending or else by retracting; whether anyone is left to run."""
        missing = len(self._running) - (self.capacity - self._used)
        if self._relieve(missing):
            return True
        while len(self._running) > 1:
            self._retract()
            if self.capacity - self._used >= len(self._running):
                break
        if self.capacity - self._used < len(self._running):
            self._abort_last()
        self._ratio = self._ratio_after_retraction()
        self._is_full = False
        return bool(self._running)

    def _retract(self) -> None:
        """The request with fewest output tokens, of those the one with the longest prompt."""
        key = min(self._running, key=lambda k: self._output_order(self._running[k]))
        request = self._leave(key)
        self._waiting.append(request)
        self._waiting_tokens += request.to_prefill
        self.outcome.retractions += 1

    def _output_order(self, request: _Request) -> tuple[int, int]:
        return request.generated - request.joined_step, -request.prompt

    def _abort_last(self) -> None:
        self._leave(next(iter(self._running)))
        self.outcome.aborted += 1

    def _leave(self, key: int) -> _Request:
        """Take a running request out before its end; its pages are free."""
        request = self._running.pop(key)
        self._end_steps -= request.joined_step + request.remaining
        decoded = self._steps - request.joined_step
        self._used -= request.held + decoded
        request.generated += decoded
        request.held = 0
        return request

    def _ratio_after_retraction(self) -> float:
        running = self._running.values()
        decoded = sum(r.generated + self._steps - r.joined_step for r in running)
        wanted = sum(r.output for r in running)
        return min(1.0, (decoded + RATIO_RETRACTION_STEPS * len(running)) / (wanted + 1))

    def _drop_stale_ends(self) -> None:
        while self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)

    def _end_requests(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps:
            end, key = heapq.heappop(self._ends)
            request = self._running.pop(key, None)
            if request is None:
                continue
            self._end_steps -= end
            self._used -= request.held + end - request.joined_step
            self._answer(request)

    def _answer(self, request: _Request) -> None:
        self._is_full = False
        first_s = request.first_token_s + request.late_s
        ttft = first_s - request.at_s + self._profile.request_overhead_s
        tpot = None
        if request.output > 1:
            tpot = (self.now - request.first_token_s) / (request.output - 1)
        self.monitor.request_finished(ttft, tpot)
        self.outcome.served.append(Served(request.at_s, ttft, tpot, request.output))

    def _count_tokens(self, tokens: int, level: int) -> None:
        self.outcome.tokens += tokens
        if level:
            self.outcome.lowered_tokens += tokens
