"""Write the measured results into README.md, from `benchmarks/results/acceptance.json`.

python -m benchmarks.readme_table

What stands between the two markers is replaced; everything else stays.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.acceptance import ACCEPTANCE, Row, load

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- results: written by python -m benchmarks.readme_table -->"
END = "<!-- end of results -->"

_DEMO = "demo/"
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
    """Markdown: the demo's comparison, then every other number, also where it misses its bar."""
    demo = {row.name.removeprefix(_DEMO): row for row in rows if row.name.startswith(_DEMO)}
    others = [row for row in rows if not row.name.startswith(_DEMO)]
    parts = [_demo_table(demo)] if demo else []
    parts += [_plain_table(others)] if others else []
    return "\n\n".join(parts)


def _demo_table(demo: dict[str, Row]) -> str:
    lines = [_line("", *_ARMS), _line("---", "---:", "---:")]
    for label, names in _DEMO_ROWS:
        cells = [_cell(demo, [f"{arm}/{name}" for name in names]) for arm in _ARMS]
        if any(cells):
            lines.append(_line(label, *cells))
    return "\n".join([*lines, "", _origin(next(iter(demo.values())))])


def _cell(demo: dict[str, Row], names: Sequence[str]) -> str:
    return " / ".join(_text(demo[name].value) for name in names if name in demo)


def _plain_table(rows: Sequence[Row]) -> str:
    lines = [
        _line("number", "value", "bar", "holds", "command", "hardware"),
        _line("---", "---:", "---", "---", "---", "---"),
    ]
    for row in rows:
        value = f"{_text(row.value)} {row.unit}".strip()
        command, hardware = row.command.partition(" --")[0], row.hardware.partition(",")[0]
        holds = _text(row.holds)
        lines.append(_line(row.name, value, row.bar, holds, f"`{command}`", hardware))
    note = (
        "Whole commands, dates, commits and raw data are in "
        "[acceptance.json](benchmarks/results/acceptance.json)."
    )
    return "\n".join([*lines, "", note])


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


def write_section(readme: Path, section: str) -> None:
    """Replace what stands between the markers. Raises ValueError where one is missing."""
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} lacks the markers {BEGIN!r} and {END!r}")
    readme.write_text(f"{before}{BEGIN}\n\n{section}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    rows = load(ACCEPTANCE)
    if not rows:
        sys.exit(f"{ACCEPTANCE} has no rows yet: run `make record` first")
    write_section(README, results_section(rows))


if __name__ == "__main__":
    main()
