"""Quality against bytes freed. Colours are Okabe and Ito's, grey instead of their yellow, which is
too pale for lines; lines differ in dashes and markers as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_morph.quality.metrics import Interval

LINES = tuple(
    zip(
        ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F"),
        ("-", "--", "-.", ":", "-", "--", "-.", ":"),
        ("o", "s", "^", "D", "v", "P", "X", "*"),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True)
class Point:
    """One level."""

    freed_mib: float
    value: Interval


def draw_lines(axes: Axes, lines: Mapping[str, Sequence[Point]]) -> None:
    """A line with intervals for each name, which are legend labels."""
    for (name, points), (color, dash, marker) in zip(lines.items(), cycle(LINES), strict=False):
        below = [point.value.mean - point.value.low for point in points]
        above = [point.value.high - point.value.mean for point in points]
        axes.errorbar(
            [point.freed_mib for point in points],
            [point.value.mean for point in points],
            yerr=[below, above],
            label=name,
            color=color,
            linestyle=dash,
            marker=marker,
            markersize=6,
            capsize=3,
            linewidth=1.6,
        )
    axes.grid(alpha=0.3)


def quality_against_bytes(
    title: str, change: Mapping[str, Sequence[Point]], kl: Mapping[str, Sequence[Point]]
) -> Figure:
    """Perplexity's change in percent, and KL in nats, by plan; points in order of bytes freed."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    draw_lines(left, change)
    left.axhline(0, color="#777777", linewidth=1)
    left.set(xlabel="weights freed (MiB)", ylabel="change of perplexity (%)")
    draw_lines(right, kl)
    right.set(xlabel="weights freed (MiB)", ylabel="KL(full || level), nats")
    for axes in (left, right):
        axes.set_xlim(left=0)
    right.set_ylim(bottom=0)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure
