from __future__ import annotations

import pickle

import msgspec
import pytest

from sglang_morph.controller.commands import Command, Readiness, commit_if_ready
from tests.sglang_morph.controller.small_system import NestedToyLayer, SmallSystem

BEGAN = Command("withdraw", 0, revision=7, reason="pressure 0.40 <= 0.60")


@pytest.mark.parametrize("message", [BEGAN, Readiness(1, 7, level=2, ready=True)])
def test_messages_survive_every_transport(message: Command | Readiness) -> None:
    kind = type(message)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
    assert msgspec.json.decode(msgspec.json.encode(message), type=kind) == message
    assert pickle.loads(pickle.dumps(message)) == message
    with pytest.raises(AttributeError, match="immutable"):
        message.revision = 8  # type: ignore[misc]


def test_an_unknown_kind_is_no_command() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(
            b'{"kind": "evict", "target": 0, "revision": 1, "reason": ""}', type=Command
        )


def test_a_commit_waits_for_every_rank() -> None:
    ready = [Readiness(rank, 7, level=2, ready=True) for rank in range(4)]
    assert commit_if_ready(ready, BEGAN) == Command("commit", 2, 7, BEGAN.reason)
    for late in (
        Readiness(3, 7, level=2, ready=False),
        Readiness(3, 7, level=3, ready=True),  # a step behind
        Readiness(3, 6, level=2, ready=True),  # speaks of an earlier restore
    ):
        assert commit_if_ready([*ready[:3], late], BEGAN) is None
    assert commit_if_ready([], BEGAN) is None


def test_readiness_changes_nothing_by_itself() -> None:
    system = SmallSystem(layer_type=NestedToyLayer)
    assert system.executor.readiness() is None
    system.move(3)
    system.move(0)
    for _ in range(5):
        readiness = system.executor.readiness()
        assert readiness is not None and readiness.ready
    assert system.executor.level == 3
    system.check()


@pytest.mark.parametrize(
    "command",
    [
        Command("lower", 2, 9, ""),  # it is there already
        Command("withdraw", 3, 9, ""),
        Command("commit", 1, 9, ""),  # no restore is under way
    ],
)
def test_a_command_for_another_state_is_refused(command: Command) -> None:
    system = SmallSystem()
    system.move(2)
    with pytest.raises(ValueError, match="does not fit level 2"):
        system.executor.execute(command)
    assert system.executor.level == 2
    system.check()


def test_a_commit_goes_one_level_and_no_further() -> None:
    system = SmallSystem()
    system.move(3)
    system.move(0)
    with pytest.raises(ValueError, match="does not fit"):
        system.executor.execute(Command("commit", 0, 2, ""))
    assert system.executor.execute(Command("commit", 2, 2, "")) is None
    assert system.executor.level == 2


def test_pages_withdrawn_count_as_unused_until_the_weights_are_back() -> None:
    system = SmallSystem()
    system.move(3)
    system.move(0)
    assert system.executor.restoring
    report = system.executor.report()
    assert report.kv_lent == 0 == system.allocator.lent_size
    owners = (report.full_weights, report.variant_weights, report.kv_base, report.kv_lent)
    assert sum(owners) + report.unused == system.backend.kv_storage.nbytes
    assert report.unused > system.backend.report().unused
