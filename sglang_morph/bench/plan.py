"""The plan of a comparison: arms, workloads and how often, as written in a TOML file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sglang_morph.bench.routes import RouteName
from sglang_morph.bench.statistics import Slo
from sglang_morph.bench.workload import Name, WorkloadSpec

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class PlanError(ValueError):
    """A plan that can't be carried out. The message has the remedy."""


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One thing compared: a server's whole command line but for host and port."""

    name: Name
    command: str
    """`python` at its start stands for the Python that runs the benchmark."""
    env: dict[str, str] = {}
    quality: dict[str, float] = {}
    """Score of the answers by precision level (a static arm has only "0"), measured elsewhere."""
    level: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Precision level at which its server rests. Above 0 the benchmark sets it once, before the
    warm-up, so that the arm is a static one of lower precision.
    """
    weights_gib: Positive | None = None
    """Of the weights as loaded; None: what the server tells. One that loads beside others on a GPU
    can't tell: SGLang takes the fall of free memory for it.
    """

    def __post_init__(self) -> None:
        if self.level and self._flag("--morph-policy") != "manual":
            raise ValueError(
                f"arm {self.name!r} has a level of its own, so its command needs a memory backend "
                "and --morph-policy manual"
            )

    def words(self) -> list[str]:
        words = shlex.split(self.command)
        return [sys.executable, *words[1:]] if words[:1] in (["python"], ["python3"]) else words

    @property
    def morphs(self) -> bool:
        """Whether its server has a memory backend that moves memory."""
        return self._flag("--memory-backend") not in (None, "static")

    @property
    def real_weights(self) -> bool:
        return self._flag("--load-format") != "dummy"

    @property
    def quantized(self) -> bool:
        """Whether its server loads quantized weights, so that nothing is at full precision."""
        return self._flag("--quantization") is not None

    def _flag(self, flag: str) -> str | None:
        words = self.words()
        for position, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name == flag:
                return value if equals else words[position + 1 : position + 2][0]
        return None


class Steady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Equal requests at equal distances."""

    requests: Count = 8
    rate: Positive = 2.0
    input_tokens: Count = 128
    output_tokens: Count = 32


class PlannedWorkload(WorkloadSpec, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A workload, and who gets it."""

    arms: list[Name] | None = None
    """The arms that get it, in the order of their turns where servers are started together; None:
    all, in the plan's order.
    """


class Sweep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Search for the highest rate of `workload` at which the SLO still holds."""

    workload: Name
    low: Positive
    high: Positive
    """Requests a second between which to search."""
    steps: Count = 4
    """Rates tried for an arm: it is found to within a ratio (high/low) ** (1/2**steps)."""
    attainment: float = 0.9
    """Share of requests that must meet the SLO."""
    duration_s: Positive | None = None
    """Window of the trace, instead of the workload's: at low rates a long one takes long."""
    arms: list[Name] | None = None
    """None: those that get the workload."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds, requests a second, tokens."""

    name: str
    model: Path
    """Folder with the tokenizer that cuts the prompts."""
    arms: list[Arm]
    workloads: list[PlannedWorkload]
    reference: Name | None = None
    """Arm that the others are compared with, in every slot; by default the first."""
    servers: Literal["fresh", "together"] = "fresh"
    """`fresh`: every run starts a server and ends it. `together`: the servers of all arms are
    started at once and take turns on the same machine, which saves their starts.
    """
    repetitions: Count = 3
    seed: int = 0
    route: RouteName = "sglang"
    served_model: str = "default"
    """What OpenAI requests name as their model."""
    text: Path | None = None
    """Prompts are cut out of it; None: the help topics of Python."""
    slo: Slo = Slo()
    warmup: Steady = Steady()
    control: Steady | None = None
    """Load so low that no arm may morph."""
    sweeps: list[Sweep] = []
    gpu_memory_gib: Positive | None = None
    """Emulate a GPU with so much memory."""
    gpu_static_fraction: Positive = 0.85
    drain_timeout_s: Positive = 300.0
    settle_timeout_s: Positive = 120.0
    """For a server to be back at level 0 with no request left."""
    start_timeout_s: Positive = 600.0
    expected_start_s: Positive = 90.0
    """What a server's start takes, for splitting the plan by time."""
    verify_weights: bool = True
    """Compare digests of the weights at the end of each morphing run."""

    def __post_init__(self) -> None:
        _check_names("arm", [arm.name for arm in self.arms])
        _check_names("workload", [workload.name for workload in self.workloads])
        if self.reference and self.reference not in {arm.name for arm in self.arms}:
            raise ValueError(f"reference {self.reference!r} is none of the arms")
        for workload in self.workloads:
            self._check_arms_of(workload)
        for sweep in self.sweeps:
            self._check_sweep(sweep)
        _check_doubled(
            "sweeps are of the workload and arm",
            [
                f"{sweep.workload}, {arm}"
                for sweep in self.sweeps
                for arm in self.arms_to_search(sweep)
            ],
        )
        if self.servers == "together" and self.gpu_memory_gib is not None:
            raise ValueError(
                "servers started together can't size their memory by what is free; leave "
                "gpu_memory_gib out and give --max-total-tokens in every arm's command"
            )

    def _check_arms_of(self, workload: PlannedWorkload) -> None:
        if workload.arms is None:
            return
        what = f"workload {workload.name!r}"
        self._check_arm_names(what, workload.arms)
        if self.reference_arm not in workload.arms:
            raise ValueError(
                f"{what} leaves out {self.reference_arm!r}, which the others are compared with"
            )

    def _check_sweep(self, sweep: Sweep) -> None:
        if sweep.workload not in {w.name for w in self.workloads}:
            raise ValueError(f"a sweep's workload {sweep.workload!r} is none of the plan's")
        if not sweep.low < sweep.high:
            raise ValueError(
                f"a search from {sweep.low:g} to {sweep.high:g} requests/s has no room"
            )
        self._check_arm_names(f"the sweep of {sweep.workload!r}", sweep.arms or [])

    def _check_arm_names(self, what: str, names: Sequence[str]) -> None:
        if unknown := set(names) - {arm.name for arm in self.arms}:
            raise ValueError(f"{what} names {sorted(unknown)[0]!r}, which is none of the arms")
        if len(set(names)) < len(names):
            raise ValueError(f"{what} names an arm twice")

    @property
    def reference_arm(self) -> str:
        return self.reference or self.arms[0].name

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def arms_of(self, workload: str) -> list[str]:
        """In the plan's order for a workload that has no arms of its own, as the control."""
        own = next((w.arms for w in self.workloads if w.name == workload), None)
        return [arm.name for arm in self.arms] if own is None else own

    def has_own_order(self, workload: str) -> bool:
        return any(w.name == workload and w.arms is not None for w in self.workloads)

    def known_arms(self, names: Sequence[str]) -> list[str]:
        """These arms, or all where none is named. Raises `PlanError` for one that is none."""
        known = [arm.name for arm in self.arms]
        _check_known("arm", names, known)
        return list(names) or known

    def arms_to_search(self, sweep: Sweep) -> list[str]:
        return sweep.arms or self.arms_of(sweep.workload)

    def searches(self, workloads: Sequence[str]) -> list[Sweep]:
        """The sweeps of these workloads, or all where none is named. Raises `PlanError`."""
        if not self.sweeps:
            raise PlanError("the plan has no [[sweeps]]; add one with workload, low and high")
        known = [sweep.workload for sweep in self.sweeps]
        _check_known("sweep of a workload", workloads, known)
        return [sweep for sweep in self.sweeps if sweep.workload in (workloads or known)]

    def part(self, names: Sequence[str]) -> Plan:
        """These workloads alone, and the arms that get one; no sweeps. Raises `PlanError`."""
        _check_known("workload", names, [workload.name for workload in self.workloads])
        needed = {arm for name in names for arm in self.arms_of(name)}
        return msgspec.structs.replace(
            self,
            workloads=[workload for workload in self.workloads if workload.name in names],
            arms=[arm for arm in self.arms if arm.name in needed],
            sweeps=[],
        )


def _check_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    if unknown := set(names) - set(known):
        raise PlanError(f"the plan has no {what} {sorted(unknown)[0]!r}, but {', '.join(known)}")


def _check_names(what: str, names: list[str]) -> None:
    if not names:
        raise ValueError(f"the plan has no {what}")
    _check_doubled(f"{what}s are named", names)


def _check_doubled(what: str, names: Sequence[str]) -> None:
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two {what} {sorted(doubled)[0]!r}")


def decode_path(kind: type, value: object) -> object:
    """msgspec's hook for the one type here that it doesn't know.

    Raises NotImplementedError, which is how such a hook refuses a type.
    """
    if kind is not Path:
        raise NotImplementedError(f"no decoder for {kind}")
    return Path(str(value))


def read_plan(path: Path) -> Plan:
    """Read a plan; its relative paths start at its folder. Raises `PlanError`."""
    try:
        plan = msgspec.toml.decode(path.read_bytes(), type=Plan, dec_hook=decode_path)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}; give a plan that can be read") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from error
    folder = path.parent
    return msgspec.structs.replace(
        plan,
        model=folder / plan.model,
        text=None if plan.text is None else folder / plan.text,
        workloads=[
            msgspec.structs.replace(workload, trace=folder / workload.trace)
            for workload in plan.workloads
        ],
    )
