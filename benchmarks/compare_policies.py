"""Simulate every policy on real traces: the tables of docs/policies.md, and quiet hours.

    python -m benchmarks.compare_policies tables FOLDER [--record]  # Markdown
    python -m benchmarks.compare_policies quiet FOLDER [--record]   # false entries

FOLDER holds the traces `azure_conv_2023.csv`, `azure_code_2023.csv` and `burstgpt_segment_72s.csv`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.acceptance import ACCEPTANCE, Row, upsert
from benchmarks.readme_table import write_section
from sglang_morph.bench.traces import TraceRequest, read_trace
from sglang_morph.bench.window import Window, cut, scale
from sglang_morph.demo.provenance import provenance
from sglang_morph.policy_cli.profile import load_profile
from sglang_morph.policy_cli.simulation import Simulation
from sglang_morph.policy_cli.spec import parse_spec
from sglang_morph.policy_cli.tables import Slo, markdown_table
from sglang_morph.policy_cli.trial import Workload, load_requests, run_trials

POLICIES_PAGE = Path(__file__).parents[1] / "docs" / "policies.md"
BEGIN = "<!-- tables: written by python -m benchmarks.compare_policies tables FOLDER --record -->"
END = "<!-- end of tables -->"
PROFILE = "h200-llama-8b"
POLICIES = (
    "full",
    "low",
    "threshold:mode=accuracy",
    "threshold",
    "threshold:mode=performance",
    "two_mode",
    "slo",
)
SLO = Slo(ttft_s=2.0)
QUIET_RATES = (0.05, 0.1, 0.2)
"""Requests a second, at most 2% of what level 0 completes."""
QUIET_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """A trace at a rate."""

    title: str
    file: str
    rate: float
    token_factor: float = 1.0


CASES = (
    Case("Azure conversation 2023, the whole hour", "azure_conv_2023.csv", 11.0),
    Case("Azure code 2023, the whole hour", "azure_code_2023.csv", 4.0),
    Case("BurstGPT, the 72 s segment, tokens x 8", "burstgpt_segment_72s.csv", 6.0, 8.0),
)
"""At rates near what level 0 can serve; BurstGPT's requests are short for this server."""


def tables(folder: Path) -> tuple[str, int]:
    """The tables, and the most transitions of any policy within a minute."""
    profile, specs = load_profile(PROFILE), [parse_spec(text) for text in POLICIES]
    parts, worst = [], 0
    for case in CASES:
        requests, note = load_requests(
            Workload(folder / case.file, rate=case.rate, token_factor=case.token_factor)
        )
        summaries = [trial.summary for trial in run_trials(profile, specs, requests, SLO)]
        worst = max(worst, *(summary.max_transitions_per_minute for summary in summaries))
        parts.append(f"**{case.title}**, {note}:\n\n{markdown_table(summaries)}")
    return "\n\n".join(parts), worst


def quiet(folder: Path, minutes: float) -> tuple[int, float]:
    """Entries of the default policy in `minutes` of low load, and the minutes simulated.

    Every round takes the traces at the next rate, thinned by another seed and then stretched, so
    no two rounds are the same.
    """
    traces = [read_trace(folder / case.file).requests for case in CASES]
    entries, simulated, seed = 0, 0.0, 0
    while simulated < minutes:
        for requests in traces:
            window = _quiet_window(requests, QUIET_RATES[seed % len(QUIET_RATES)], seed)
            profile, spec = load_profile(PROFILE), parse_spec("threshold")
            policy = spec.create(profile.top_level)
            simulation = Simulation(profile, policy, window.requests, tick_s=QUIET_TICK_S)
            outcome = simulation.run()
            entries += sum(t.target > t.source for t in outcome.transitions)
            simulated += outcome.duration_s / 60
        seed += 1
    return entries, simulated


def _quiet_window(requests: list[TraceRequest], rate: float, seed: int) -> Window:
    kept = scale(cut(requests, 0.0, None), 0.8, "thin", seed)
    return scale(kept, rate / kept.rate, "stretch", seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("tables", "quiet"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=100_000.0)
    parser.add_argument("--record", action="store_true", help="write acceptance.json, and the docs")
    arguments = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.compare_policies", *sys.argv[1:]])
    if arguments.what == "tables":
        text, worst = tables(arguments.folder)
        print(text)
        if arguments.record:
            write_section(POLICIES_PAGE, text, BEGIN, END)
        row = _transitions_row(worst, command)
    else:
        began = time.perf_counter()
        entries, minutes = quiet(arguments.folder, arguments.minutes)
        passed = time.perf_counter() - began
        print(f"{entries} entries in {minutes:,.0f} quiet minutes, simulated in {passed:.0f} s")
        row = _entries_row(entries, minutes, command)
    if arguments.record:
        upsert([row], ACCEPTANCE)
    return 0 if row.holds else 1


def _transitions_row(worst: int, command: str) -> Row:
    return Row(
        name="controller.max_transitions_per_minute",
        value=worst,
        unit="transitions",
        bar="<= 12",
        holds=worst <= 12,
        **asdict(provenance(command)),
    )


def _entries_row(entries: int, minutes: float, command: str) -> Row:
    return Row(
        name="controller.false_entries_per_100k_quiet_minutes",
        value=round(entries * 100_000 / minutes, 2),
        unit="entries",
        bar="= 0",
        holds=entries == 0,
        **asdict(provenance(command)),
    )


if __name__ == "__main__":
    sys.exit(main())
