"""The report's pictures. Colours are Okabe and Ito's; lines also differ in dashes and markers."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from sglang_morph.bench.record import Record
from sglang_morph.bench.results import ArmRun
from sglang_morph.bench.statistics import Slo

_LINES = tuple(
    zip(
        ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
        ("-", "--", "-.", ":", "-", "--", "-."),
        ("o", "s", "^", "D", "v", "P", "X"),
        strict=True,
    )
)
_OWNERS = (
    ("weights, full precision", "#0072B2", ""),
    ("weights, lowered", "#56B4E9", "///"),
    ("KV used by requests", "#D55E00", ""),
    ("KV cached prefixes", "#E69F00", "..."),
    ("KV free", "#DDDDDD", ""),
)
_GIB = 2**30
_MIB = 2**20


def ttft_cdf(records: Mapping[str, Sequence[Record]], slo: Slo) -> Figure:
    """Share of requests whose first token came within a time; failed ones never reach it."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for (arm, runs), (color, dash, _) in zip(records.items(), cycle(_LINES), strict=False):
        outcomes = [outcome for record in runs for outcome in record.outcomes]
        times = sorted(o.ttft_s for o in outcomes if o.ok and o.ttft_s is not None)
        shares = np.arange(1, len(times) + 1) / max(1, len(outcomes))
        axes.step(times, shares, where="post", color=color, linestyle=dash, lw=2, label=arm)
    axes.axvline(slo.ttft_s, color="#777777", lw=1)
    label = f" SLO {slo.ttft_s:g} s "
    axes.text(slo.ttft_s, 0.02, label, color="#555555", rotation=90, ha="right", va="bottom")
    axes.set(xscale="log", ylim=(0, 1.02), xlabel="time to first token (s)")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("share of requests sent")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


Point = tuple[float, float]


def goodput_against_rate(points: Mapping[str, Sequence[Point]]) -> Figure:
    """`points` by arm: requests a second offered, and of those that met the SLO."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for (arm, found), (color, dash, marker) in zip(points.items(), cycle(_LINES), strict=False):
        rates, good = zip(*sorted(found), strict=True)
        axes.plot(rates, good, color=color, linestyle=dash, marker=marker, ms=7, label=arm)
    top = max(rate for found in points.values() for rate, _ in found)
    axes.plot([0, top], [0, top], color="#999999", lw=1, label="all that was offered")
    axes.set(xlabel="requests a second offered", ylabel="requests a second within the SLO")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def timeline(runs: Sequence[tuple[ArmRun, Record]], slo: Slo) -> Figure:
    """A column per run: memory by owner, level, queue with arrivals, misses; one axis of time."""
    figure = Figure(figsize=(max(6.0, 3.1 * len(runs) + 2.4), 8.5), layout="constrained")
    axes = figure.subplots(
        4, len(runs), sharex=True, sharey="row", height_ratios=(4, 1.1, 2, 1.5), squeeze=False
    )
    unit, name = _unit(runs)
    for column, (run, record) in zip(axes.T, runs, strict=True):
        column[0].set_title(run.arm)
        _memory(column[0], run, record, unit)
        _level(column[1], record)
        _queue(column[2], record)
        _misses(column[3], record, slo)
        _mark_changes(column, record)
        column[3].set_xlabel("seconds since the start")
    labels = (f"memory ({name})", "level", "requests", "misses a second")
    for row, label, below in zip(axes, labels, (0.0, 0.15, 0.12, 0.0), strict=True):
        row[0].set_ylabel(label)
        # Only now: a limit set earlier would keep later columns from widening the shared scale.
        top = max(1.1, row[0].get_ylim()[1])
        row[0].set_ylim(bottom=-below * top, top=top)
        handles = row[-1].get_legend_handles_labels()[0]
        if handles:
            row[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes[0, 0].set_xlim(left=0)
    return figure


def _unit(runs: Sequence[tuple[ArmRun, Record]]) -> tuple[float, str]:
    most = max(
        (
            run.fixed_weight_bytes + s.full_bytes + s.lowered_bytes + s.capacity * run.page_bytes
            for run, record in runs
            for s in record.observed.samples
        ),
        default=0.0,
    )
    return (_GIB, "GiB") if most >= 4 * _GIB else (_MIB, "MiB")


def _times(record: Record) -> list[float]:
    return [sample.time - record.observed.started for sample in record.observed.samples]


def _memory(axes: Axes, run: ArmRun, record: Record, unit: float) -> None:
    samples = record.observed.samples
    if not samples:
        axes.text(0.5, 0.5, "no samples", ha="center", transform=axes.transAxes)
        return
    page = run.page_bytes
    series = [
        [(s.full_bytes + run.fixed_weight_bytes) / unit for s in samples],
        [s.lowered_bytes / unit for s in samples],
        [s.used * page / unit for s in samples],
        [s.cached * page / unit for s in samples],
        [s.free * page / unit for s in samples],
    ]
    labels, colors, hatches = zip(*_OWNERS, strict=True)
    areas = axes.stackplot(_times(record), series, labels=labels, colors=colors, step="post")
    for area, hatch in zip(areas, hatches, strict=True):
        area.set(hatch=hatch, edgecolor="#FFFFFF", linewidth=0)


def _level(axes: Axes, record: Record) -> None:
    """From samples, which are a quarter of a second apart, and the exact level changes."""
    started = record.observed.started
    points = [(s.time - started, s.level) for s in record.observed.samples]
    points += [(change["time"] - started, change["to"]) for change in record.observed.transitions]
    points.sort()
    if points:
        times, levels = zip(*points, strict=True)
        axes.step(times, levels, where="post", color="#000000", label="precision level (0: full)")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)


def _mark_changes(column: Sequence[Axes], record: Record) -> None:
    """A line at every level change, through all that happened at that moment."""
    for change in record.observed.transitions:
        for axes in column:
            axes.axvline(
                change["time"] - record.observed.started, color="#000000", lw=0.8, ls=(0, (1, 3))
            )


def _queue(axes: Axes, record: Record) -> None:
    times, samples = _times(record), record.observed.samples
    running = [s.running for s in samples]
    waiting = [s.waiting for s in samples]
    axes.step(times, running, where="post", color="#009E73", lw=2, label="running")
    axes.step(times, waiting, where="post", color="#CC79A7", ls="--", lw=2, label="waiting")
    arrivals = [outcome.at_s for outcome in record.outcomes]
    # In a strip of its own below zero, whatever the scale.
    strip = axes.get_xaxis_transform()
    heights = [0.05] * len(arrivals)
    axes.plot(arrivals, heights, "|k", ms=6, label="arrivals", transform=strip, clip_on=False)
    axes.grid(axis="y", alpha=0.3)


def _misses(axes: Axes, record: Record, slo: Slo) -> None:
    due = [outcome.at_s for outcome in record.outcomes if not slo.met(outcome)]
    end = max((outcome.at_s for outcome in record.outcomes), default=0.0)
    seconds = np.arange(int(end) + 2)
    counts, _ = np.histogram(due, bins=seconds)
    axes.bar(seconds[:-1], counts, width=1.0, align="edge", color="#D55E00", label="SLO misses")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)


def as_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def as_data_url(figure: Figure) -> str:
    return "data:image/png;base64," + base64.b64encode(as_png(figure)).decode("ascii")
