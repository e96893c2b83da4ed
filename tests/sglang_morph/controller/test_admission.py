"""Admission over a queue like SGLang's: promises are kept, nobody starves, nothing is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_morph.controller.admission import Admission
from sglang_morph.controller.floors import Floors
from sglang_morph.controller.needs import Needs
from sglang_morph.controller.policy import Decision
from sglang_morph.options import FLOOR_POLICIES

LEVELS = [["full", "full"], ["int8", "full"], ["int8", "int8"], ["int4", "int8"]]
FLOOR_OF = {"full": 0, "fp8": 2, "int8": 2, "int4": 3}
TOP = len(LEVELS) - 1
ROOM = (2, 3, 4, 6)
"""Requests that fit at each level."""
PAGES = (20, 30, 40, 60)


class Req(SimpleNamespace):
    """A request that runs for `steps` steps once it is admitted."""

    numbers = count()

    def __init__(self, wanted: str | None = None, steps: int = 3, tokens: int = 1) -> None:
        custom = None if wanted is None else {"morph": {"min_precision": wanted}}
        super().__init__(
            rid=str(next(self.numbers)),
            sampling_params=SimpleNamespace(custom_params=custom, max_new_tokens=1),
            origin_input_ids=range(tokens),
            to_finish=None,
            retracted_stain=False,
            time_stats=SimpleNamespace(trace_ctx=SimpleNamespace(abort=lambda **_: None)),
            steps=steps,
        )
        self.allows = TOP if wanted is None else FLOOR_OF[wanted]
        self.needs = next(k for k, pages in enumerate(PAGES) if pages >= tokens + 3)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


@dataclass
class Scheduler:
    """The parts of SGLang's loop, and of the controller's, that meet in admission."""

    policy: str
    level: int = 0
    may_return: bool = True
    may_lower: bool = True
    waiting_queue: list[Req] = field(default_factory=list)
    running: list[Req] = field(default_factory=list)
    sent: list[AbortReq] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.floors, self.needs = Floors(TOP), Needs(PAGES)
        to_tokenizer = SimpleNamespace(send_output=lambda output, req: self.sent.append(output))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=to_tokenizer)
        self.admission = Admission(
            self.policy,
            self.floors,
            self.needs,
            self,
            LEVELS,
            self,
            may_return=lambda level: self.may_return,
            may_lower=lambda level: self.may_lower,
            note=lambda result, wanted, floor: self.notes.append(result),
        )

    @property
    def target_level(self) -> int:
        return self.level

    def queue(self, req: Req) -> None:
        self.waiting_queue.append(req)
        self.admission.queued(req)

    def step(self, wanted: int, finish: bool = True) -> None:
        """`wanted`: the level the policy decides on."""
        self.admission.begin_step()
        decision = Decision(wanted, "pressure") if wanted != self.level else None
        decision, _ = self.floors.bound(decision, self.level)
        highest = self.floors.running if self.may_lower else self.level
        decision, _ = self.needs.bound(decision, self.level, highest)
        assert self.floors.permit(decision, self.level)
        if not self.needs.permit(decision, self.level):
            decision = None
        if decision and (decision.target > self.level or self.fits(decision.target)):
            self.level = decision.target
        self.plan()
        self.check()
        if finish:
            for req in self.running:
                req.steps -= 1
            for req in [req for req in self.running if req.steps <= 0]:
                self.leave(req)
        self.check()

    def fits(self, level: int) -> bool:
        return len(self.running) <= ROOM[level]

    def plan(self) -> None:
        adder = SimpleNamespace(can_run_list=[])
        for req in self.waiting_queue:
            if self.admission.admit(lambda r=req: self.add(adder, r), adder, req) != (
                AddReqResult.CONTINUE
            ):
                break
        self.waiting_queue = [r for r in self.waiting_queue if r not in adder.can_run_list]
        self.running += adder.can_run_list

    def add(self, adder: Any, req: Req) -> AddReqResult:
        if len(self.running) + len(adder.can_run_list) >= ROOM[self.level]:
            return AddReqResult.NO_TOKEN
        adder.can_run_list.append(req)
        return AddReqResult.CONTINUE

    def leave(self, req: Req, retracted: bool = False) -> None:
        self.running.remove(req)
        self.admission.released(req)
        self.admission.released(req)
        if retracted:
            req.retracted_stain = True
            self.queue(req)

    def check(self) -> None:
        assert self.needs.running_requests == sum(req.needs > 0 for req in self.running)
        assert all(self.level >= req.needs for req in self.running)
        demanding = [req for req in self.running if req.allows < TOP]
        if self.policy == "ignore":
            assert self.floors.running_requests == 0
            return
        assert self.floors.running_requests == len(demanding)
        assert all(self.level <= req.allows for req in demanding)


demands = st.sampled_from([None, None, "full", "fp8", "int8", "int4"])
ACTIONS = st.one_of(
    st.tuples(st.just("queue"), demands, st.integers(1, 4)),
    st.tuples(st.just("queue long"), demands, st.integers(1, PAGES[TOP] - 3)),
    st.tuples(st.just("step"), st.none(), st.integers(0, TOP)),
    st.tuples(st.just("step"), st.none(), st.integers(0, TOP)),
    st.tuples(st.sampled_from(["abort", "retract"]), st.none(), st.integers(0, 9)),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FLOOR_POLICIES), st.lists(ACTIONS, max_size=60))
def test_no_running_request_is_below_its_floor_and_all_requests_end(
    policy: str, actions: list[tuple[str, str | None, int]]
) -> None:
    scheduler = Scheduler(policy)
    for action, wanted, number in actions:
        if action == "queue":
            scheduler.queue(Req(wanted, number))
        elif action == "queue long":
            req = Req(wanted, tokens=number)
            if policy == "ignore" or req.needs <= req.allows:  # others are refused as they arrive
                scheduler.queue(req)
        elif action == "step":
            scheduler.step(number)
        elif action == "abort" and scheduler.waiting_queue:
            scheduler.waiting_queue.pop(number % len(scheduler.waiting_queue))
        elif action == "retract" and scheduler.running:
            scheduler.leave(scheduler.running[number % len(scheduler.running)], retracted=True)
    for _ in range(500):  # pressure without end
        scheduler.step(TOP)
    assert not scheduler.waiting_queue and not scheduler.running
    assert scheduler.floors.running_requests == scheduler.needs.running == 0
    assert scheduler.floors.ceiling == TOP
    assert scheduler.level == TOP


@pytest.mark.parametrize("wanted", ["full", "int8"])
def test_a_demand_is_met_although_others_keep_coming(wanted: str) -> None:
    scheduler = Scheduler("hold", level=TOP)
    for number in range(10):
        scheduler.queue(Req(steps=3 + number))  # they end one by one
    demanding = Req(wanted)
    scheduler.queue(demanding)
    steps = 0
    while demanding in scheduler.waiting_queue:
        scheduler.queue(Req(steps=9))
        scheduler.step(TOP)
        steps += 1
        assert steps < 30
    assert scheduler.notes == ["held"]


def test_memory_is_not_lent_for_a_request_that_lacks_room_at_its_own_level() -> None:
    scheduler = Scheduler("hold")
    for _ in range(ROOM[0]):
        scheduler.queue(Req(steps=5))
    scheduler.queue(Req("full"))
    scheduler.step(0)
    scheduler.step(TOP)
    assert scheduler.level == 0
    assert scheduler.notes == []


def test_a_demand_that_the_operator_keeps_waiting_holds_up_nobody_else() -> None:
    scheduler = Scheduler("hold", level=TOP, may_return=False)
    demanding, other = Req("full"), Req()
    scheduler.queue(demanding)
    scheduler.queue(other)
    scheduler.plan()
    assert scheduler.running == [other]
    assert scheduler.waiting_queue == [demanding]


def test_a_refusal_is_answered_and_says_what_would_do() -> None:
    scheduler = Scheduler("reject", level=3)
    refused, served = Req("int8"), Req("int4")
    scheduler.queue(refused)
    scheduler.queue(served)
    scheduler.step(3)
    assert scheduler.running == [served]
    (abort,) = scheduler.sent
    assert abort.rid == refused.rid
    assert abort.finished_reason["status_code"] == 503
    assert (
        "'int8' is not available now: the precision level is 3, at most 2 would do"
        in (abort.finished_reason["message"])
    )
    assert scheduler.notes == ["rejected"]


def test_a_retracted_request_is_not_refused() -> None:
    scheduler = Scheduler("reject")
    req = Req("full", steps=9)
    scheduler.queue(req)
    scheduler.step(0)
    scheduler.leave(req, retracted=True)
    scheduler.level = TOP
    scheduler.step(TOP)
    scheduler.step(TOP)
    assert req in scheduler.running
    assert scheduler.level == 0
    assert not scheduler.sent


def test_ignoring_counts_only_what_really_fell_below() -> None:
    scheduler = Scheduler("ignore", level=2)
    for wanted, lowest in (("full", 0), ("full", 2), ("int8", 2), (None, 3)):
        req = Req(wanted)
        scheduler.queue(req)
        scheduler.admission.ended(req, lowest)
    assert scheduler.notes == ["ignored"]


def test_a_request_that_is_refused_by_sglang_waits_for_nothing() -> None:
    scheduler = Scheduler("hold", level=TOP)
    req = Req("full")
    req.to_finish = "abort"
    scheduler.queue(req)
    scheduler.plan()
    assert scheduler.running == [req]
    assert scheduler.floors.running_requests == 0


def test_precision_falls_for_a_long_request_and_stays_low_until_it_ends() -> None:
    scheduler = Scheduler("hold")
    long, short = Req(tokens=35, steps=4), Req(steps=9)
    scheduler.queue(long)
    scheduler.queue(short)
    scheduler.step(0)
    assert scheduler.level == 0 and not scheduler.running, "nobody overtakes it"
    scheduler.step(0)
    assert scheduler.level == long.needs == 2 and scheduler.running == [long, short]
    for _ in range(3):
        assert scheduler.level == 2
        scheduler.step(0)
    assert long not in scheduler.running
    scheduler.step(0)
    assert scheduler.level == 0


def test_a_long_request_that_the_operator_keeps_waiting_holds_up_nobody_else() -> None:
    scheduler = Scheduler("hold", may_lower=False)
    long, short = Req(tokens=35), Req(steps=1)
    scheduler.queue(long)
    scheduler.queue(short)
    scheduler.step(0)
    assert scheduler.waiting_queue == [long] and not scheduler.running
    scheduler.may_lower = True
    for _ in range(2):
        scheduler.step(0)
    assert scheduler.running == [long]


def test_the_floor_of_a_request_is_known_before_it_is_queued() -> None:
    params = Req("int8").sampling_params
    assert Scheduler("hold").admission.floor_of(params) == FLOOR_OF["int8"]
    assert Scheduler("ignore").admission.floor_of(params) is None
    assert Scheduler("hold").admission.floor_of(Req("int4").sampling_params) is None
