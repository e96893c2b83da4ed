"""What an operator may send: the bodies of `POST /morph/...`, strict, and the answers.

A schema is checked where the body arrives, so that a bad one goes no further, and again where the
change is made.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sglang_morph.controller.policy_options import PolicyOptions

Result = Literal["applied", "deferred", "stale", "conflict", "invalid"]
"""`applied`: in force. `deferred`: accepted, and takes effect when what `reason` names is over.
`stale`: something has changed since the revision given; nothing done. `conflict`: what is in force
rules it out; nothing done. `invalid`: `field` has a value that no server would take."""

NOT_PARAMETERS = ("policy", "mode", "two_mode_solution")
"""Options that are given beside the parameters, or only at start: a path on the server's disk."""

Level = Annotated[int, Meta(ge=0)]


class LevelChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Go to `level`; taken only while the policy is `manual`."""

    level: Level
    revision: int | None = None
    """The revision that this change was decided on; None: whatever it is now."""


def _parameters() -> type[msgspec.Struct]:
    """The options of all policies as optional fields."""
    types = get_type_hints(PolicyOptions)
    names = [f.name for f in fields(PolicyOptions) if f.name not in NOT_PARAMETERS]
    return msgspec.defstruct(
        "PolicyParameters",
        [(name, types[name] | None | UnsetType, UNSET) for name in names],
        frozen=True,
        forbid_unknown_fields=True,
    )


PolicyParameters = _parameters()


class PolicyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Replace the running policy. Parameters left out, or null, take the policy's own default."""

    policy: str
    mode: str | UnsetType = UNSET
    parameters: PolicyParameters = PolicyParameters()  # type: ignore[valid-type]
    revision: int | None = None


class LimitsChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields of `Limits`. One left out stays as it is, null removes the limit."""

    lowest_level: Level | UnsetType | None = UNSET
    highest_level: Level | UnsetType | None = UNSET
    max_transitions_per_minute: int | UnsetType | None = UNSET
    hold: bool | UnsetType = UNSET
    restore_gb_per_s: float | UnsetType | None = UNSET
    revision: int | None = None


class EventsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Without `after` the newest `limit` events, else the first `limit` after that id."""

    limit: Annotated[int, Meta(ge=1, le=256)] = 100
    after: Annotated[int, Meta(ge=0)] | None = None


Change = TypeVar("Change", bound=msgspec.Struct)


class BadField(ValueError):
    """A body, or a field of it, that no server would take."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def decode(raw: bytes, schema: type[Change]) -> Change:
    """The change in a JSON body. Raises `BadField`."""
    try:
        return msgspec.json.decode(raw, type=schema)
    except msgspec.ValidationError as error:
        raise _bad_field(error) from error
    except msgspec.DecodeError as error:
        raise BadField(f"the body is not JSON: {error}", "") from error


def convert(values: Any, schema: type[Change], *, strict: bool = True) -> Change:
    """The same from Python values; not `strict`: numbers may be text. Raises `BadField`."""
    try:
        return msgspec.convert(values, schema, strict=strict)
    except msgspec.ValidationError as error:
        raise _bad_field(error) from error


def _bad_field(error: msgspec.ValidationError) -> BadField:
    """The path msgspec gives, and the name of a field that is missing or unknown."""
    message = str(error)
    path = re.search(r" - at `(?:key in )?\$\.?([^`]*)`", message)
    named = re.search(r"field `(\w+)`", message)
    parts = [match.group(1) for match in (path, named) if match and match.group(1)]
    return BadField(message.replace("$.", "").replace("`", "'"), ".".join(parts))


def bad_option(error: ValueError) -> BadField:
    """What `create_policy` says of a flag, said of the field that took the flag's place."""
    flag = re.compile(r"--morph-([a-z-]+)")
    names = [match.replace("-", "_") for match in flag.findall(str(error))]
    message = flag.sub(lambda match: match.group(1).replace("-", "_"), str(error))
    name = names[0] if names else "policy"
    return BadField(message, name if name in ("policy", "mode") else f"parameters.{name}")
