import pytest

from benchmarks.readme_table import (
    BEGIN,
    BEGIN_GPU,
    BENCHMARKS,
    END,
    README,
    gpu_table,
    results_section,
    write_section,
)
from tests.benchmarks.test_acceptance import row

ROWS = [
    row("ab.code.static.p95_ttft_s", 12.5, bar=""),
    row("ab.code.static.slo_attainment", 0.5, unit="", bar=""),
    row("ab.code.swap.p95_ttft_s", 6.0, bar=""),
    row("ci/time", 200, unit="s", command=".ci/run"),
    row("demo/layer_swap/completed", 42, unit="requests"),
    row("demo/layer_swap/lowest_capacity", 1280),
    row("demo/layer_swap/peak_capacity", 7000),
    row("demo/layer_swap/weights_identical", True),
    row("demo/static/completed", 42, unit="requests"),
]


def test_demo_rows_are_compared_side_by_side_and_the_rest_is_listed():
    lines = results_section(ROWS).splitlines()
    assert "|  | static | layer_swap |" in lines
    assert "| requests completed | 42 | 42 |" in lines
    assert "| KV capacity, lowest / peak (tokens) |  | 1,280 / 7,000 |" in lines
    assert "| weights identical afterwards |  | yes |" in lines
    assert not any(line.startswith("| retractions") for line in lines)
    assert "| ci/time | 200 s | < 2 | yes | `.ci/run` | a CPU |" in lines
    assert any("`make demo`" in line and "abc123" in line for line in lines)


def test_comparisons_have_a_line_for_each_trace_and_arm():
    lines = results_section(ROWS).splitlines()
    assert "| code | static | 12.5 | 0.5 |  |  |  |  |" in lines
    assert "| code | swap | 6.0 |  |  |  |  |  |" in lines
    assert not any(line.startswith("| ab.") for line in lines)


def test_what_backends_cost_on_a_gpu_is_told_with_the_misses():
    rows = [*ROWS, row("layer_swap.start_ratio", 1.7, unit="side by side", bar="<= 1.6")]
    lines = gpu_table(rows).splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("| layer_swap.start_ratio | 1.7 | side by side | <= 1.6 |")
    assert "abc123" in lines[-1] and "a CPU" in lines[-1]
    assert gpu_table(ROWS) == ""


def test_both_tables_of_one_file_keep_out_of_each_other(tmp_path):
    file = tmp_path / "benchmarks.md"
    file.write_text(f"{BEGIN}\n{END}\nbetween\n{BEGIN_GPU}\n{END}\n")
    write_section(file, "first")
    write_section(file, "second", begin=BEGIN_GPU)
    expected = f"{BEGIN}\n\nfirst\n\n{END}\nbetween\n{BEGIN_GPU}\n\nsecond\n\n{END}\n"
    assert file.read_text() == expected


def test_only_what_stands_between_the_markers_changes(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        write_section(readme, "new")
        assert readme.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


def test_a_readme_without_markers_is_left_alone(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("hello")
    with pytest.raises(ValueError, match="lacks the markers"):
        write_section(readme, "new")
    assert readme.read_text() == "hello"


@pytest.mark.parametrize("file", [README, BENCHMARKS])
def test_the_project_s_files_have_the_markers(file):
    assert BEGIN in file.read_text() and END in file.read_text()
    assert file != BENCHMARKS or BEGIN_GPU in file.read_text()
