"""The controller over a small system: what it does to the scheduler around a transition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_morph.controller.controller import Controller
from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.monitor import Monitor
from sglang_morph.controller.policy import Policy
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.threshold import ThresholdPolicy
from sglang_morph.observability.event_log import EventLog
from tests.sglang_morph.controller.small_system import SmallSystem


class SchedulerFields:
    """The fields of SGLang's scheduler that the controller reads."""

    def __init__(self, system: SmallSystem) -> None:
        self.token_to_kv_pool_allocator = system.allocator
        self.tree_cache = system.tree
        self.req_to_token_pool = system.req_to_token
        self.running_batch = SimpleNamespace(reqs=system.requests, batch_is_full=False)
        self.last_batch = None
        self.chunked_req = None
        self.waiting_queue: list[Any] = []
        self.new_token_ratio_tracker = SimpleNamespace(current=0.5)


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


def controller(system: SmallSystem, policy: type[Policy]) -> Controller:
    return Controller(
        SchedulerFields(system),
        system.executor,
        policy(PolicyOptions(), system.top_level),
        system.backend,
        EventLog(None, 1.0),
        None,
        Monitor(),
    )


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
    acting.set_level(1)
    acting.tick()
    assert acting._scheduler.running_batch.batch_is_full is False
    assert acting.status()["level"] == 1


def test_a_deferred_restore_says_why_and_is_tried_again_later(system: SmallSystem) -> None:
    acting = controller(system, ManualPolicy)
    acting.set_level(2)
    acting.tick()
    for token in range(3, 8):
        assert system.admit([token] * 10)
    acting.set_level(0)
    acting.tick()
    assert "would not fit" in acting.status()["obstacle"]
    assert acting.monitor.transitions["deferred"] == 1
    acting.tick()  # too soon
    assert acting.monitor.transitions["deferred"] == 1
    for req in list(system.requests):
        system.finish(req, insert=True)
    acting._retry_at = 0.0
    acting.tick()
    while system.executor.restoring:
        acting.tick()
    acting.tick()
    assert acting.status()["level"] == 0
    assert acting.status()["obstacle"] is None
    system.check()


def test_only_a_manual_policy_takes_a_level(system: SmallSystem) -> None:
    with pytest.raises(ValueError, match="--morph-policy manual"):
        controller(system, ThresholdPolicy).set_level(1)
