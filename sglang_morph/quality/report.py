"""Writes a quality report: JSON, a Markdown table, and a picture as PNG and SVG."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec

from sglang_morph.quality.figure import Point, quality_against_bytes
from sglang_morph.quality.metrics import Interval, mean_interval
from sglang_morph.quality.results import QualityReport
from sglang_morph.quality.tables import loss_change, markdown, notes, table

_MIB = 1 << 20


def write_report(report: QualityReport, folder: Path) -> list[Path]:
    """The files written; `folder` is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "quality.json", folder / "quality.md"
    data.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    lines = [f"# Quality of {report.model}", markdown(table(report)), *notes(report)]
    text.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return [data, text, *_draw(report, folder)]


def read_report(path: Path) -> QualityReport:
    """Raises OSError or `msgspec.ValidationError`."""
    return msgspec.json.decode(path.read_bytes(), type=QualityReport)


def _draw(report: QualityReport, folder: Path) -> list[Path]:
    full = report.results[0].text
    change: dict[str, list[Point]] = defaultdict(list)
    kl: dict[str, list[Point]] = defaultdict(list)
    for result in report.results[1:]:
        if full is not None and result.text is not None:
            freed = result.freed_bytes / _MIB
            change[result.plan].append(Point(freed, _percent(loss_change(result.text, full))))
            kl[result.plan].append(Point(freed, mean_interval(result.text.kl)))
    if not kl:
        return []
    figure = quality_against_bytes(report.model, change, kl)
    files = [folder / "quality.png", folder / "quality.svg"]
    for file in files:
        figure.savefig(file, dpi=130)
    return files


def _percent(value: Interval) -> Interval:
    return Interval(100 * value.mean, 100 * value.low, 100 * value.high)
