"""Writes a comparison as one HTML file without outside resources, and as Markdown tables."""

from __future__ import annotations

import html
from pathlib import Path

from sglang_morph.bench import tables
from sglang_morph.bench.arm_run import CONTROL
from sglang_morph.bench.figures import as_data_url, goodput_against_rate, timeline, ttft_cdf
from sglang_morph.bench.measures import write_measures
from sglang_morph.bench.results import Comparison, load_comparison
from sglang_morph.bench.sweep import Capacity, read_capacities

_EQUAL = 1.02
"""Largest ratio of two arms' memory that counts as equal: pages and padding differ a little."""
_WARNING = "WARNING:"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 78rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ccc; text-align: right;
  vertical-align: top; }
th { border-bottom: 2px solid #555; }
th:first-child, td:first-child, .left td, .left th { text-align: left; }
.left td:last-child { overflow-wrap: anywhere; min-width: 20rem; }
.wide { overflow-x: auto; }
img { max-width: 100%; }
.note { background: #fff4d6; border-left: 4px solid #e69f00; padding: .5rem 1rem; }
details { margin: 1rem 0; }
"""


def write_report(folder: Path) -> tuple[Path, Path]:
    """Write `report.html`, `report.md` and `measures.json` into `folder`. Raises `PlanError`."""
    found = load_comparison(folder)
    capacities = read_capacities(folder)
    page, text = folder / "report.html", folder / "report.md"
    page.write_text(_page(found, capacities), encoding="utf-8")
    text.write_text(_markdown(found, capacities), encoding="utf-8")
    write_measures(folder / "measures.json", found, capacities)
    return page, text


def notes(found: Comparison) -> list[str]:
    """What a reader must know before the numbers."""
    slo, plan = found.slo, found.plan
    gap = (
        "; gaps don't count"
        if slo.max_gap_s is None
        else (
            f" and no gap above {1000 * slo.max_gap_s:.0f} ms "
            f"({slo.gap_factor:g} x {1000 * (slo.base_tbt_s or 0):.1f} ms)"
        )
    )
    origin = found.runs[0].report["origin"]
    lines = [
        f"SLO: first token within {slo.ttft_s:g} s{gap}. Failed requests are misses. "
        "Latencies count from when a request was due.",
        "Medians over runs, with 95% bootstrap intervals over runs in brackets; ratios are over "
        f"the {plan.reference_arm} run of the same block. The best median is starred.",
        f"{_how_far(found)} Warm-up is left out, the drain is in.",
        f"Measured on {origin['hardware']}, commit {origin['commit']}, "
        f"{origin['date'][:10]}, by {origin['command']}.",
    ]
    card = found.description["card"]
    lines.append(
        card["text"]
        if card
        else "No smaller card is emulated: each arm has the memory its command gives it (below)."
    )
    if (uneven := _uneven_memory(found)) is not None:
        lines.append(uneven)
    if made_up := [arm.name for arm in plan.arms if not arm.real_weights]:
        lines.append(f"Made-up weights, so no quality is shown: {', '.join(made_up)}.")
    if any(float(v or 0) > 0.005 for v in _lateness(found)):
        lines.append(f"{_WARNING} the replayer was more than 5 ms late (P99) in some runs.")
    return lines


def _how_far(found: Comparison) -> str:
    if found.plan.servers == "fresh":
        return f"{len(found.runs)} of {found.planned} runs are done. Every run is a fresh server."
    turns = sum(len(run.records) for run in found.runs)
    repeated = found.planned // len(found.plan.arms)
    planned = repeated * sum(
        len(found.plan.arms_of(workload["name"])) for workload in found.description["workloads"]
    )
    return (
        f"{turns} of {planned} turns are done. The servers of all arms ran on one machine at the "
        "same time and took turns, each flushed and at rest at its level before its turn, while "
        "the others were idle."
    )


def _uneven_memory(found: Comparison) -> str | None:
    """A warning if the arms don't have the same memory for weights and KV cache together."""
    sizes: dict[str, float] = {}
    for run in found.runs:
        if (size := run.total_bytes) is not None:
            sizes[run.arm] = size / 2**30
    if not sizes or max(sizes.values()) <= _EQUAL * min(sizes.values()):
        return None
    told = ", ".join(f"{arm} {size:.2f} GiB" for arm, size in sizes.items())
    return f"{_WARNING} the arms differ in memory for weights and KV cache together: {told}."


def _lateness(found: Comparison) -> list[float | None]:
    return [
        values["p99_lateness_s"]
        for arm in found.arms
        for workload in (CONTROL, *found.workloads)
        for _, values in found.values(arm, workload)
    ]


def _page(found: Comparison, capacities: list[Capacity]) -> str:
    parts = [f"<h1>{html.escape(found.plan.name)}</h1>"]
    parts.append(_notes(notes(found)))
    parts += ["<h2>Arms</h2>", _table(tables.arms_table(found), "left")]
    parts.append(_table(tables.control_table(found), "left"))
    for workload in found.workloads:
        parts.append(_workload_section(found, workload))
    parts += [_goodput(found, capacities), _capacity_section(capacities)]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(found.plan.name)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _notes(lines: list[str]) -> str:
    """Warnings in a box of their own, before the rest."""
    boxes = [line for line in lines if line.startswith(_WARNING)]
    items = [line for line in lines if not line.startswith(_WARNING)]
    parts = [f'<p class="note">{html.escape(line)}</p>' for line in boxes]
    parts.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in items) + "</ul>")
    return "\n".join(parts)


def _workload_section(found: Comparison, workload: str) -> str:
    records = {arm: [r for _, r in found.records(arm, workload)] for arm in found.arms}
    records = {arm: runs for arm, runs in records.items() if runs}
    if not records:
        return ""
    first_runs = [
        next(
            (run, run.records[workload])
            for run in found.runs
            if run.arm == arm and workload in run.records
        )
        for arm in records
    ]
    transitions = tables.transitions_table(found, workload)
    parts = [
        f"<h2>{html.escape(workload)}</h2>",
        f"<p>{html.escape(describe_workload(found, workload))}</p>",
        _table(tables.measures_table(found, workload)),
        _table(tables.ratios_table(found, workload)),
        _image(
            as_data_url(ttft_cdf(records, found.slo)),
            f"Time to first token, share of requests, per arm, {workload}",
        ),
        _image(
            as_data_url(timeline(first_runs, found.slo)),
            f"Memory by owner, precision level, queue, arrivals and misses over time, {workload}, "
            "the first run of each arm",
        ),
    ]
    if transitions:
        shown = _table(transitions, "left")
        parts.append(f"<details><summary>Level changes</summary>{shown}</details>")
    return "\n".join(part for part in parts if part)


def describe_workload(found: Comparison, workload: str) -> str:
    made = next(w for w in found.description["workloads"] if w["name"] == workload)
    origin = made["origin"]
    text = (
        f"{made['requests']} requests in {made['duration_s']:.1f} s "
        f"({made['requests'] / made['duration_s']:.2f}/s) of {origin['trace']} "
        f"({origin['format']}) "
        f"from second {origin['window_start_s']:.1f} on; rate x{origin['factor']:.3g} by "
        f"{origin['scaling']}, seed {origin['seed']}; prompts {made['digest'][:12]}."
    )
    if origin["token_factor"] != 1:
        text += f" Token counts x{origin['token_factor']:g}."
    if origin["cut_to_limit"]:
        text += f" {origin['cut_to_limit']} requests were cut to the token limit."
    if origin["skipped"]:
        left_out = ", ".join(f"{count} {reason}" for reason, count in origin["skipped"].items())
        text += f" Left out of the trace: {left_out}."
    return text


def _goodput(found: Comparison, capacities: list[Capacity]) -> str:
    """A picture for each trace that was sent at several rates."""
    pictures = [
        _image(
            as_data_url(goodput_against_rate(points)),
            f"Goodput against offered rate, per arm, {trace}",
        )
        for trace, points in rate_points(found, capacities).items()
        if len({rate for line in points.values() for rate, _ in line}) > 1
    ]
    return "\n".join(["<h2>Goodput against rate</h2>", *pictures]) if pictures else ""


def rate_points(
    found: Comparison, capacities: list[Capacity]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By trace and arm: requests a second offered, and of those that met the SLO."""
    traces = {w["name"]: str(w["origin"].get("trace")) for w in found.description["workloads"]}
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for workload in found.workloads:
        lines = points.setdefault(traces[workload], {})
        for arm in found.arms:
            for _, record in found.records(arm, workload):
                met = sum(found.slo.met(outcome) for outcome in record.outcomes)
                point = record.row["offered_rate"], met / record.row["duration"]
                lines.setdefault(arm, []).append(point)
    for capacity in capacities:
        lines = points.setdefault(traces.get(capacity.workload, capacity.workload), {})
        lines.setdefault(capacity.arm, []).extend(capacity.goodputs)
    return points


def _capacity_section(capacities: list[Capacity]) -> str:
    rows = capacity_table(capacities)
    return "<h2>Sustained capacity</h2>" + _table(rows) if rows else ""


def capacity_table(capacities: list[Capacity]) -> tables.Table:
    """The highest rate at which each arm kept the SLO."""
    rows = [
        ["workload", "arm", "capacity (requests/s)", "first rate that failed", "attainment wanted"]
    ]
    for found in capacities:
        kept = "below the search" if found.sustained is None else f"{found.sustained:.3g}"
        failed = "none tried" if found.failed is None else f"{found.failed:.3g}"
        rows.append([found.workload, found.arm, kept, failed, f"{found.wanted:.0%}"])
    return rows if capacities else []


def _markdown(found: Comparison, capacities: list[Capacity]) -> str:
    parts = [f"# {found.plan.name}", *(f"- {note}" for note in notes(found))]
    parts += ["", tables.markdown(tables.arms_table(found))]
    if control := tables.control_table(found):
        parts += ["", tables.markdown(control)]
    for workload in found.workloads:
        parts += ["", f"## {workload}", "", describe_workload(found, workload)]
        parts += ["", tables.markdown(tables.measures_table(found, workload))]
        if ratios := tables.ratios_table(found, workload):
            parts += ["", tables.markdown(ratios)]
    if rows := capacity_table(capacities):
        parts += ["", "## Sustained capacity", "", tables.markdown(rows)]
    return "\n".join(parts) + "\n"


def _table(rows: tables.Table, css: str = "") -> str:
    if not rows:
        return ""
    header, *body = rows
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body
    )
    return (
        f'<div class="wide"><table class="{css}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _image(url: str, text: str) -> str:
    text = html.escape(text)
    return f'<figure><img src="{url}" alt="{text}"><figcaption>{text}.</figcaption></figure>'
