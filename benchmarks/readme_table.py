"""Write the measured results into README.md and docs, from `benchmarks/results/acceptance.json`.

python -m benchmarks.readme_table

What stands between the two markers of a file is replaced; everything else stays.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.acceptance import ACCEPTANCE, Row, load
from sglang_morph.bench.measures import AT_LEAST, LESS_THAN

README = Path(__file__).parents[1] / "README.md"
BENCHMARKS = README.parent / "docs" / "benchmarks.md"
BEGIN = "<!-- results: written by python -m benchmarks.readme_table -->"
BEGIN_GPU = "<!-- GPU numbers: written by python -m benchmarks.readme_table -->"
BEGIN_OTHER = "<!-- other numbers: written by python -m benchmarks.readme_table -->"
END = "<!-- end of results -->"

_DEMO = "demo/"
_AB = "ab."
_GPU = ("layer_swap.", "semi_unified.")
_AB_COLUMNS = (
    ("TTFT P95 (s)", "p95_ttft_s", "{:.2f}"),
    ("SLO attainment", "slo_attainment", "{:.1%}"),
    ("requests/s within the SLO", "goodput", "{:.2f}"),
    ("output tokens/s", "throughput", "{:,.4g}"),
    ("tokens at full precision", "full_precision_token_share", "{:.0%}"),
    ("capacity (requests/s)", "capacity_rps", "{:.3g}"),
)
"""Header, last part of the row's name, how it is shown."""
_SHORT = (
    "P95 of the time to first token, share of the requests within the SLO and, where it was "
    "searched, the highest rate sustained (requests/s)"
)
_BOUNDS = {AT_LEAST: "≥ ", LESS_THAN: "< "}
"""Before a value, by its unit."""
_TUNED = "-tuned"
"""Ends the name of a workload whose arms have SGLang's own options set as well as is known."""
_MEASURED = "docs/benchmarks.md#measured"
_ARMS = ("static", "layer_swap")
_DEMO_ROWS = (
    ("requests completed", ("completed",)),
    ("retractions", ("retractions",)),
    ("KV capacity, lowest / peak (tokens)", ("lowest_capacity", "peak_capacity")),
    ("highest precision level", ("highest_level",)),
    ("level changes", ("transitions",)),
    ("TTFT P50 / P95 (s)", ("ttft_p50", "ttft_p95")),
    ("TPOT P50 / P95 (s)", ("tpot_p50", "tpot_p95")),
    ("output tokens", ("output_tokens",)),
    ("wall time (s)", ("wall_time",)),
    ("weights identical afterwards", ("weights_identical",)),
)


def results_section(rows: Sequence[Row]) -> str:
    """Markdown for the README: the demo's comparison, those on traces, and every missed bar."""
    demo = {row.name.removeprefix(_DEMO): row for row in rows if row.name.startswith(_DEMO)}
    parts = [_demo_table(demo)] if demo else []
    parts += [table] if (table := ab_summary(rows)) else []
    parts += [text] if (text := _missed(rows)) else []
    return "\n\n".join(parts)


def other_table(rows: Sequence[Row]) -> str:
    """What is neither of the demo nor of a comparison nor of a backend on a GPU."""
    others = [row for row in rows if not row.name.startswith((_DEMO, _AB, *_GPU))]
    return _plain_table(others) if others else ""


def _missed(rows: Sequence[Row]) -> str:
    barred = [row for row in rows if row.bar]
    missed = [row for row in barred if not row.holds]
    if not barred:
        return ""
    text = (
        f"{len(barred) - len(missed)} of {len(barred)} numbers that have a bar meet it "
        "([all of them](docs/benchmarks.md), raw in "
        "[acceptance.json](benchmarks/results/acceptance.json))."
    )
    return f"{text} Missed:\n\n{_plain_table(missed)}" if missed else text


def _demo_table(demo: dict[str, Row]) -> str:
    lines = [_line("", *_ARMS), _line("---", "---:", "---:")]
    for label, names in _DEMO_ROWS:
        cells = [_cell(demo, [f"{arm}/{name}" for name in names]) for arm in _ARMS]
        if any(cells):
            lines.append(_line(label, *cells))
    return "\n".join([*lines, "", _origin(next(iter(demo.values())))])


def ab_summary(rows: Sequence[Row]) -> str:
    """The comparisons on traces in short: for each processor a column a trace and a line an arm.

    Without a trace that was compared again with every arm tuned.
    """
    parts = [_ab_summary(processor, lines) for processor, lines in _comparisons(rows).items()]
    return "\n\n".join(parts)


def ab_table(rows: Sequence[Row]) -> str:
    """All of them: for each processor a line for each trace and arm."""
    parts = [_ab_table(processor, lines) for processor, lines in _comparisons(rows).items()]
    return "\n\n".join(parts)


Comparisons = dict[tuple[str, str], dict[str, Row]]
"""By trace and arm, then by what was measured."""


def _comparisons(rows: Sequence[Row]) -> dict[str, Comparisons]:
    """By processor, of rows named `ab.TRACE.ARM.what`."""
    found: dict[str, Comparisons] = {}
    for row in rows:
        if row.name.startswith(_AB):
            trace, arm, what = row.name.removeprefix(_AB).split(".", 2)
            found.setdefault(_processor(row), {}).setdefault((trace, arm), {})[what] = row
    return found


def _ab_summary(processor: str, found: Comparisons) -> str:
    compared = {trace for (trace, _), numbers in found.items() if "p95_ttft_s" in numbers}
    found = {key: numbers for key, numbers in found.items() if key[0] + _TUNED not in compared}
    traces = list(dict.fromkeys(trace for trace, _ in found))
    lines = [_line("arm", *traces), _line("---", *("---:" for _ in traces))]
    for arm in sorted({arm for _, arm in found}):
        lines.append(_line(arm, *(_in_short(found.get((trace, arm), {})) for trace in traces)))
    rows = (row for numbers in found.values() for row in numbers.values())
    commands = ", ".join(sorted({f"`{_plan_of(row.command)}`" for row in rows}))
    origin = f"Measured by {commands}; whole commands, dates and commits [here]({_MEASURED})."
    return "\n".join([f"**{processor}**: {_SHORT}", "", *lines, "", origin])


def _plan_of(command: str) -> str:
    """The command without what follows its plan."""
    before, flag, rest = command.partition(" --plan ")
    return before + flag + rest.split(" ")[0]


def _in_short(numbers: dict[str, Row]) -> str:
    """P95 TTFT, share within the SLO, sustained rate: those that were measured."""
    shown = (("p95_ttft_s", "{:.2f} s"), ("slo_attainment", "{:.0%}"), ("capacity_rps", "{:.3g}/s"))
    return ", ".join(_shown(numbers[key], form) for key, form in shown if key in numbers)


def _shown(row: Row, form: str) -> str:
    return _BOUNDS.get(row.unit, "") + form.format(row.value)


def _ab_table(processor: str, arms: Comparisons) -> str:
    header = ["trace", "arm", *(label for label, _, _ in _AB_COLUMNS)]
    lines = [_line(*header), _line("---", "---", *("---:" for _ in _AB_COLUMNS))]
    for (trace, arm), numbers in arms.items():
        cells = (
            _shown(numbers[key], form) if key in numbers else "" for _, key, form in _AB_COLUMNS
        )
        lines.append(_line(trace, arm, *cells))
    origins = {_origin(row) for numbers in arms.values() for row in numbers.values()}
    return "\n".join([f"**{processor}**", "", *lines, "", *sorted(origins)])


def _processor(row: Row) -> str:
    return row.hardware.partition(",")[0]


def _cell(demo: dict[str, Row], names: Sequence[str]) -> str:
    return " / ".join(_text(demo[name].value) for name in names if name in demo)


def _plain_table(rows: Sequence[Row]) -> str:
    lines = [
        _line("number", "value", "bar", "holds", "command", "hardware"),
        _line("---", "---:", "---", "---", "---", "---"),
    ]
    for row in rows:
        value = f"{_text(row.value)} {row.unit}".strip()
        command, holds = row.command.partition(" --")[0], _text(row.holds)
        lines.append(_line(row.name, value, row.bar, holds, f"`{command}`", _processor(row)))
    return "\n".join(lines)


def gpu_table(rows: Sequence[Row]) -> str:
    """What the backends cost on a GPU, a line for each number."""
    lines = [_line("number", "value", "", "bar", "holds"), _line("---", "---:", *["---"] * 3)]
    found = [row for row in rows if row.name.startswith(_GPU)]
    for row in found:
        lines.append(_line(row.name, _text(row.value), row.unit, row.bar, _text(row.holds)))
    measured = {(row.date[:10], row.hardware, row.commit) for row in found}
    origins = [
        f"Measured on {day}, {hardware}, at commit {commit}."
        for day, hardware, commit in sorted(measured)
    ]
    return "\n".join([*lines, "", *origins]) if found else ""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: float | str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else value


def _origin(row: Row) -> str:
    return (
        f"Measured by `{row.command}` on {row.date[:10]}, {row.hardware}, at commit {row.commit}."
    )


def write_section(file: Path, section: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace what stands between the markers. Raises ValueError where one is missing."""
    before, found_begin, rest = file.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{file} lacks the markers {begin!r} and {end!r}")
    file.write_text(f"{before}{begin}\n\n{section}\n\n{end}{after}", encoding="utf-8")


def main() -> None:
    rows = load(ACCEPTANCE)
    if not rows:
        sys.exit(f"{ACCEPTANCE} has no rows yet: run `make record` first")
    write_section(README, results_section(rows))
    write_section(BENCHMARKS, ab_table(rows))
    write_section(BENCHMARKS, gpu_table(rows), begin=BEGIN_GPU)
    write_section(BENCHMARKS, other_table(rows), begin=BEGIN_OTHER)


if __name__ == "__main__":
    main()
