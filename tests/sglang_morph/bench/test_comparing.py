import struct
from pathlib import Path

import orjson
import pytest

from sglang_morph.bench.bootstrap import estimate, paired_ratio
from sglang_morph.bench.exposure import (
    full_precision_share,
    level_changes,
    prefilled_by_level,
    quality_score,
    take_exposure,
    tokens_by_level,
)
from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.results import ArmRun
from sglang_morph.bench.routes import make_route
from sglang_morph.bench.server_control import memory_of
from sglang_morph.bench.sweep import Capacity, Try, next_rate


def test_medians_with_intervals():
    found = estimate([3.0, 1.0, 2.0, 5.0, 4.0])
    assert found.median == 3.0 and found.runs == 5
    assert 1.0 <= found.low <= 3.0 <= found.high <= 5.0
    assert estimate([3.0, 1.0, 2.0, 5.0, 4.0]) == found
    assert estimate([2.0, 2.0, 2.0]).low == estimate([2.0, 2.0]).high == 2.0
    assert estimate([7.0]).low is None
    assert estimate([]) is None


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    import numpy as np

    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(100):
        found = estimate(list(rng.normal(10.0, 2.0, size=20)), seed=trial)
        hits += found.low <= 10.0 <= found.high
    assert hits >= 88


def test_ratios_are_taken_within_a_block():
    # Machine 1 is ten times slower: unpaired medians would hide that the arm takes half the time.
    found = paired_ratio({0: [1.0], 1: [10.0]}, {0: [2.0], 1: [20.0]})
    assert found.median == found.low == found.high == 0.5
    assert paired_ratio({0: [1.0]}, {1: [2.0]}) is None
    assert paired_ratio({0: [1.0]}, {0: [0.0]}) is None
    assert paired_ratio({0: [3.0]}, {0: [1.0, 2.0]}).median == 2.0


EVENTS = [
    {"kind": "signals", "time": 101.0},
    {"kind": "transition", "result": "completed", "time": 102.0, "to": 2},
    {"kind": "transition", "result": "started", "time": 103.0, "to": 0},
    {"kind": "transition", "result": "completed", "time": 104.0, "to": 0},
]


def test_tokens_are_counted_at_the_level_when_they_came():
    outcome = Outcome(
        0, 0.0, 1, 6, output_tokens=6, arrivals_s=[1.0, 2.5, 3.5, 4.5], arrival_tokens=[1, 2, 1, 2]
    )
    tokens = tokens_by_level([outcome], 100.0, level_changes(EVENTS))
    assert tokens == {0: 3, 2: 3}
    assert full_precision_share(tokens) == 0.5
    assert full_precision_share({}) is None
    assert tokens_by_level([outcome], 100.0, []) == {0: 6}


TOLD = {
    "generated_tokens": {"0": 3, "2": 1},
    "prefilled_tokens": {"2": 30},
    "reused_lowered_tokens": 12,
}


def test_what_the_server_tells_of_the_levels_counts_before_arrival_times():
    outcome = Outcome(0, 0.0, 42, 4, output_tokens=4, arrivals_s=[1.0, 2.5], arrival_tokens=[2, 2])
    other = Outcome(1, 0.0, 42, 1, output_tokens=1, arrivals_s=[2.6], arrival_tokens=[1])
    take_exposure({"id": "x"}, outcome)
    assert outcome.generated_by_level is None and outcome.reused_lowered is None
    take_exposure({"morph": TOLD}, outcome)
    assert outcome.generated_by_level == [3, 0, 1] and outcome.reused_lowered == 12
    assert tokens_by_level([outcome, other], 100.0, level_changes(EVENTS)) == {0: 3, 2: 2}
    assert prefilled_by_level([outcome, other]) == {2: 30}


def test_generate_tells_it_with_the_last_token():
    meta = {"completion_tokens": 4, "prompt_tokens": 42, "finish_reason": None}
    outcome = Outcome(0, 0.0, 42, 4)
    make_route("sglang", "").take({"meta_info": meta}, outcome, 0.5)
    assert outcome.prefilled_by_level is None
    make_route("sglang", "").take({"meta_info": {**meta, "morph": TOLD}}, outcome, 1.0)
    assert outcome.prefilled_by_level == [0, 0, 30]


def test_quality_is_weighted_by_tokens_and_unknown_where_a_level_has_none():
    assert quality_score({0: 30, 2: 10}, {0: 0.8, 2: 0.4}) == pytest.approx(0.7)
    assert quality_score({0: 30, 2: 10}, {0: 0.8}) is None
    assert quality_score({}, {0: 0.8}) is None


def capacity_of(limit, low=1.0, high=16.0, steps=8):
    tries = []
    while (rate := next_rate(tries, low, high, steps, wanted=0.9)) is not None:
        tries.append(Try(rate, 1.0 if rate <= limit else 0.5, rate))
    return Capacity("arm", "code", 0.9, tries, over=True), [t.rate for t in tries]


def test_bisection_finds_the_saturation_point():
    found, tried = capacity_of(limit=5.0)
    assert found.sustained <= 5.0 < found.failed
    assert found.failed / found.sustained == pytest.approx(16 ** (1 / 256))
    assert len(tried) == 8 and tried[0] == 4.0


def test_a_capacity_beyond_the_search_is_neared_from_within():
    found, tried = capacity_of(limit=0.5, steps=3)
    assert found.sustained is None and tried == pytest.approx([4.0, 2.0, 2.0**0.5])
    found, tried = capacity_of(limit=100.0, steps=3)
    assert found.failed is None and found.sustained == tried[-1] == pytest.approx(8 * 2.0**0.5)
    assert capacity_of(limit=5.0, steps=1)[1] == [4.0]


def run_with(memory):
    return ArmRun(0, "arm", Path(), {"memory": memory}, {})


def test_sizes_are_taken_from_what_the_server_tells():
    sglang = {"weight": 2.0, "kvcache": 1.0, "token_capacity": 1024}
    morph = {"bytes": {"kv_base": 1024 * 100, "full_weights": 2**30}, "base_tokens": 1023}
    static = run_with({"sglang": sglang})
    assert (static.page_bytes, static.fixed_weight_bytes) == (2**20, 0.0)
    moving = run_with({"sglang": sglang, "morph": morph})
    assert (moving.page_bytes, moving.fixed_weight_bytes) == (100, 2**30)
    assert (static.total_bytes, moving.total_bytes) == (3 * 2**30, 2 * 2**30 + 1024 * 100)
    assert run_with({}).total_bytes is None
    assert run_with({}).page_bytes == run_with({"sglang": None}).fixed_weight_bytes == 0


def write_checkpoint(folder):
    tensors = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F16", "shape": [8, 16], "data_offsets": [0, 256]},
        "b": {"dtype": "I32", "shape": [4], "data_offsets": [256, 272]},
    }
    header = orjson.dumps(tensors)
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(272))


def test_weights_on_a_cpu_are_counted_since_free_memory_does_not_tell(tmp_path):
    usage = {"weight": 0.1, "kvcache": 1.0}
    info = {"internal_states": [{"memory_usage": usage}], "model_path": str(tmp_path)}
    info |= {"device": "cpu", "dtype": "float32"}
    assert memory_of(info) == usage
    write_checkpoint(tmp_path)
    assert memory_of(info)["weight"] * 2**30 == 4 * 8 * 16 + 16
    assert memory_of({**info, "device": "cuda"}) == usage
    assert memory_of({**info, "dtype": "auto"}) == usage
    assert memory_of({}) is memory_of(None) is None
