"""The demo's picture: who owns the memory, the precision level and the queue, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sglang_morph.demo.arm import ArmRun

# Okabe and Ito's palette: told apart with any common colour blindness.
_OWNERS = (
    ("weights, full precision", "#0072B2"),
    ("weights, lowered", "#56B4E9"),
    ("KV used by requests", "#D55E00"),
    ("KV cached prefixes", "#E69F00"),
    ("KV free", "#DDDDDD"),
)
_LEVEL_COLOR = "#000000"
_WAITING_COLOR = "#CC79A7"
_RUNNING_COLOR = "#009E73"
_ROWS = (("memory (MiB)", 0.0), ("precision level", -0.2), ("requests", -1.0))
"""Label and lower limit of each row's vertical axis."""
_MIB = 2**20


def draw_timeline(runs: Sequence[ArmRun], page_bytes: int, path: Path) -> None:
    """Write a PNG with one column per arm; all share the axes' scales."""
    figure = Figure(figsize=(7.5 * len(runs), 8.5), layout="constrained")
    axes = figure.subplots(3, len(runs), sharex=True, sharey="row", height_ratios=(4, 1.2, 2))
    for column, run in enumerate(runs):
        memory, level, queue = axes[:, column]
        memory.set_title(f"--memory-backend {run.setup.backend}")
        _draw_memory(memory, run, page_bytes)
        _draw_level(level, run)
        _draw_queue(queue, run)
    for row, (label, bottom) in zip(axes, _ROWS, strict=True):
        row[0].set_ylabel(label)
        # Only now: a limit set earlier would keep later arms from widening the shared scale.
        row[0].set_ylim(bottom=bottom)
        row[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes[0, 0].set_xlim(left=0.0)
    figure.savefig(path, dpi=120)


def _draw_memory(axes: Axes, run: ArmRun, page_bytes: int) -> None:
    samples = run.samples
    series = [
        [s.full_bytes / _MIB for s in samples],
        [s.lowered_bytes / _MIB for s in samples],
        [s.used * page_bytes / _MIB for s in samples],
        [s.cached * page_bytes / _MIB for s in samples],
        [s.free * page_bytes / _MIB for s in samples],
    ]
    labels, colors = zip(*_OWNERS, strict=True)
    axes.stackplot(_times(run), series, labels=labels, colors=colors, step="post")


def _draw_level(axes: Axes, run: ArmRun) -> None:
    levels = [sample.level for sample in run.samples]
    axes.step(_times(run), levels, where="post", color=_LEVEL_COLOR, label="level (0 is full)")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)


def _draw_queue(axes: Axes, run: ArmRun) -> None:
    times = _times(run)
    waiting = [sample.waiting for sample in run.samples]
    running = [sample.running for sample in run.samples]
    axes.step(times, running, where="post", color=_RUNNING_COLOR, label="running")
    axes.step(times, waiting, where="post", color=_WAITING_COLOR, label="waiting")
    arrivals = [result.sent_s for result in run.results]
    axes.plot(arrivals, [0.0] * len(arrivals), "|", color=_LEVEL_COLOR, ms=9, label="arrivals")
    axes.set_xlabel("seconds since the start of the burst")
    axes.grid(axis="y", alpha=0.3)


def _times(run: ArmRun) -> list[float]:
    return [sample.time - run.started for sample in run.samples]
