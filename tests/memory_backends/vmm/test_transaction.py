"""A block of driver calls happens as a whole or not at all, whichever call fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memory_backends.vmm import MIB, ByteRange, PhysicalMemory, VmmError, VmmFatalError
from memory_backends.vmm.host import HostDriver
from memory_backends.vmm.transaction import Transaction
from tests.memory_backends.vmm.faulty import (
    FaultyDriver,
    discard,
)

G = 2 * MIB


class World:
    """A memory at the first half of a range; `change` uses every kind of call once or more."""

    CALLS = 7

    def __init__(self) -> None:
        self.driver = FaultyDriver(HostDriver())
        self.range: ByteRange = self.driver.reserve(2 * G)
        self.memory: PhysicalMemory = self.driver.create(G)
        self.driver.map(self.range.start, self.memory)
        self.driver.set_access(self.range.start, G)
        self.tensor: torch.Tensor = self.driver.tensor(self.range.start, 2 * G)
        self.tensor[:G] = torch.arange(G).to(torch.uint8)
        self.content = self.tensor[:G].clone()

    def change(self) -> None:
        with Transaction(self.driver) as calls:
            calls.reserve(G)
            extra = calls.create(G)
            calls.unmap(self.range.start, self.memory)
            calls.map(self.range.start + G, self.memory)
            calls.set_access(self.range.start + G, G)
            calls.map(self.range.start, extra)
            calls.set_access(self.range.start, G)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    discard(world.driver.inner)


def reservations(world: World) -> int:
    return len(world.driver.inner._raw)


def test_without_a_failure_everything_happens(world: World) -> None:
    world.driver.fail()
    world.change()
    assert world.driver.calls == World.CALLS
    assert torch.equal(world.tensor[G:], world.content)
    assert len(world.driver.census.mappings()) == world.driver.census.files() == 2


@pytest.mark.parametrize("call", range(1, World.CALLS + 1))
def test_any_failing_call_undoes_the_others(world: World, call: int) -> None:
    before = world.driver.census.mappings(), world.driver.census.files(), reservations(world)
    world.driver.fail(call)
    with pytest.raises(VmmError, match=f"call {call} was made to fail"):
        world.change()
    assert (
        world.driver.census.mappings(),
        world.driver.census.files(),
        reservations(world),
    ) == before
    assert torch.equal(world.tensor[:G], world.content)


def fail(*calls: int) -> tuple[Exception, int]:
    """What a change raises when `calls` fail, and the driver calls made, undoing included."""
    world = World()
    world.driver.fail(*calls)
    with pytest.raises((VmmError, VmmFatalError)) as caught:
        world.change()
    discard(world.driver.inner)
    return caught.value, world.driver.calls


@pytest.mark.parametrize("call", range(2, World.CALLS + 1))
def test_a_failure_while_undoing_is_fatal_and_says_both_causes(call: int) -> None:
    _, made = fail(call)
    assert made > call
    for undoing in range(call + 1, made + 1):
        error, _ = fail(call, undoing)
        assert isinstance(error, VmmFatalError)
        assert f"call {call} " in str(error) and f"call {undoing} " in str(error)
        assert "restart the server" in str(error) and "\n" not in str(error)


def test_any_exception_undoes(world: World) -> None:
    before = world.driver.census.mappings()
    with pytest.raises(KeyboardInterrupt), Transaction(world.driver) as calls:
        calls.unmap(world.range.start, world.memory)
        raise KeyboardInterrupt
    assert world.driver.census.mappings() == before
    assert torch.equal(world.tensor[:G], world.content)
