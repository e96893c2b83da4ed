"""Changes by an operator while the server runs: level, policy, limits.

They arrive between two scheduler steps, and what can be done is done before the answer goes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from sglang_morph.controller.changes import (
    BadField,
    LevelChange,
    LimitsChange,
    PolicyChange,
    Result,
    bad_option,
    convert,
)
from sglang_morph.controller.limits import Limits
from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.monitor import check_percentile
from sglang_morph.controller.policy import Policy
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.registry import create_policy

if TYPE_CHECKING:
    from sglang_morph.controller.controller import Controller

Change = TypeVar("Change", LevelChange, PolicyChange, LimitsChange)

KEPT = ("max_level", "slo_percentile", "two_mode_solution")
"""Options that a new policy takes from the server's start unless they are given."""

UNDER_WAY = "a restore is under way"


class Stale(ValueError):
    """Something has changed since the change was decided on."""


class Conflict(ValueError):
    """What is in force rules the change out; nothing has changed."""


class Operator:
    """Makes changes to a controller, and answers in plain values."""

    def __init__(self, controller: Controller, options: object) -> None:
        """`options`: those the server was started with, with the fields of `PolicyOptions`."""
        self._controller = controller
        self._start = PolicyOptions.of(options)
        self._top_level = controller.limits.top_level

    def set_level(self, argument: dict[str, Any]) -> dict[str, Any]:
        return self._change("level", argument, LevelChange, self._level)

    def set_policy(self, argument: dict[str, Any]) -> dict[str, Any]:
        return self._change("policy", argument, PolicyChange, self._policy)

    def set_limits(self, argument: dict[str, Any]) -> dict[str, Any]:
        return self._change("limits", argument, LimitsChange, self._limits)

    def _change(
        self,
        name: str,
        argument: dict[str, Any],
        schema: type[Change],
        make: Callable[[Change], str | None],
    ) -> dict[str, Any]:
        """`make` changes something and says what its effect still waits for, if anything."""
        try:
            change = convert(argument, schema)
            self._check_revision(change.revision)
            reason = make(change)
            result: Result = "applied" if reason is None else "deferred"
        except BadField as error:
            return self._answer("invalid", str(error), field=error.field)
        except Stale as error:
            result, reason = "stale", str(error)
        except Conflict as error:
            result, reason = "conflict", str(error)
        self._controller.log_change(name, argument, result, reason)
        return self._answer(result, reason)

    def _check_revision(self, given: int | None) -> None:
        now = self._controller.revision
        if given is None or given == now:
            return
        if given < now:
            raise Stale(f"revision {given} is behind, the server is at {now}: look again")
        raise Conflict(f"revision {given} has not been reached, the server is at {now}")

    def _answer(self, result: Result, reason: str | None, **more: Any) -> dict[str, Any]:
        controller = self._controller
        answer = {
            "result": result,
            "revision": controller.revision,
            "level": controller.executor.level,
            "target_level": controller.executor.target_level,
            "policy": controller.policy.describe(),
            "limits": controller.limits.describe(),
            **more,
        }
        key = "reason" if result in ("applied", "deferred") else "error"
        return answer if reason is None else {**answer, key: reason}

    def _level(self, change: LevelChange) -> str | None:
        controller, level = self._controller, change.level
        policy, limits = controller.policy, controller.limits
        if not isinstance(policy, ManualPolicy):
            raise Conflict(
                f"policy {policy.name!r} decides the level; change to --morph-policy manual first, "
                'by POST /morph/policy {"policy": "manual"}'
            )
        if limits.limits.hold and level != controller.executor.target_level:
            raise Conflict('the level is held; first POST /morph/limits {"hold": false}')
        if level <= policy.max_level and not limits.lowest <= level <= limits.highest:
            raise Conflict(
                f"level {level}: limits allow levels {limits.lowest} to {limits.highest}"
            )
        try:
            policy.set_level(level)
        except ValueError as error:
            raise Conflict(str(error)) from error
        controller.act_on_change()
        return None if self._rests_within(level, level) else controller.obstacle or UNDER_WAY

    def _policy(self, change: PolicyChange) -> str | None:
        given = msgspec.to_builtins(change.parameters)
        kept = {name: getattr(self._start, name) for name in KEPT}
        options = PolicyOptions(
            **{**kept, **{k: v for k, v in given.items() if v is not None or k == "max_level"}},
            policy=change.policy,
            mode=PolicyOptions().mode if change.mode is UNSET else change.mode,
        )
        try:
            policy = create_policy(options, self._top_level)
            check_percentile(options.slo_percentile)
        except ValueError as error:
            raise bad_option(error) from error
        _check_known(policy, given, change)
        controller = self._controller
        if isinstance(policy, ManualPolicy):
            # It wants level 0 until told otherwise; a change of policy alone moves nothing.
            policy.set_level(min(controller.executor.target_level, policy.max_level))
        controller.monitor.percentile = options.slo_percentile
        controller.replace_policy(policy)
        controller.act_on_change()
        return None

    def _limits(self, change: LimitsChange) -> str | None:
        guard = self._controller.limits
        given = msgspec.to_builtins(change)
        given.pop("revision", None)
        try:
            Limits(**given).check(self._top_level)
        except ValueError as error:
            raise BadField(str(error), str(error).partition(" ")[0]) from error
        limits = replace(guard.limits, **given)
        try:
            limits.check(self._top_level)
        except ValueError as error:
            raise Conflict(f"with the limits in force, {error}") from error
        self._controller.set_limits(limits)
        self._controller.act_on_change()
        if self._rests_within(guard.lowest, guard.highest):
            return None
        return self._controller.obstacle or UNDER_WAY

    def _rests_within(self, lowest: int, highest: int) -> bool:
        executor = self._controller.executor
        return lowest <= executor.level <= highest and not executor.restoring


def _check_known(policy: Policy, given: dict[str, Any], change: PolicyChange) -> None:
    """Raises `BadField` for what the policy would not read."""
    known = policy.describe().keys() | {"slo_percentile"}
    if change.mode is not UNSET and "mode" not in known:
        raise BadField(f"policy {change.policy!r} has no modes", "mode")
    for name in given:
        if name not in known:
            raise BadField(
                f"policy {change.policy!r} has no parameter {name}", f"parameters.{name}"
            )
