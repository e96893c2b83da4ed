"""What replays and simulations found, as PNG pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sglang_morph.policy_cli.replay import Replay
from sglang_morph.policy_cli.simulation import Outcome

# Okabe and Ito's palette: told apart with any common colour blindness.
_USED, _CAPACITY, _BASE = "#D55E00", "#0072B2", "#999999"
_RECORDED, _POLICY, _WAITING = "#999999", "#0072B2", "#CC79A7"


def draw_replays(replays: Sequence[Replay], path: Path) -> None:
    """A column per policy of one run: pressure above, both levels below."""
    figure = Figure(figsize=(6.5 * len(replays), 6), layout="constrained")
    axes = figure.subplots(2, len(replays), sharex=True, sharey="row", squeeze=False)
    for column, found in enumerate(replays):
        pressure, level = axes[:, column]
        pressure.set_title(found.label)
        run = found.run
        times = [run.since_start(reading.now) for reading in run.readings]
        pressure.step(times, [r.pressure for r in run.readings], where="post", color=_USED)
        pressure.axhline(1.0, color=_BASE, lw=0.8)
        waiting = pressure.twinx()
        waiting.step(times, [r.waiting for r in run.readings], where="post", color=_WAITING)
        waiting.set_ylabel("waiting", color=_WAITING)
        level.step(times, found.recorded_levels, where="post", color=_RECORDED, label="recorded")
        level.step(times, found.levels, where="post", color=_POLICY, label="policy")
        _level_axis(level, run.top_level)
    axes[0][0].set_ylabel("used over base pages", color=_USED)
    axes[1][0].set_ylabel("precision level")
    for axis in axes[1]:
        axis.set_xlabel("seconds")
    axes[1][0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def draw_simulations(
    outcomes: Sequence[tuple[str, Outcome]], base_pages: int, top_level: int, path: Path
) -> None:
    """A row per policy: pages and capacity, the queue, and the level."""
    figure = Figure(figsize=(14, 2.6 * len(outcomes)), layout="constrained")
    axes = figure.subplots(len(outcomes), 3, sharex=True, sharey="col", squeeze=False)
    for row, (label, outcome) in zip(axes, outcomes, strict=True):
        times = [point.at_s for point in outcome.timeline]
        pages, queue, level = row
        pages.set_ylabel(label)
        capacity = [point.capacity for point in outcome.timeline]
        pages.step(times, capacity, where="post", color=_CAPACITY, label="KV pages that exist")
        used = [point.used for point in outcome.timeline]
        pages.step(times, used, where="post", color=_USED, label="in use")
        pages.axhline(base_pages, color=_BASE, lw=0.8)
        waiting = [point.waiting for point in outcome.timeline]
        queue.step(times, waiting, where="post", color=_WAITING)
        levels = [point.level for point in outcome.timeline]
        level.step(times, levels, where="post", color=_POLICY)
        _level_axis(level, top_level)
    for axis, title in zip(axes[0], ("KV pages", "requests waiting", "level"), strict=True):
        axis.set_title(title)
    axes[0][0].legend(frameon=False, fontsize="small")
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.savefig(path, dpi=110)


def _level_axis(axes: Axes, top_level: int) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(-0.2, top_level + 0.2)
