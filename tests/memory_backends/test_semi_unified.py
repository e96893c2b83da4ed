"""`semi_unified` with real remapping: a stray access to a unit that is away ends the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from memory_backends.base import FULL, BackendError, PageRange, TensorMap
from memory_backends.pages import count
from memory_backends.semi_unified import SemiUnifiedBackend
from memory_backends.units import UnitState
from memory_backends.vmm import MIB, VmmFatalError
from memory_backends.vmm.host import HostDriver
from tests.memory_backends.fails_once import FailsOnce
from tests.memory_backends.vmm.faulty import FaultyDriver, discard
from tests.sglang_morph.controller.small_system import HalvesToyLayer, SmallSystem
from tests.sglang_morph.controller.test_memory_machine import MemoryMachine

UNIT = 2 * MIB
PAGE = 48 << 10
"""Does not divide a unit, so pages cross the edges of units."""
BASE_PAGES = 30
LAYER_BYTES = (2 * MIB, 5 * MIB, 3 * MIB, 1 * MIB, 7 * MIB)
"""Full weights; each residual is half of it. Steps end inside units, and at an edge."""
ORDER = (3, 1, 0, 4, 2)
"""The layers of the plan's steps."""
LENT_UNITS = (0, 0, 1, 2, 3, 5)
"""By depth: residuals end at 0.5, 3, 4, 7.5 and 9 MiB."""


class World:
    """A backend over toy layers, and KV pages that are written as they are lent."""

    def __init__(self, *, aliases: bool = False) -> None:
        self.driver = FaultyDriver(HostDriver(aliases=aliases))
        self.layers = [HalvesToyLayer(i, nbytes) for i, nbytes in enumerate(LAYER_BYTES)]
        self.backend = SemiUnifiedBackend(UNIT, lambda device: self.driver)
        steps = [SimpleNamespace(layer=layer, variant="half") for layer in ORDER]
        self.backend.adopt_weights(self.layers, steps, torch.device("cpu"))
        self.backend.allocate(BASE_PAGES, PAGE)
        self.existing: list[PageRange] = [PageRange(0, BASE_PAGES)]
        self.lent: list[PageRange] = []
        self._pages = self.backend.kv_storage.view(-1, PAGE)
        self._write(self.existing)

    def _write(self, ranges: list[PageRange]) -> None:
        for r in ranges:
            self._pages[r.start : r.stop] = self._content(r)

    @staticmethod
    def _content(r: PageRange) -> torch.Tensor:
        return torch.arange(r.start, r.stop).mul(37).to(torch.uint8).unsqueeze(1)

    def lower(self, depth: int) -> None:
        self.backend.lower(depth)
        self._lend(depth)

    def _lend(self, depth: int) -> None:
        self.lent = self.backend.lendable(depth)
        self._write(self.lent)

    def begin_restore(self, depth: int) -> None:
        """Pages go first, as the executor sees to."""
        self.lent = self.backend.lendable(depth)
        self.backend.prepare(depth)

    def turn_round(self, depth: int) -> None:
        """Lend again during a restore, without a layer changing."""
        self.backend.prepare(depth)
        self._lend(depth)

    def check(self) -> None:
        depth = self.backend.depth
        lowered = {ORDER[number] for number in range(depth)}
        for layer in self.layers:
            assert layer.variant == ("half" if layer.index in lowered else FULL)
            assert torch.equal(layer.current(), layer.expected(layer.variant)), layer.index
        for r in [*self.existing, *self.lent]:
            assert (self._pages[r.start : r.stop] == self._content(r)).all()
        report = self.backend.report()
        owners = (report.full_weights, report.variant_weights, report.kv_base, report.kv_lent)
        assert sum(owners) + report.unused == self.total
        assert report.unused >= 0

    @property
    def total(self) -> int:
        """Upper halves, and the region with its base part rounded up."""
        uppers = sum(LAYER_BYTES) // 2
        return uppers + LENT_UNITS[-1] * UNIT + -(-BASE_PAGES * PAGE // UNIT) * UNIT


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    discard(world.driver.inner)


def test_depths_lend_the_units_wholly_inside_the_prefix(world: World) -> None:
    first = -(-(-(-BASE_PAGES * PAGE // UNIT) * UNIT) // PAGE)
    for depth, units in enumerate(LENT_UNITS):
        ranges = world.backend.lendable(depth)
        if units == 0:
            assert ranges == []
            continue
        slots = -(-BASE_PAGES * PAGE // UNIT) * UNIT + units * UNIT
        assert ranges == [PageRange(first, slots // PAGE)]
        assert ranges[0].stop <= world.backend.maximum_pages
    assert world.backend.maximum_pages * PAGE == world.backend.kv_storage.numel()


def test_more_depth_never_lends_less(world: World) -> None:
    lendable = [world.backend.lendable(depth) for depth in range(len(ORDER) + 1)]
    assert [count(ranges) for ranges in lendable] == sorted(count(ranges) for ranges in lendable)
    assert len({ranges[0].start for ranges in lendable if ranges}) == 1


def test_nearly_all_residual_bytes_can_be_lent(world: World) -> None:
    residuals = sum(LAYER_BYTES) // 2
    assert count(world.backend.lendable(len(ORDER))) * PAGE >= 0.97 * residuals


def test_lowering_uploads_and_copies_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **k: (copied.append(a), copy(*a, **k))[1])
    world.backend.lower(5)
    assert not copied
    assert world.backend.report().detail["units_lent"] == LENT_UNITS[5] * UNIT


def test_with_aliases_nothing_is_mapped_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(aliases=True)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: pytest.fail("waited for the device"))
    world.driver.fail()
    world.lower(5)
    world.check()
    world.begin_restore(0)
    world.backend.restore(0)
    world.check()
    assert world.driver.calls == 0
    discard(world.driver.inner)


def test_where_memory_is_remapped_forwards_end_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: waits.append(world.driver.calls))
    world.driver.fail()
    world.backend.lower(5)
    assert waits == [0]


def test_a_restore_uploads_only_what_was_lost(world: World) -> None:
    """Layer 1's residual crosses the edge of the only unit that depth 2 lends."""
    world.lower(2)
    world.begin_restore(0)
    for step in world.backend._steps[:2]:  # what is not uploaded must still be there
        step.image.data[max(0, UNIT - step.start) :] = 0
    assert world.backend.ready(0)
    world.backend.restore(0)
    world.check()


def test_full_precision_returns_layer_by_layer(world: World) -> None:
    world.lower(5)
    world.begin_restore(0)
    for depth in (4, 3, 2, 1, 0):
        assert world.backend.ready(depth)
        world.backend.restore(depth)
        assert world.backend.depth == world.backend.layers_lowered == depth
        world.check()
    assert world.backend._region.units.counts()[UnitState.BACKED] == LENT_UNITS[-1]


def test_a_restore_needs_no_preparation(world: World) -> None:
    world.lower(5)
    world.lent = []
    world.backend.restore(0)
    world.check()


# Random lives

depths = st.integers(0, len(ORDER))


@pytest.mark.parametrize("aliases", [False, True], ids=["remapped", "aliased"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["lower", "restore", "advance"]), depths), max_size=10))
def test_any_sequence_keeps_weights_and_kv(aliases: bool, moves: list[tuple[str, int]]) -> None:
    world = World(aliases=aliases)
    backend, target = world.backend, 0
    try:
        for kind, depth in moves:
            if kind == "lower" and depth > backend.depth:
                world.lower(depth)
                target = depth
            elif kind == "lower" and target < depth < backend.depth:
                world.turn_round(depth)
                target = depth
            elif kind == "restore" and depth < target:
                world.begin_restore(depth)
                target = depth
            elif kind == "advance" and target <= depth < backend.depth and backend.ready(depth):
                backend.restore(depth)
            world.check()
        world.begin_restore(0)
        backend.restore(0)
        world.check()
        assert [layer.variant for layer in world.layers] == [FULL] * len(world.layers)
    finally:
        discard(world.driver.inner)


class SemiUnifiedMachine(MemoryMachine):
    """With requests and SGLang's prefix cache; the first level lends nothing, as it happens."""

    @initialize()
    def build(self) -> None:  # type: ignore[override]
        self.driver = HostDriver()
        self.system = SmallSystem(
            layer_type=HalvesToyLayer,
            backend=SemiUnifiedBackend(UNIT, lambda device: self.driver),
            variants=("half",),
            slab_bytes=3 * MIB,
            dim=512,
        )

    def teardown(self) -> None:
        super().teardown()
        discard(self.driver)


TestSemiUnifiedMachine = SemiUnifiedMachine.TestCase
TestSemiUnifiedMachine.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# Failures

Act = Callable[[World], None]


def fail_every_call(world: World, act: Act) -> Iterator[int]:
    """Do `act` with its first driver call failing, then its second, and so on, until it works.

    Yields after every attempt: the number of the call that failed, or 0.
    """
    call = 0
    while True:
        call += 1
        world.driver.fail(call)
        try:
            act(world)
        except BackendError as error:
            assert f"call {call} was made to fail" in str(error)
            yield call
        else:
            failed = world.driver.calls >= call
            world.driver.fail()
            assert not failed
            yield 0
            return


@pytest.mark.parametrize("start", [0, 2])
def test_a_failed_lower_leaves_all_as_it_was(world: World, start: int) -> None:
    if start:
        world.lower(start)
    mappings = world.driver.census.mappings()
    failures = 0
    for failed in fail_every_call(world, lambda world: world.lower(5)):
        failures += failed > 0
        assert world.backend.depth == (start if failed else 5)
        if failed:
            assert world.driver.census.mappings() == mappings
        world.check()
    assert failures >= 2 * (LENT_UNITS[5] - LENT_UNITS[start])


def test_a_failed_return_of_units_is_tried_again_by_restore(world: World) -> None:
    world.lower(5)
    mappings = world.driver.census.mappings()
    failures = 0
    for failed in fail_every_call(world, _prepare_and_restore):
        failures += failed > 0
        if failed:
            assert world.driver.census.mappings() == mappings
            assert world.backend.depth == 5
        world.check()
    assert failures >= 2 * LENT_UNITS[5]
    assert world.backend.depth == 0


def _prepare_and_restore(world: World) -> None:
    """The call fails in `prepare`, which says nothing, and once more in `restore`."""
    failing = world.driver.failing
    world.begin_restore(0)
    assert world.backend.ready(0)
    if world.driver.calls >= max(failing):
        world.driver.fail(*failing)
    world.backend.restore(0)


def test_a_failed_turn_during_a_restore_leaves_it_under_way(world: World) -> None:
    world.lower(5)
    world.begin_restore(0)
    world.backend.restore(4)
    for failed in fail_every_call(world, lambda world: world.turn_round(4)):
        if failed:
            world.backend.prepare(0)  # as the executor does
        world.check()
    assert world.lent == world.backend.lendable(4)
    world.begin_restore(0)
    world.backend.restore(0)
    world.check()


def test_memory_that_cannot_be_put_back_is_not_hidden(world: World) -> None:
    """Unmap, map, unmap; the fourth call fails and so does the first one that undoes the others."""
    world.driver.fail(4, 5)
    with pytest.raises(VmmFatalError, match="restart the server"):
        world.backend.lower(5)
    world.driver.fail()


class Reluctant(FailsOnce, HalvesToyLayer):
    """Fails once in taking `fail_on`, half-way."""


def reluctant_backend() -> tuple[SemiUnifiedBackend, list[Reluctant]]:
    layers = [Reluctant(i, 4 * MIB) for i in range(3)]
    backend = SemiUnifiedBackend(UNIT)
    steps = [SimpleNamespace(layer=i, variant="half") for i in range(3)]
    backend.adopt_weights(layers, steps, torch.device("cpu"))
    backend.allocate(4, PAGE)
    return backend, layers


def test_a_layer_that_cannot_be_switched() -> None:
    backend, layers = reluctant_backend()
    layers[1].fail_on = "half"
    with pytest.raises(BackendError, match="no luck"):
        backend.lower(3)
    assert backend.depth == 0
    assert all(torch.equal(layer.current(), layer.original) for layer in layers)
    backend.lower(3)
    layers[1].fail_on = FULL
    with pytest.raises(BackendError, match="layer 1 failed: no luck"):
        backend.restore(0)
    assert backend.depth == 2
    assert [layer.variant for layer in layers] == ["half", "half", FULL]
    backend.restore(0)
    assert all(torch.equal(layer.current(), layer.original) for layer in layers)


# What is refused


def adopt(layers: list[HalvesToyLayer], plan: list[int], **options: int) -> SemiUnifiedBackend:
    backend = SemiUnifiedBackend(**options)
    steps = [SimpleNamespace(layer=layer, variant="half") for layer in plan]
    backend.adopt_weights(layers, steps, torch.device("cpu"))
    return backend


class Unfit(HalvesToyLayer):
    def is_lossless(self, variant: str) -> bool:
        return False


@pytest.mark.parametrize(
    ("plan", "layer_type", "message"),
    [
        ([], HalvesToyLayer, "nothing to lend"),
        ([0, 0], HalvesToyLayer, "two steps"),
        ([0], Unfit, "layer 0 is not nested"),
    ],
)
def test_plans_that_do_not_fit(
    plan: list[int], layer_type: type[HalvesToyLayer], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        adopt([layer_type(0, 4096)], plan)


def test_missing_kernels_are_known_before_a_weight_is_touched() -> None:
    class WithoutKernel(HalvesToyLayer):
        def prepare_merged(self, variant: str) -> int:
            raise RuntimeError("no kernel here; use layer_swap")

    layers = [HalvesToyLayer(0, 4096), WithoutKernel(1, 4096)]
    before = [layer.bound["weight"] for layer in layers]
    with pytest.raises(RuntimeError, match="no kernel here"):
        adopt(layers, [0, 1])
    assert [layer.bound["weight"] for layer in layers] == before


def test_a_bad_unit_size_is_refused() -> None:
    backend = adopt([HalvesToyLayer(0, 4096)], [0], unit_bytes=3 * MIB)
    with pytest.raises(BackendError, match="multiple of 2 MiB"):
        backend.allocate(4, PAGE)


def test_a_layer_without_a_step_is_left_alone() -> None:
    layers = [HalvesToyLayer(i, 4 * MIB) for i in range(2)]
    before = layers[0].bound["weight"]
    backend = adopt(layers, [1])
    backend.allocate(4, PAGE)
    assert layers[0].bound["weight"] is before
    assert backend.report().full_weights == 8 * MIB
    assert backend.kv_budget(100 * MIB) == (100 - 2 - 4 - 2) * MIB


def test_exceptions_are_kept_and_not_lent() -> None:
    class WithExceptions(HalvesToyLayer):
        def residual_tensors(self, variant: str, full: TensorMap) -> TensorMap:
            few = {"exception_index": torch.arange(5), "exception_bits": torch.arange(5).short()}
            return {**super().residual_tensors(variant, full), **few}

    layers = [WithExceptions(0, 4 * MIB)]
    backend = adopt(layers, [0])
    backend.allocate(4, PAGE)
    backend.lower(1)
    backend.kv_storage[4 * PAGE :].fill_(0xFF)
    backend.restore(0)
    bound = layers[0].bound
    assert torch.equal(bound["exception_index"], torch.arange(5))
    assert torch.equal(bound["exception_bits"], torch.arange(5).short())
    assert torch.equal(layers[0].current(), layers[0].original)
    assert backend.host_bytes == 2 * MIB
