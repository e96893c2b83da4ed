"""Policies as written on the command line: `NAME` or `NAME:parameter=value,parameter=value`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgspec

from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.policy import Policy
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.registry import create_policy

STATIC_LEVELS = ("full", "low")
"""Levels that never change: full precision, and the last level."""


class SpecError(ValueError):
    """A policy that can't be made. The message is one line with cause and remedy."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy as asked for; `create` makes a fresh one."""

    label: str
    options: PolicyOptions
    static: str | None = None

    def create(self, top_level: int) -> Policy:
        """Raises `SpecError`."""
        try:
            policy = create_policy(self.options, top_level)
        except ValueError as error:
            raise SpecError(f"--policy {self.label}: {error}") from error
        if isinstance(policy, ManualPolicy):
            policy.set_level(self.first_level(top_level))
        return policy

    def first_level(self, top_level: int) -> int:
        """The level a server begins at."""
        return top_level if self.static == "low" else 0


def parse_spec(text: str) -> PolicySpec:
    """Raises `SpecError`."""
    name, _, rest = text.partition(":")
    if name in STATIC_LEVELS and not rest:
        return PolicySpec(text, PolicyOptions(policy=ManualPolicy.name), static=name)
    values = {"policy": name, **_pairs(text, rest)}
    try:
        # Not strict: a value may be given as text where a number is meant.
        options = msgspec.convert(values, PolicyOptions, strict=False)
    except msgspec.ValidationError as error:
        raise SpecError(f"--policy {text}: {error}") from error
    return PolicySpec(text, options)


def _pairs(text: str, rest: str) -> dict[str, Any]:
    known = [field.name for field in fields(PolicyOptions) if field.name != "policy"]
    pairs: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise SpecError(f"--policy {text}: {part!r} has no value; write {part}=VALUE")
        if key not in known:
            raise SpecError(
                f"--policy {text}: unknown parameter {key!r}; known are {', '.join(known)}"
            )
        pairs[key] = value
    return pairs
