import pytest

from benchmarks.acceptance import load, upsert
from benchmarks.record_demo import record_demo
from sglang_morph.demo.provenance import Provenance
from sglang_morph.demo.report import checks, measures, summarize, write_results
from tests.benchmarks.test_acceptance import row
from tests.sglang_morph.demo.make_run import morph_run, result, static_run

ORIGIN = Provenance("sglang-morph demo", "abc123", "2030-01-01T00:00:00+00:00", "a CPU")


def test_every_number_of_the_demo_gets_a_row_and_the_raw_data_is_kept(tmp_path):
    runs = [static_run(), morph_run(results=[result(0), result(1, error="HTTP 500")])]
    static, morph = summaries = [summarize(run) for run in runs]
    found = [*checks(static, morph), *measures(static), *measures(morph)]
    source = tmp_path / "results.json"
    write_results(source, runs, summaries, found, ORIGIN)
    acceptance = tmp_path / "benchmarks" / "results" / "acceptance.json"
    upsert([row("ci/time", 1)], acceptance)

    record_demo(source, acceptance)

    rows = {r.name: r for r in load(acceptance)}
    assert rows.keys() == {"ci/time", *(measure.name for measure in found)}
    failed = rows["demo/layer_swap/completed"]
    assert (failed.value, failed.bar, failed.holds) == (1, "= 2", False)
    assert (failed.command, failed.commit) == (ORIGIN.command, ORIGIN.commit)
    assert rows["demo/static/ttft_p50"].value == pytest.approx(2.0)
    raw = tmp_path / failed.raw
    assert failed.raw == "benchmarks/results/demo.json"
    assert raw.read_bytes() == source.read_bytes()


def test_a_file_that_is_no_result_is_refused(tmp_path):
    source = tmp_path / "results.json"
    source.write_text("{}")
    acceptance = tmp_path / "benchmarks" / "results" / "acceptance.json"
    with pytest.raises(KeyError):
        record_demo(source, acceptance)
    assert not acceptance.exists()
