"""On a GPU, in the overlap loop with CUDA graphs: migration at every step, and round trips."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.server.migrating_scheduler import (
    MARK,
    PAGES_A_STEP,
    run_migrating_scheduler_process,
)

MODEL = os.environ.get("MORPH_TEST_MODEL")
"""Folder of a Llama checkpoint or configuration; weights may be made up."""

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(MODEL is None, reason="set MORPH_TEST_MODEL to a Llama model's folder"),
]

GREEDY = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
PROMPTS = [[(i * 7919 + j * 31) % 20_000 + 100 for j in range(200 + 40 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    from sglang_morph.engine import Engine

    class MigratingEngine(Engine):
        run_scheduler_process_func = staticmethod(run_migrating_scheduler_process)

    engine = MigratingEngine(
        model_path=MODEL,
        load_format=os.environ.get("MORPH_TEST_LOAD_FORMAT", "auto"),
        memory_backend="layer_swap",
        morph_policy="manual",
        attention_backend=os.environ.get("MORPH_TEST_ATTENTION", "triton"),
        sampling_backend="pytorch",
        grammar_backend="none",
        mm_feature_transport="cpu",
        context_length=4096,
        max_total_tokens=20_000,
        cuda_graph_max_bs_decode=8,
        cuda_graph_backend_prefill="disabled",
    )
    yield engine
    engine.shutdown()


def _outputs(engine: Any, mark: str) -> list[list[int]]:
    """One request at a time: batches of other sizes round differently."""
    engine.flush_cache()
    return [
        engine.generate(input_ids=prompt, sampling_params=GREEDY, rid=f"{mark}{i}")["output_ids"]
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("level", [0, 1, 3])
def test_migrating_in_every_step_changes_no_output(engine: Any, level: int) -> None:
    assert not engine.server_args.disable_overlap_schedule
    engine.morph("set_level", level=level)
    engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert engine.morph("status").payload["level"] == level
    before = engine.morph("status").payload["migrated_by_test"]
    plain = _outputs(engine, "plain-")
    assert _outputs(engine, MARK) == plain
    # A step has one tick, and every token after a prompt's first takes a step.
    steps = len(PROMPTS) * (int(GREEDY["max_new_tokens"]) - 1)
    moved = engine.morph("status").payload["migrated_by_test"] - before
    assert moved >= PAGES_A_STEP * steps


def test_weights_are_back_after_every_level(engine: Any) -> None:
    engine.morph("set_level", level=0)
    engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    digest, full = engine.morph("verify").payload, _outputs(engine, "a-")
    for level in (1, 2, 3):
        engine.morph("set_level", level=level)
        engine.generate(input_ids=PROMPTS[1], sampling_params=GREEDY)
        engine.morph("set_level", level=0)
        engine.generate(input_ids=PROMPTS[1], sampling_params=GREEDY)
        assert engine.morph("verify").payload == digest
    assert _outputs(engine, "b-") == full
