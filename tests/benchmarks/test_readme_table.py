import pytest

from benchmarks.readme_table import (
    BEGIN,
    BEGIN_GPU,
    BEGIN_OTHER,
    BENCHMARKS,
    END,
    README,
    ab_summary,
    ab_table,
    gpu_table,
    other_table,
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


def test_demo_rows_are_compared_side_by_side():
    lines = results_section(ROWS).splitlines()
    assert "|  | static | layer_swap |" in lines
    assert "| requests completed | 42 | 42 |" in lines
    assert "| KV capacity, lowest / peak (tokens) |  | 1,280 / 7,000 |" in lines
    assert "| weights identical afterwards |  | yes |" in lines
    assert not any(line.startswith("| retractions") for line in lines)
    assert any("`make demo`" in line and "abc123" in line for line in lines)


def test_comparisons_have_a_line_for_each_trace_and_arm():
    faster = row("ab.code.swap.capacity_rps", 4.2, bar="", hardware="a GPU, 8 cores")
    lines = ab_table([*ROWS, faster]).splitlines()
    assert "| code | static | 12.50 | 50.0% |  |  |  |  |" in lines
    assert "| code | swap | 6.00 |  |  |  |  |  |" in lines
    assert lines.index("**a CPU**") < lines.index("**a GPU**")
    assert lines.index("**a GPU**") < lines.index("| code | swap |  |  |  |  |  | 4.2 |")
    assert any("`make demo`" in line and "abc123" in line for line in lines)


def test_the_readme_has_a_column_for_each_trace_and_a_line_for_each_arm():
    more = [
        row("ab.chat.static.p95_ttft_s", 3.0, bar=""),
        row("ab.chat.static.capacity_rps", 4.2, bar="", command="x sweep --plan p.toml --output r"),
        row("ab.chat.swap.capacity_rps", 9.0, unit="requests/s or more", bar=""),
        row("ab.chat.slow.capacity_rps", 1.5, unit="requests/s, and less", bar=""),
    ]
    lines = results_section([*ROWS, *more]).splitlines()
    assert "| arm | code | chat |" in lines
    assert "| static | 12.50 s, 50% | 3.00 s, 4.2/s |" in lines
    assert "| swap | 6.00 s | ≥ 9/s |" in lines
    assert "| slow |  | < 1.5/s |" in lines
    assert not any(line.startswith("| ab.") for line in lines)
    assert any("`make demo`, `x sweep --plan p.toml`;" in line for line in lines)


def test_a_trace_that_was_compared_again_with_tuned_arms_is_not_in_short():
    searched = row("ab.code-tuned.swap.capacity_rps", 9.0, bar="")
    assert "| arm | code | code-tuned |" in ab_summary([*ROWS, searched]).splitlines()
    compared = row("ab.code-tuned.swap.p95_ttft_s", 1.0, bar="")
    assert "| arm | code-tuned |" in ab_summary([*ROWS, compared]).splitlines()


def test_the_readme_lists_the_numbers_that_miss_their_bar_and_no_other():
    text = results_section([*ROWS, row("policy.tick", 3.0, holds=False)])
    assert "6 of 7 numbers that have a bar meet it" in text
    assert "| policy.tick | 3.0 s | < 2 | no | `make demo` | a CPU |" in text
    assert "ci/time" not in text and "Missed" not in results_section(ROWS)


def test_numbers_that_no_other_table_has_are_listed():
    rows = [*ROWS, row("layer_swap.start_ratio", 1.7)]
    lines = other_table(rows).splitlines()
    assert lines[2:] == ["| ci/time | 200 s | < 2 | yes | `.ci/run` | a CPU |"]
    assert other_table([]) == ""


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
    assert file != BENCHMARKS or all(m in file.read_text() for m in (BEGIN_GPU, BEGIN_OTHER))
