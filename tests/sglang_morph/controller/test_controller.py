"""The controller over a small system: what it does to the scheduler around a transition."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from sglang_morph.controller.controller import Controller
from sglang_morph.controller.eviction_cost import FEWEST_REQUESTS
from sglang_morph.controller.limits import Limits
from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.policy import Policy
from sglang_morph.controller.threshold import ThresholdPolicy
from tests.sglang_morph.controller.small_controller import controller
from tests.sglang_morph.controller.small_system import SmallSystem


class NextStep:
    """A decode batch that needs `pages` more."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self.batch_is_full = True

    def new_tokens_required_next_decode(self) -> int:
        return self._pages


@pytest.fixture
def system() -> SmallSystem:
    return SmallSystem()


def test_a_decode_step_without_pages_lowers_precision_just_far_enough(
    system: SmallSystem,
) -> None:
    system.allocator.alloc(24)
    acting, batch = controller(system, ThresholdPolicy), NextStep(20)
    assert system.executor.gain(1) < 20 <= system.executor.gain(2)
    assert acting.relieve(batch)
    assert system.executor.level == 2
    assert system.allocator.available_size() >= 20
    assert batch.batch_is_full is False
    assert acting.monitor.emergencies == 1


def test_more_than_everything_is_not_relieved(system: SmallSystem) -> None:
    system.allocator.alloc(24)
    acting = controller(system, ThresholdPolicy)
    assert not acting.relieve(NextStep(10_000))
    assert system.executor.level == 0
    assert acting.monitor.emergencies == 0


def test_an_operators_level_is_not_changed_by_an_emergency(system: SmallSystem) -> None:
    system.allocator.alloc(24)
    assert not controller(system, ManualPolicy).relieve(NextStep(5))
    assert system.executor.level == 0


def test_lending_lets_waiting_requests_in(system: SmallSystem) -> None:
    acting = controller(system, ManualPolicy)
    acting._scheduler.running_batch.batch_is_full = True
    acting.policy.set_level(1)
    acting.tick()
    assert acting._scheduler.running_batch.batch_is_full is False
    assert acting.status()["level"] == 1


def test_a_deferred_restore_says_why_and_is_tried_again_later(system: SmallSystem) -> None:
    acting = controller(system, ManualPolicy)
    acting.policy.set_level(2)
    acting.tick()
    for token in range(3, 8):
        assert system.admit([token] * 10)
    acting.policy.set_level(0)
    acting.tick()
    assert "would not fit" in acting.status()["obstacle"]
    assert acting.monitor.transitions["deferred"] == 1
    acting.tick()  # too soon
    assert acting.monitor.transitions["deferred"] == 1
    for req in list(system.requests):
        system.finish(req, insert=True)
    acting.act_on_change()
    while system.executor.restoring:
        acting.tick()
    acting.tick()
    assert acting.status()["level"] == 0
    assert acting.status()["obstacle"] is None
    system.check()


def test_limits_bind_an_emergency(system: SmallSystem) -> None:
    system.allocator.alloc(24)
    acting = controller(system, ThresholdPolicy)
    acting.limits.limits = Limits(highest_level=1)
    assert not acting.relieve(NextStep(20))
    acting.limits.limits = Limits(hold=True)
    assert not acting.relieve(NextStep(1))
    assert "holds the level" in str(acting.obstacle)
    assert system.executor.level == 0
    acting.limits.limits = Limits(highest_level=1)
    assert acting.relieve(NextStep(1))
    assert system.executor.level == 1


def settle(acting: Controller) -> int:
    """The level once nothing is under way."""
    acting.act_on_change()
    while acting.executor.restoring:
        acting.tick()
    return acting.executor.level


def test_a_request_may_count_on_what_policy_and_limits_allow(system: SmallSystem) -> None:
    acting = controller(system, ThresholdPolicy)
    assert acting.reach == system.top_level and acting.may_lower_now(system.top_level)
    acting.limits.limits = Limits(highest_level=1)
    assert acting.reach == 1 and acting.may_lower_now(1) and not acting.may_lower_now(2)
    acting.limits.limits = Limits(hold=True)
    assert not acting.may_lower_now(1)
    by_hand = controller(system, ManualPolicy)
    assert by_hand.reach == system.executor.level == 0 and not by_hand.may_lower_now(1)


def test_precision_falls_for_a_long_request_and_nobody_takes_its_pages(
    system: SmallSystem,
) -> None:
    acting = controller(system, ThresholdPolicy)
    acting.needs.expect(2)
    assert settle(acting) == 2
    acting.needs.admit(2)
    acting.needs.expect(0)
    acting.limits.limits = Limits(highest_level=0)
    assert settle(acting) == 2
    assert "too long" in acting.status()["obstacle"]
    acting.needs.release(2)
    assert settle(acting) == 0


def test_a_long_request_waits_for_those_that_demand_precision(system: SmallSystem) -> None:
    acting = controller(system, ThresholdPolicy)
    acting.floors.admit(0)
    acting.needs.expect(1)
    assert settle(acting) == 0
    acting.floors.release(0)
    assert settle(acting) == 1


def prefixes_at_stake(system: SmallSystem, policy: type[Policy], reused: int) -> Controller:
    """18 of 24 pages in use, 5 cached, a prompt of 4 waits; so much of 1,000 tokens is reused."""
    req = system.admit([7] * 5)
    assert req is not None
    system.finish(req, insert=True)
    system.allocator.alloc(18)
    acting = controller(system, policy)
    for _ in range(FEWEST_REQUESTS):
        acting.counts.released(finished_request(reused), 0.0)
    waiting = SimpleNamespace(
        origin_input_ids=[1] * 4,
        output_ids=[],
        time_stats=SimpleNamespace(wait_queue_entry_time=time.perf_counter()),
    )
    acting._scheduler.waiting_queue.append(waiting)
    return acting


def finished_request(reused: int) -> SimpleNamespace:
    """What is read of a request that computed 1,000 tokens less those `reused`."""
    return SimpleNamespace(
        finished=lambda: True,
        finished_reason=None,
        origin_input_ids=[0] * 990,
        output_ids=[0] * 10,
        cached_tokens=reused,
        time_stats=SimpleNamespace(prefill_finished_time=0.0, scheduler_recv_time=0.0),
    )


def test_prefixes_that_are_used_again_are_kept_by_a_morph(system: SmallSystem) -> None:
    acting = prefixes_at_stake(system, ThresholdPolicy, reused=950)
    acting.tick()
    assert system.executor.level == 1
    assert system.tree.evictable_size() == 5
    (decision,) = [row for row in acting.status()["events"] if row["kind"] == "decision"]
    assert "lend rather than evict 3 pages" in decision["reason"]
    assert "recomputing evicted prefixes costs 2 tokens (reuse 0.47)" in decision["reason"]
    assert "level 1 costs 2" in decision["reason"]


def test_prefixes_that_are_not_are_left_to_eviction(system: SmallSystem) -> None:
    acting = prefixes_at_stake(system, ThresholdPolicy, reused=300)
    for _ in range(3):
        acting.tick()
    assert system.executor.level == 0
    (row,) = acting.status()["events"]
    assert (row["kind"], row["pages"]) == ("eviction", 3)
    assert "evict rather than lend 3 pages" in row["reason"]
    assert acting.status()["eviction"]["reuse"] == pytest.approx(0.3)


def test_a_policy_that_may_not_move_leaves_prefixes_to_eviction(system: SmallSystem) -> None:
    acting = prefixes_at_stake(system, ManualPolicy, reused=950)
    acting.tick()
    assert system.executor.level == 0
    (row,) = acting.status()["events"]
    assert "the policy allows no move now" in row["reason"]
