import io
import math

import orjson
import pytest
from rich.console import Console

from sglang_morph.demo.arm import WeightsCheck
from sglang_morph.demo.provenance import Provenance
from sglang_morph.demo.report import (
    checks,
    checks_table,
    comparison_table,
    measures,
    summarize,
    write_results,
)
from tests.sglang_morph.demo.make_run import BASE, morph_run, result, sample, static_run

ORIGIN = Provenance("make demo", "abc123", "2030-01-01T00:00:00+00:00", "a CPU")


def broken(run):
    """Names of the checks that don't hold for this layer_swap run, without their arm."""
    found = checks(summarize(static_run()), summarize(run))
    return [check.name.rpartition("/")[2] for check in found if not check.holds]


def test_summary_of_a_morphing_run():
    summary = summarize(morph_run(retractions=1))
    assert (summary.requests, summary.completed, summary.failed) == (3, 3, 0)
    assert (summary.capacity_lowest, summary.capacity_peak) == (BASE, BASE + 500)
    assert (summary.capacity_first, summary.capacity_last) == (BASE, BASE)
    # Level 1 was only passed while restoring.
    assert summary.levels == [0, 2, 0]
    assert summary.ttft_p50 == pytest.approx(2.0)
    assert summary.tpot_p50 == pytest.approx(0.1)
    assert (summary.output_tokens, summary.transitions, summary.retractions) == (15, 2, 1)
    assert summary.weights_identical is True


def test_all_checks_hold_for_a_good_pair():
    assert broken(morph_run()) == []


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"results": [result(0), result(1, tokens=2)]}, ["completed"]),
        ({"samples": [sample(0), sample(1)], "transitions": []},
         ["highest_level", "peak_capacity"]),
        ({"samples": [sample(0), sample(1, level=1)]}, ["peak_capacity"]),
        ({"samples": [sample(0), sample(1, level=1, lent=9)]}, ["final_capacity"]),
        ({"samples": [sample(0, lent=9), sample(1, level=1, lent=99), sample(2, lent=9)]},
         ["base_capacity"]),
        ({"weights": WeightsCheck("abc", "abd", 0)}, ["weights_identical"]),
        ({"weights": WeightsCheck("abc", "abc", 1)}, ["final_level"]),
        ({"weights": None}, ["weights_identical"]),
    ],
)  # fmt: skip
def test_each_check_finds_what_it_is_there_for(changes, names):
    assert broken(morph_run(**changes)) == names


def test_a_failed_request_of_the_static_arm_counts_too():
    static = summarize(static_run(results=[result(0, error="HTTP 500")]))
    first, *others = checks(static, summarize(morph_run()))
    assert first.name == "demo/static/completed" and not first.holds
    assert all(check.holds for check in others)


def test_no_answer_at_all_is_reported_not_raised():
    summary = summarize(static_run(results=[]))
    assert math.isnan(summary.ttft_p95) and summary.output_tokens == 0
    assert not any("ttft" in measure.name for measure in measures(summary))


def test_names_are_unique_and_say_the_arm():
    static, morph = summarize(static_run()), summarize(morph_run())
    names = [m.name for m in [*checks(static, morph), *measures(static), *measures(morph)]]
    assert len(set(names)) == len(names)
    assert {name.split("/")[1] for name in names} == {"static", "layer_swap"}


def test_tables_show_both_arms():
    static, morph = summarize(static_run()), summarize(morph_run())
    console = Console(width=120, file=io.StringIO())
    console.print(comparison_table([static, morph]), checks_table(checks(static, morph)))
    text = console.file.getvalue()
    assert "1,000 / 1,500" in text and "0 > 2 > 0" in text
    assert "identical bytes" in text and "not touched" in text


def test_results_file_has_every_request_and_its_origin(tmp_path):
    runs = [static_run(), morph_run()]
    summaries = [summarize(run) for run in runs]
    path = tmp_path / "results.json"
    write_results(path, runs, summaries, checks(*summaries), ORIGIN)
    content = orjson.loads(path.read_bytes())
    assert content["command"] == "make demo" and content["commit"] == "abc123"
    assert all(check["holds"] for check in content["measures"])
    static, morph = content["arms"]
    assert [request["ok"] for request in static["requests"]] == [True] * 3
    assert static["requests"][1]["ttft_s"] == pytest.approx(2.0)
    assert static["weights"] is None and morph["weights"]["after"] == "abc"
