"""An operator's changes to a controller over a small system."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_morph.controller.controller import Controller
from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.operator import Operator
from sglang_morph.controller.policy import Policy
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.slo import SloPolicy
from sglang_morph.controller.threshold import ThresholdPolicy
from tests.sglang_morph.controller.small_controller import controller
from tests.sglang_morph.controller.small_system import NestedToyLayer, SmallSystem


@pytest.fixture
def system() -> SmallSystem:
    return SmallSystem()


def operate(
    system: SmallSystem, policy: type[Policy], **options: Any
) -> tuple[Operator, Controller]:
    acting = controller(system, policy)
    return Operator(acting, PolicyOptions(**options)), acting


def settle(acting: Controller) -> None:
    while acting.executor.restoring:
        acting.tick()


def test_a_level_is_in_force_when_the_answer_says_applied(system: SmallSystem) -> None:
    operator, acting = operate(system, ManualPolicy)
    answer = operator.set_level({"level": 2})
    assert (answer["result"], answer["level"]) == ("applied", 2)
    assert system.executor.level == 2
    assert answer["revision"] == acting.revision == 2  # the change, and the transition
    system.check()


def test_a_restore_is_deferred_until_the_weights_are_back(system: SmallSystem) -> None:
    operator, acting = operate(system, ManualPolicy)
    operator.set_level({"level": 3})
    answer = operator.set_level({"level": 0})
    assert (answer["result"], answer["reason"]) == ("deferred", "a restore is under way")
    assert (answer["level"], answer["target_level"]) == (2, 0)
    settle(acting)
    assert operator.set_level({"level": 0})["result"] == "applied"


def test_a_level_that_does_not_fit_is_deferred_with_its_obstacle(system: SmallSystem) -> None:
    operator, acting = operate(system, ManualPolicy)
    operator.set_level({"level": 2})
    for token in range(3, 8):
        assert system.admit([token] * 10)
    answer = operator.set_level({"level": 0})
    assert answer["result"] == "deferred"
    assert "would not fit" in answer["reason"]
    for req in list(system.requests):
        system.finish(req, insert=True)
    acting._retry_at = 0.0
    acting.tick()
    settle(acting)
    assert system.executor.level == 0


def test_a_revision_guards_against_changes_in_between(system: SmallSystem) -> None:
    operator, acting = operate(system, ManualPolicy)
    seen = acting.revision
    assert operator.set_limits({"highest_level": 3, "revision": seen})["result"] == "applied"
    answer = operator.set_level({"level": 2, "revision": seen})
    assert answer["result"] == "stale"
    assert "look again" in answer["error"]
    assert system.executor.level == 0
    answer = operator.set_level({"level": 2, "revision": answer["revision"]})
    assert answer["result"] == "applied"
    ahead = operator.set_level({"level": 1, "revision": answer["revision"] + 1})
    assert ahead["result"] == "conflict"
    assert system.executor.level == 2


@pytest.mark.parametrize(
    ("policy", "limits", "level", "error"),
    [
        (ThresholdPolicy, {}, 1, "change to --morph-policy manual first"),
        (ManualPolicy, {}, 9, "give 0 to 4"),
        (ManualPolicy, {"highest_level": 1}, 2, "limits allow levels 0 to 1"),
        (ManualPolicy, {"hold": True}, 2, '{"hold": false}'),
    ],
)
def test_a_level_that_contradicts_what_is_in_force_changes_nothing(
    system: SmallSystem, policy: type[Policy], limits: dict[str, Any], level: int, error: str
) -> None:
    operator, acting = operate(system, policy)
    operator.set_limits(limits)
    before = acting.revision
    answer = operator.set_level({"level": level})
    assert answer["result"] == "conflict"
    assert error in answer["error"]
    assert answer["revision"] == acting.revision == before
    assert system.executor.level == 0


def test_narrower_limits_bring_the_level_down_and_lifting_them_brings_it_back(
    system: SmallSystem,
) -> None:
    operator, acting = operate(system, ManualPolicy)
    operator.set_level({"level": 4})
    assert operator.set_limits({"highest_level": 1})["result"] == "deferred"
    settle(acting)
    assert system.executor.level == 1
    answer = operator.set_limits({"highest_level": None})
    assert answer["result"] == "applied"
    assert answer["limits"]["highest_level"] is None
    assert system.executor.level == 4
    system.check()


def test_a_least_level_lowers_precision_at_once(system: SmallSystem) -> None:
    operator, _ = operate(system, ThresholdPolicy)
    assert operator.set_limits({"lowest_level": 2})["result"] == "applied"
    assert system.executor.level == 2


def test_hold_freezes_the_level_until_it_is_lifted(system: SmallSystem) -> None:
    operator, _ = operate(system, ManualPolicy)
    operator.set_level({"level": 2})
    operator.set_limits({"hold": True})
    answer = operator.set_limits({"highest_level": 1})
    assert answer["result"] == "deferred"
    assert "holds the level" in answer["reason"]
    assert system.executor.level == 2
    assert operator.set_limits({"hold": False})["target_level"] == 1


def test_the_cap_defers_an_operators_moves_too(system: SmallSystem) -> None:
    operator, acting = operate(system, ManualPolicy)
    operator.set_limits({"max_transitions_per_minute": 2})
    assert operator.set_level({"level": 1})["result"] == "applied"
    answer = operator.set_level({"level": 2})
    assert answer["result"] == "deferred"
    assert "2 transitions per minute" in answer["reason"]
    operator.set_level({"level": 0})
    settle(acting)
    assert system.executor.level == 0


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"highest_level": 9}, "highest_level"),
        ({"lowest_level": 3, "highest_level": 2}, "lowest_level"),
        ({"max_transitions_per_minute": 1}, "max_transitions_per_minute"),
        ({"highest_level": "1"}, "highest_level"),
        ({"restore_gb_per_s": -1.0}, "restore_gb_per_s"),
        ({"ceiling": 1}, "ceiling"),
    ],
)
def test_limits_that_no_server_takes_name_the_field(
    system: SmallSystem, limits: dict[str, Any], field: str
) -> None:
    operator, acting = operate(system, ManualPolicy)
    answer = operator.set_limits(limits)
    assert (answer["result"], answer["field"]) == ("invalid", field)
    assert acting.limits.describe()["highest_level"] is None
    assert acting.revision == 0


def test_limits_that_contradict_those_in_force_conflict(system: SmallSystem) -> None:
    operator, acting = operate(system, ManualPolicy)
    operator.set_limits({"highest_level": 2})
    answer = operator.set_limits({"lowest_level": 3})
    assert answer["result"] == "conflict"
    assert acting.limits.lowest == 0


def test_a_restore_waits_for_uploads_that_are_limited() -> None:
    system = SmallSystem(layer_type=NestedToyLayer)
    operator, acting = operate(system, ManualPolicy)
    operator.set_level({"level": 2})
    answer = operator.set_limits({"restore_gb_per_s": 1e-12})
    assert answer["limits"]["restore_gb_per_s"] == 1e-12
    operator.set_level({"level": 0})
    for _ in range(20):
        acting.tick()
    assert acting.executor.restoring
    operator.set_limits({"restore_gb_per_s": None})
    settle(acting)
    assert system.executor.level == 0
    system.check()


def test_a_policy_is_replaced_with_its_parameters(system: SmallSystem) -> None:
    operator, acting = operate(system, ManualPolicy, max_level=3)
    answer = operator.set_policy(
        {"policy": "threshold", "mode": "accuracy", "parameters": {"enter_pressure": 0.9}}
    )
    assert answer["result"] == "applied"
    assert isinstance(acting.policy, ThresholdPolicy)
    assert acting.policy.parameters.enter_pressure == 0.9
    assert acting.policy.parameters.max_transitions_per_minute == 8  # the mode's
    assert acting.policy.max_level == 3  # as the server was started
    answer = operator.set_policy(
        {"policy": "slo", "parameters": {"max_level": None, "slo_percentile": 99}}
    )
    assert isinstance(acting.policy, SloPolicy)
    assert acting.policy.max_level == 4
    assert acting.monitor.percentile == 99


def test_a_change_to_manual_keeps_the_level(system: SmallSystem) -> None:
    operator, acting = operate(system, ThresholdPolicy)
    system.move(2)
    operator.set_policy({"policy": "manual"})
    for _ in range(3):
        acting.tick()
    assert system.executor.level == 2
    assert operator.set_level({"level": 1})["target_level"] == 1


def test_a_new_policy_begins_with_its_dwell(system: SmallSystem) -> None:
    operator, acting = operate(system, ManualPolicy)
    system.allocator.alloc(24)
    operator.set_policy(
        {"policy": "threshold", "parameters": {"enter_hold_s": 0, "min_dwell_s": 60}}
    )
    acting.tick()
    assert system.executor.level == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"policy": "best"}, "policy"),
        ({"policy": "threshold", "mode": "fast"}, "mode"),
        ({"policy": "slo", "mode": "accuracy"}, "mode"),
        ({"policy": "slo", "parameters": {"lookahead_s": 1.0}}, "parameters.lookahead_s"),
        ({"policy": "threshold", "parameters": {"enter_pressure": 2}}, "parameters.enter_pressure"),
        (
            {"policy": "threshold", "parameters": {"leave_pressure": 0.9}},
            "parameters.leave_pressure",
        ),
        ({"policy": "slo", "parameters": {"slo_percentile": 0}}, "parameters.slo_percentile"),
        ({"policy": "slo", "parameters": {"max_level": -1}}, "parameters.max_level"),
        ({}, "policy"),
    ],
)
def test_a_policy_that_the_start_would_refuse_is_refused(
    system: SmallSystem, change: dict[str, Any], field: str
) -> None:
    operator, acting = operate(system, ManualPolicy)
    answer = operator.set_policy(change)
    assert (answer["result"], answer["field"]) == ("invalid", field)
    assert "--morph" not in answer["error"]
    assert isinstance(acting.policy, ManualPolicy)
    assert acting.revision == 0


def test_every_change_is_an_event_whatever_came_of_it(system: SmallSystem) -> None:
    operator, acting = operate(system, ThresholdPolicy)
    operator.set_limits({"highest_level": 2})
    operator.set_level({"level": 1})
    operator.set_policy({"policy": "manual", "revision": 0})
    rows = [row for row in acting.events(100, None)["events"] if row["kind"] == "operator"]
    assert [(row["name"], row["result"], row["revision"]) for row in rows] == [
        ("limits", "applied", 1),
        ("level", "conflict", 1),
        ("policy", "stale", 1),
    ]
    assert rows[0]["change"] == {"highest_level": 2}
