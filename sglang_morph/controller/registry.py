"""Names of policies. A third party registers its own with `register_policy`."""

from __future__ import annotations

from collections.abc import Callable

from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.policy import Policy
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.slo import SloPolicy
from sglang_morph.controller.threshold import ThresholdPolicy
from sglang_morph.controller.two_mode import TwoModePolicy

PolicyFactory = Callable[[PolicyOptions, int], Policy]
"""A `Policy` subclass, or anything else that makes a policy from the options and the top level."""

POLICIES: dict[str, PolicyFactory] = {
    ManualPolicy.name: ManualPolicy,
    SloPolicy.name: SloPolicy,
    ThresholdPolicy.name: ThresholdPolicy,
    TwoModePolicy.name: TwoModePolicy,
}


def register_policy(name: str, factory: PolicyFactory) -> None:
    """Make `factory` available as `--morph-policy name`."""
    if name in POLICIES:
        raise ValueError(f"policy {name!r} is registered already")
    POLICIES[name] = factory


def create_policy(options: object, top_level: int) -> Policy:
    """The policy that `options` names, for a plan whose last level is `top_level`.

    `options` has fields of `PolicyOptions` as attributes; those it lacks take their default.
    Raises ValueError for an unknown name and for options the policy rejects.
    """
    given = PolicyOptions.of(options)
    factory = POLICIES.get(given.policy)
    if factory is None:
        raise ValueError(f"unknown policy {given.policy!r}: give one of {', '.join(POLICIES)}")
    return factory(given, top_level)
