"""SGLang's offline engine, ours and stock with the plugin; and migration at every step."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_morph.bundle.bundle import Bundle
from sglang_morph.engine import Engine
from sglang_morph.precision.quantizers.layer import AsTheyAre
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.profile import Calibration, profile
from sglang_morph.profiling.ranking import Search
from sglang_morph.profiling.text import load_text
from tests.server.client import PROMPTS
from tests.server.conftest import BASE_TOKENS, STRICT
from tests.server.migrating_scheduler import (
    MARK,
    PAGES_A_STEP,
    run_migrating_scheduler_process,
)

GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}


class MigratingEngine(Engine):
    run_scheduler_process_func = staticmethod(run_migrating_scheduler_process)


@pytest.fixture(scope="module")
def bundle(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """All layers in `int8`, in an order that no default plan has."""
    return profile(
        smollm2,
        LayeredModel.load(smollm2),
        load_text(),
        ("int8",),
        AsTheyAre(),
        Calibration(1, 16),
        Search("random", seed=1),
        tmp_path_factory.mktemp("bundles") / "smollm2",
    ).bundle


@pytest.fixture(scope="module")
def engine(smollm2: Path, bundle: Bundle) -> Iterator[MigratingEngine]:
    environment = pytest.MonkeyPatch()
    for name, value in STRICT.items():
        environment.setenv(name, value)
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    engine = MigratingEngine(
        model_path=str(smollm2),
        memory_backend="layer_swap",
        morph_policy="manual",
        morph_bundle=str(bundle.folder),
        max_total_tokens=BASE_TOKENS,
        context_length=1024,
        sleep_on_idle=True,
    )
    yield engine
    engine.shutdown()
    environment.undo()
    # An engine sets logging up for the whole process; later tests read warnings.
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.parametrize("level", [0, 2])
def test_migrating_pages_in_every_step_changes_no_output(
    engine: MigratingEngine, level: int
) -> None:
    """At level 2 also onto lent pages and off them."""
    prompts = PROMPTS[:12]
    assert engine.morph("set_level", level=level).success
    engine.generate(prompts[0], GREEDY)
    assert engine.morph("status").payload["level"] == level
    before = engine.morph("status").payload["migrated_by_test"]
    engine.flush_cache()
    plain = engine.generate(prompts, GREEDY)
    engine.flush_cache()
    ids = [f"{MARK}{i}" for i in range(len(prompts))]
    migrating = engine.generate(prompts, GREEDY, rid=ids)
    assert [a["output_ids"] for a in migrating] == [a["output_ids"] for a in plain]
    # A step has one tick, and every token takes a step.
    moved = engine.morph("status").payload["migrated_by_test"] - before
    assert moved >= PAGES_A_STEP * (GREEDY["max_new_tokens"] - 1)


def test_a_bundles_plan_and_variants_are_served(engine: MigratingEngine, bundle: Bundle) -> None:
    plan, prompt = bundle.plan, PROMPTS[0]
    assert engine.morph("set_level", level=0).success
    full = engine.generate(prompt, GREEDY)
    before = engine.morph("verify").payload
    status = engine.morph("status").payload
    assert status["plan_digest"] == plan.digest
    planned = [list(plan.layer_variants(level)) for level in range(len(plan.levels))]
    assert [list(level["variants"]) for level in status["levels"]] == planned
    assert planned[1] not in (sorted(planned[1]), sorted(planned[1], reverse=True))
    assert engine.morph("set_level", level=plan.max_level).success
    lowered = engine.generate(prompt, GREEDY)
    assert engine.morph("status").payload["level"] == plan.max_level
    assert set(lowered["meta_info"]["morph"]["generated_tokens"]) == {str(plan.max_level)}
    assert lowered["text"].strip().startswith("Paris")
    assert engine.morph("set_level", level=0).success
    engine.flush_cache()
    again = engine.generate(prompt, GREEDY)
    assert again["output_ids"] == full["output_ids"]
    assert engine.morph("verify").payload == before


def test_level_is_set_through_the_engine(engine: MigratingEngine) -> None:
    assert engine.morph("set_level", level=0).success
    engine.generate(PROMPTS[0], GREEDY)
    before = engine.morph("verify").payload
    assert engine.morph("set_level", level=2).success
    engine.generate(PROMPTS[0], GREEDY)
    assert engine.morph("status").payload["level"] == 2
    assert engine.morph("set_level", level=0).success
    engine.generate(PROMPTS[0], GREEDY)
    assert engine.morph("verify").payload == before


def test_a_demand_is_met_and_told_through_the_engine(engine: MigratingEngine) -> None:
    """At level 2, with pages that move: the request waits until precision is back."""
    assert engine.morph("set_level", level=2).success
    engine.generate(PROMPTS[0], GREEDY)
    demand = {"custom_params": {"morph": {"min_precision": "full"}}}
    full = engine.generate(PROMPTS[1], {**GREEDY, **demand}, rid=f"{MARK}demanding")
    lowered = engine.generate(PROMPTS[2], GREEDY)
    assert full["meta_info"]["morph"]["generated_tokens"] == {"0": GREEDY["max_new_tokens"]}
    assert lowered["meta_info"]["morph"]["generated_tokens"].keys() >= {"2"}
    with pytest.raises(ValueError, match="morph.min_precision is 'best'"):
        engine.generate("a", {"custom_params": {"morph": {"min_precision": "best"}}})
    assert engine.morph("set_level", level=0).success


STOCK_SCRIPT = """
import sys
import sglang as sgl

if __name__ == "__main__":
    engine = sgl.Engine(model_path=sys.argv[1], device="cpu", max_total_tokens=512,
                        context_length=512)
    answer = engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 8})
    print("TEXT", answer["text"])
    print("LEVELS", len(engine.get_server_info()["internal_states"][0]["morph"]["levels"]))
    engine.shutdown()
"""


def test_stock_engine_takes_the_flags_from_the_environment(smollm2: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOCK_SCRIPT)
    command = [sys.executable, "-m", "sglang_morph.cli", "exec", "--memory-backend", "layer_swap"]
    command += ["--", sys.executable, str(script), str(smollm2)]
    done = subprocess.run(
        command, env={**os.environ, **STRICT}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Paris" in done.stdout
    assert "LEVELS 5" in done.stdout
