"""The precision plan: which layer takes which variant, in which order. Neither torch nor SGLang."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import orjson

from sglang_morph.precision.names import FULL, NOMINAL_BITS

SCHEMA_VERSION = 1
ORDERS = ("front", "back")
"""Which end of the model a default plan starts at."""

_CONFIG_ATTRIBUTES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}


class PlanError(ValueError):
    """A plan can't be used. The message is one line with cause and remedy."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The shape of a model, as far as a plan depends on it. Fine-tunes of one model share it."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int

    @classmethod
    def from_hf_config(cls, config: Any) -> ModelIdentity:
        """Of a transformers text config. Raises `PlanError` where an attribute is missing."""
        architectures = getattr(config, "architectures", None)
        if not architectures:
            raise PlanError("the model's config.json names no architecture; add `architectures`")
        numbers = {name: _number(config, key) for name, key in _CONFIG_ATTRIBUTES.items()}
        kv_heads = getattr(config, "num_key_value_heads", None) or numbers["num_heads"]
        return cls(architecture=architectures[0], num_kv_heads=kv_heads, **numbers)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return _digest(asdict(self))


@dataclass(frozen=True, slots=True)
class PlanStep:
    """`layer` (index of the decoder layer) takes `variant`."""

    layer: int
    variant: str


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """Steps, least harmful first. At level `k` the first `levels[k]` of them are applied.

    Raises `PlanError` when built with levels or steps that contradict each other or the model.
    """

    model: ModelIdentity
    steps: tuple[PlanStep, ...]
    levels: tuple[int, ...]
    note: str = ""
    """How the plan was made, for people."""
    schema_version: int = SCHEMA_VERSION
    checkpoint_digest: str = ""
    """Of the weights the order was measured on; empty for an order that was not measured."""
    calibration_digest: str = ""
    """SHA-256 of the text it was measured on; likewise."""

    def __post_init__(self) -> None:
        _check_levels(self.levels, len(self.steps))
        _check_steps(self.steps, self.model.num_layers)

    @property
    def max_level(self) -> int:
        return len(self.levels) - 1

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants the steps name, in order of first use."""
        return tuple(dict.fromkeys(step.variant for step in self.steps))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return _digest(asdict(self))

    def layer_variants(self, level: int) -> tuple[str, ...]:
        """Each layer's variant at `level`, by layer index."""
        variants = [FULL] * self.model.num_layers
        for step in self.steps[: self.levels[level]]:
            variants[step.layer] = step.variant
        return tuple(variants)

    def with_levels(self, levels: Sequence[int]) -> PrecisionPlan:
        """The same order of steps with other levels above 0; steps past the last are left out.

        Raises `PlanError` unless they rise and the plan has that many steps.
        """
        if not levels or not 0 < levels[-1] <= len(self.steps):
            raise PlanError(
                f"levels {list(levels)} must end at one of the plan's {len(self.steps)} steps"
            )
        return replace(self, steps=self.steps[: levels[-1]], levels=(0, *levels))

    def check_model(self, identity: ModelIdentity) -> None:
        """Raises `PlanError`, naming what differs, unless the plan was made for `identity`."""
        differences = [
            f"{field.name} is {planned!r} in the plan and {actual!r} in the model"
            for field in fields(ModelIdentity)
            if (planned := getattr(self.model, field.name))
            != (actual := getattr(identity, field.name))
        ]
        if differences:
            raise PlanError(
                f"the precision plan is for another model: {'; '.join(differences)}; "
                "use a plan made for this model, or none for the default plan"
            )

    @classmethod
    def load(cls, path: str | Path) -> PrecisionPlan:
        """Raises `PlanError` where the file can't be read or isn't a valid plan."""
        try:
            document = orjson.loads(Path(path).read_bytes())
        except OSError as error:
            raise PlanError(f"precision plan {path} can't be read: {error.strerror}") from error
        except orjson.JSONDecodeError as error:
            raise PlanError(f"precision plan {path} is not JSON: {error}") from error
        return cls.from_document(document, str(path))

    @classmethod
    def from_document(cls, document: Any, source: str) -> PrecisionPlan:
        """Of parsed JSON; `source` names it in errors. Raises `PlanError`."""
        # The version goes first: a newer schema would otherwise be reported as a wrong field.
        if isinstance(document, dict) and document.get("schema_version") != SCHEMA_VERSION:
            raise PlanError(
                f"precision plan {source} has schema version {document.get('schema_version')}, "
                f"this program reads {SCHEMA_VERSION}; make the plan again"
            )
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise PlanError(f"precision plan {source}: {error}") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(
            orjson.dumps(self, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )


def default_plan(
    identity: ModelIdentity, variants: Sequence[str], order: str = "front"
) -> PrecisionPlan:
    """A plan made without a sensitivity profile: all layers to the first variant, then the next.

    `order` is the layers' order: `front` starts at layer 0, `back` at the last. The levels are 0,
    a quarter, half and all of the layers at the first variant, then all at each later one. Raises
    `PlanError` for another order, or variants that don't shrink from one to the next.
    """
    if order not in ORDERS:
        raise PlanError(f"unknown order {order!r} of the default plan; use {' or '.join(ORDERS)}")
    orders = dict.fromkeys(variants, fixed_order(order, identity.num_layers))
    return plan_in_order(identity, orders, f"default plan, {order} first")


def fixed_order(order: str, count: int, seed: int = 0) -> list[int]:
    """`front`, `back` or, by `seed`, `random`: over `count` layers."""
    layers = list(range(count))
    if order == "back":
        layers.reverse()
    elif order == "random":
        random.Random(f"order {seed}").shuffle(layers)
    return layers


def plan_in_order(
    identity: ModelIdentity, orders: Mapping[str, Sequence[int]], note: str
) -> PrecisionPlan:
    """All layers take the first variant of `orders`, in its order of layers, then the next.

    With the levels of `default_plan`. Raises `PlanError` as that does.
    """
    count = identity.num_layers
    steps = tuple(PlanStep(layer, variant) for variant, order in orders.items() for layer in order)
    levels = {0}
    if orders:
        levels |= {math.ceil(count / 4), math.ceil(count / 2)}
        levels |= {count * passes for passes in range(1, len(orders) + 1)}
    return PrecisionPlan(identity, steps, tuple(sorted(levels)), note)


def _check_levels(levels: Sequence[int], steps: int) -> None:
    if not levels or levels[0] != 0:
        raise PlanError(f"levels must start with 0 (full precision), not {list(levels[:1])}")
    if levels[-1] != steps:
        raise PlanError(f"the last level must apply all {steps} steps, not {levels[-1]}")
    for before, after in pairwise(levels):
        if after <= before:
            raise PlanError(f"levels must rise strictly, but {after} follows {before}")


def _check_steps(steps: Sequence[PlanStep], num_layers: int) -> None:
    current: dict[int, str] = {}
    for number, step in enumerate(steps):
        where = f"step {number} ({step.variant!r} on layer {step.layer})"
        if not 0 <= step.layer < num_layers:
            raise PlanError(f"{where}: the model has layers 0 to {num_layers - 1}")
        if step.variant not in NOMINAL_BITS or step.variant == FULL:
            known = ", ".join(sorted(NOMINAL_BITS.keys() - {FULL}))
            raise PlanError(f"{where}: unknown variant; use one of {known}")
        before = current.get(step.layer, FULL)
        if NOMINAL_BITS[step.variant] >= NOMINAL_BITS[before]:
            raise PlanError(f"{where}: the layer is at {before!r}, which is no larger; drop it")
        current[step.layer] = step.variant


def _number(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int):
        raise PlanError(f"the model's config.json has no integer `{key}`; the model is unsupported")
    return value


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(document, option=orjson.OPT_SORT_KEYS)).hexdigest()
