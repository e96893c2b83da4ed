from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from rich.console import Console

from benchmarks import layer_profile_8b
from benchmarks.layer_profile import agreement, kendall_tau
from benchmarks.layer_profile_8b import DEFAULT, SEARCHES, Measuring, acceptance_rows
from sglang_morph.demo.provenance import Provenance
from sglang_morph.profiling.greedy import Pick
from sglang_morph.profiling.ranking import Ranking, StageRanking


def ranking(layers: list[int]) -> Ranking:
    stage = StageRanking("int8", [Pick(layer, 0.0, 1) for layer in layers], [], [])
    return Ranking([stage], 4, 4.0, 10.0, 1.0)


@pytest.mark.parametrize(
    ("other", "tau"), [([0, 1, 2, 3], 1.0), ([3, 2, 1, 0], -1.0), ([1, 0, 2, 3], 4 / 6)]
)
def test_kendall_tau(other: list[int], tau: float) -> None:
    assert kendall_tau([0, 1, 2, 3], other) == pytest.approx(tau)


def test_agreement_of_every_two_searches() -> None:
    found = {"a": ranking([0, 1, 2, 3]), "b": ranking([1, 2, 0, 3]), "c": ranking([3, 2, 1, 0])}
    rows = agreement(found)
    assert [row["searches"] for row in rows] == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert [row["same_in_first_half"] for row in rows] == [0.5, 0.0, 0.5]
    assert rows[0]["kendall_tau"] == pytest.approx(1 / 3, abs=1e-3)


TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
ORIGIN = Provenance("a command", "abc", "2026-01-01", "a machine")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_profile_8b, "SHAPE", {**layer_profile_8b.SHAPE, **TINY})


@pytest.mark.usefixtures("tiny")
def test_the_large_shape_is_measured_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that fails does not keep the others from being measured, and is noted."""
    monkeypatch.setitem(SEARCHES, "lis", layer_profile_8b.Search("nonsense"))
    Measuring("cpu", tmp_path / "found.json", 60, ORIGIN, Console(quiet=True)).run()
    found = orjson.loads((tmp_path / "found.json").read_bytes())
    assert list(found["searches"]) == [DEFAULT, "kl"]
    assert list(found["failed"]) == ["lis"]
    assert "unknown order 'nonsense'" in found["failed"]["lis"]
    assert not found["finished"]
    assert list(found["quantizer_seconds_a_layer"]) == ["rtn", "awq", "gptq"]
    minutes, saved = acceptance_rows(found)
    assert minutes.holds
    assert minutes.command == "a command"
    assert saved.value == pytest.approx(
        found["searches"][DEFAULT]["forwards_saved_ratio"], abs=1e-3
    )


@pytest.mark.usefixtures("tiny")
def test_it_ends_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a part as well; what was measured before is kept."""
    seconds = itertools.count()  # the clock goes on by one whenever it is read
    monkeypatch.setattr(layer_profile_8b, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    Measuring("cpu", tmp_path / "found.json", 60, ORIGIN, Console(quiet=True)).run()
    found = orjson.loads((tmp_path / "found.json").read_bytes())
    assert found["load_seconds"] > 0
    assert found["variants_seconds"] > 0
    assert not found["finished"]
    assert "OutOfTime" in found["failed"]["gptq"]
